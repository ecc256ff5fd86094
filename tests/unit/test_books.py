"""Page pool, books and token log."""

import numpy as np
import pytest

from glm53d._native import TokenLog
from glm53d.kv import books
from glm53d.kv.pages import PagePool
from glm53d.kv.prefix import PrefixTree


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def some_hashes(n: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 1 << 63, (n, 2), np.uint64)


def test_pages_come_lowest_first_and_all_or_nothing():
    pool = PagePool(4)
    assert pool.alloc(3).tolist() == [0, 1, 2]
    assert pool.alloc(2) is None
    assert pool.num_free == 1
    pool.free(i32(1))
    assert sorted(pool.alloc(2).tolist()) == [1, 3]


def test_freeing_a_free_page_raises_in_debug():
    """[R13]"""
    pool = PagePool(4, debug=True)
    pages = pool.alloc(2)
    pool.free(pages[:1])
    with pytest.raises(RuntimeError, match=r"freed twice: pages \[0\]"):
        pool.free(pages[:1])
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.free(i32(1, 1))


def test_more_free_pages_than_there_are_raises_without_debug():
    pool = PagePool(4)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.free(i32(0))


def test_books_balance_with_pages_in_all_three_places():
    """[R31]"""
    pool, tree = PagePool(10), PrefixTree()
    cached, owned = pool.alloc(3), pool.alloc(2)
    tree.insert(0, some_hashes(3), cached, 1)
    books.check(pool, tree, owned)


def test_books_name_a_lost_page_and_one_in_two_places():
    """[R31]"""
    pool, tree = PagePool(10), PrefixTree()
    cached, owned = pool.alloc(3), pool.alloc(2)
    tree.insert(0, some_hashes(3), cached, 1)
    with pytest.raises(RuntimeError, match="page 4 lost"):
        books.check(pool, tree, owned[:1])
    with pytest.raises(RuntimeError, match="page 2 in tree x1 and owned x1"):
        books.check(pool, tree, np.append(owned, cached[2]))
    with pytest.raises(RuntimeError, match="page 3 in owned x2"):
        books.check(pool, tree, np.append(owned, owned[0]))
    with pytest.raises(RuntimeError, match="outside the pool of 10"):
        books.check(pool, tree, np.append(owned, i32(10)))


def test_a_token_log_appends_each_rows_accepted_ids_and_the_counts_grow():
    log, seq_len, num_output, token_ns = TokenLog(3), np.array([5, 0, 0]), np.array([0, 0, -2]), np.array([0, 0, 40])
    log.advance(i32(2), i32(2), np.array([[1, 2]], np.int32), seq_len, num_output, token_ns, 40)
    ids = np.array([[3, -1], [8, 9]], np.int32)
    assert log.advance(i32(2, 0), i32(1, 2), ids, seq_len, num_output, token_ns, 100) == (3, 60)
    assert token_ns.tolist() == [100, 0, 100]
    assert (log.get(2).tolist(), log.get(0).tolist(), log.length(1)) == ([1, 2, 3], [8, 9], 0)
    assert (seq_len.tolist(), num_output.tolist()) == ([7, 0, 3], [2, 0, 1])
    assert log.get(2, 1).tolist() == [2, 3]
    log.clear(2)
    assert log.length(2) == 0


def test_a_token_log_refuses_a_bad_row_and_takes_none():
    log, counts = TokenLog(2), (np.zeros(2, np.int64), np.zeros(2, np.int64), np.zeros(2, np.int64))
    with pytest.raises(IndexError, match="slot"):
        log.advance(i32(0, 2), i32(1, 1), np.zeros((2, 1), np.int32), *counts, 1)
    with pytest.raises(ValueError, match="width"):
        log.advance(i32(0), i32(2), np.zeros((1, 1), np.int32), *counts, 1)
    with pytest.raises(ValueError, match="length"):
        log.advance(i32(0, 1), i32(1), np.zeros((1, 1), np.int32), *counts, 1)
    assert log.length(0) == 0 and not counts[0].any()
