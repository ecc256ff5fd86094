"""The native prefix tree against a dictionary of prefixes, under any order of calls. [R27] [R13]"""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from glm53d._native import page_hashes
from glm53d.kv import books
from glm53d.kv.pages import PagePool
from glm53d.kv.prefix import PrefixTree

PAGES = 24
# Page contents: two kinds make every sort of overlap; a few prompts that come again and again make last use matter.
prompts = st.sampled_from([[0], [1], [0, 0], [0, 1, 1], [1, 1, 0, 1]]) | st.lists(st.integers(0, 1), max_size=8)


def hashes_of(prompt: list[int]) -> np.ndarray:
    return page_hashes(np.array(prompt, np.int32), 1, bytes(16), b"")


class TreeMachine(RuleBasedStateMachine):
    """Model: `cached`, prefix -> page, and `locks`, a list of (node, prefix).

    What evict() drops must be a leaf that nobody locks, in the order in which the prefixes were last used.
    """

    def __init__(self):
        super().__init__()
        self.pool, self.tree = PagePool(PAGES, debug=True), PrefixTree()
        self.cached: dict[tuple[int, ...], int] = {}
        self.used: dict[tuple[int, ...], int] = {}
        self.locks: list[tuple[int, tuple[int, ...]]] = []
        self.now = 0

    def cached_len(self, prompt: list[int]) -> int:
        n = 0
        while n < len(prompt) and tuple(prompt[: n + 1]) in self.cached:
            n += 1
        return n

    def prefix_pages(self, prefix: tuple[int, ...]) -> list[int]:
        return [self.cached[prefix[: i + 1]] for i in range(len(prefix))]

    def use(self, prefix: tuple[int, ...]) -> None:
        for i in range(len(prefix)):
            self.used[prefix[: i + 1]] = self.now

    def locked(self) -> set[tuple[int, ...]]:
        return {prefix[: i + 1] for _, prefix in self.locks for i in range(len(prefix))}

    def evicted(self, n: int) -> np.ndarray:
        """The pages that evict() dropped, each with the hash of its prefix."""
        by_page = {page: prefix for prefix, page in self.cached.items()}
        pages, hashes = self.tree.evict(n)
        assert [hashes_of(list(by_page[page]))[-1].tolist() for page in pages.tolist()] == hashes.tolist()
        return pages

    def dropped(self, pages: np.ndarray) -> None:
        """Take what evict() returned out of the model, checking each page as it goes."""
        by_page = {page: prefix for prefix, page in self.cached.items()}
        for page in pages.tolist():
            prefix = by_page[page]
            assert prefix not in self.locked()
            assert not any(other[:-1] == prefix for other in self.cached)
            del self.cached[prefix]
            del self.used[prefix]
        self.pool.free(pages)

    @rule(prompt=prompts, keep=st.sampled_from([False, False, True]))
    def match_and_insert(self, prompt, keep):
        self.now += 1
        num_pages, node = self.tree.match(hashes_of(prompt), self.now)
        assert num_pages == self.cached_len(prompt)
        assert self.tree.pages(node).tolist() == self.prefix_pages(tuple(prompt[:num_pages]))
        self.use(tuple(prompt[:num_pages]))
        fresh = self.pool.alloc(len(prompt) - num_pages)
        if fresh is None:
            prompt = prompt[:num_pages]
        else:
            node, owned = self.tree.insert(node, hashes_of(prompt)[num_pages:], fresh, self.now)
            assert owned.tolist() == fresh.tolist()
            self.cached |= {tuple(prompt[: num_pages + i + 1]): int(page) for i, page in enumerate(owned)}
            self.use(tuple(prompt))
        if keep:
            self.tree.lock(node)
            self.locks.append((node, tuple(prompt)))

    @rule(prompt=prompts)
    def insert_from_the_root_keeps_the_trees_own_pages(self, prompt):
        self.now += 1
        mine = self.pool.alloc(len(prompt))
        if mine is None:
            return
        node, owned = self.tree.insert(0, hashes_of(prompt), mine, self.now)
        self.pool.free(mine[owned != mine])
        for i, page in enumerate(owned.tolist()):
            assert page == self.cached.get(tuple(prompt[: i + 1]), int(mine[i]))
            self.cached[tuple(prompt[: i + 1])] = page
        self.use(tuple(prompt))
        assert self.tree.pages(node).tolist() == owned.tolist()

    @rule(prompt=prompts)
    def peek_changes_nothing(self, prompt):
        nodes = self.tree.num_nodes
        assert self.tree.peek(hashes_of(prompt)) == self.cached_len(prompt)
        assert self.tree.num_nodes == nodes

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data):
        node, _ = self.locks.pop(data.draw(st.integers(0, len(self.locks) - 1)))
        self.tree.unlock(node)

    @rule(n=st.one_of(st.integers(0, 3), st.integers(0, PAGES)))
    def evict(self, n):
        free_before = set(self.cached) - self.locked()
        pages = self.evicted(n)
        assert len(pages) == min(n, len(free_before))
        uses = {page: self.used[prefix] for prefix, page in self.cached.items()}
        order = [uses[page] for page in pages.tolist()]
        kept_leaves = [p for p in free_before if not any(q[:-1] == p for q in self.cached)]
        self.dropped(pages)
        assert order == sorted(order)
        assert all(self.used[p] >= max(order, default=0) for p in kept_leaves if p in self.cached)

    @rule()
    def evict_all(self):
        self.dropped(self.evicted(self.tree.evictable_pages))
        assert set(self.cached) == self.locked()

    @invariant()
    def everything_balances(self):
        books.check(self.pool, self.tree, np.empty(0, np.int32))
        assert self.tree.num_pages == len(self.cached)
        assert self.tree.evictable_pages == len(self.cached) - len(self.locked())
        for node, prefix in self.locks:
            assert self.tree.pages(node).tolist() == self.prefix_pages(prefix)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def insert(tree: PrefixTree, prompt: list[int], first_page: int, now: int) -> int:
    pages = np.arange(first_page, first_page + len(prompt), dtype=np.int32)
    return tree.insert(0, hashes_of(prompt), pages, now)[0]


def test_the_leaf_used_longest_ago_goes_first_each_from_its_tail():
    tree = PrefixTree()
    insert(tree, [0, 0, 0], 0, now=1)
    insert(tree, [1, 1], 10, now=2)
    tree.match(hashes_of([0, 0, 0]), now=3)
    assert tree.evict(3)[0].tolist() == [11, 10, 2]
    assert tree.evict(9)[0].tolist() == [1, 0]


def test_a_front_that_was_used_outlives_the_rest_of_its_run():
    tree = PrefixTree()
    insert(tree, [0, 0, 0, 0], 0, now=1)
    insert(tree, [1], 10, now=2)
    tree.match(hashes_of([0, 0, 1]), now=3)
    assert tree.evict(3)[0].tolist() == [3, 2, 10]


def test_what_is_before_a_used_leaf_counts_as_used_with_it():
    tree = PrefixTree()
    node = insert(tree, [0], 0, now=1)
    insert(tree, [1], 10, now=2)
    tree.insert(node, hashes_of([0, 0])[1:], np.array([1], np.int32), 3)  # without a match of [0] before
    assert tree.evict(3)[0].tolist() == [10, 1, 0]


def test_a_node_keeps_id_and_lock_when_a_match_splits_it():
    tree = PrefixTree()
    node = insert(tree, [0, 0, 0], 0, now=1)
    tree.lock(node)
    num_pages, front = tree.match(hashes_of([0, 1]), now=2)
    assert (num_pages, front != node) == (1, True)
    assert (tree.pages(front).tolist(), tree.pages(node).tolist()) == ([0], [0, 1, 2])
    assert (tree.evictable_pages, tree.num_pages, tree.evict(9)[0].tolist()) == (0, 3, [])
    tree.unlock(node)
    assert tree.evict(9)[0].tolist() == [2, 1, 0]


def test_nodes_and_arrays_that_do_not_fit_are_refused():
    tree = PrefixTree()
    node = insert(tree, [0], 0, now=1)
    with pytest.raises(RuntimeError, match=f"node {node} is not locked"):
        tree.unlock(node)
    tree.evict(1)
    with pytest.raises(ValueError, match=f"node {node} is not in the tree"):
        tree.lock(node)
    with pytest.raises(ValueError, match="length"):
        tree.insert(0, hashes_of([0, 1]), np.zeros(1, np.int32), 1)
    with pytest.raises(TypeError):
        tree.match(hashes_of([0]).astype(np.int64), 1)
