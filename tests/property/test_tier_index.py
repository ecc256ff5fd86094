"""The native index of a slower tier against a dictionary in order of use, under any order of calls. [R32]"""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from glm53d.kv.tier import TierIndex

CAPACITY = 6
names = st.lists(st.integers(0, 11), max_size=8, unique=True)


def hashes_of(pages: list[int]) -> np.ndarray:
    return np.array([(page * 64, 3) for page in pages], np.uint64).reshape(-1, 2)  # some share a bucket


def i32(*entries: int) -> np.ndarray:
    return np.array(entries, np.int32)


class IndexMachine(RuleBasedStateMachine):
    """Model: `ready`, page -> entry, least recently used first; `pins`, page -> how many; `filling`, page -> entry."""

    def __init__(self):
        super().__init__()
        self.index = TierIndex(CAPACITY)
        self.ready: dict[int, int] = {}
        self.pins: dict[int, int] = {}
        self.filling: dict[int, int] = {}
        self.condemned: dict[int, int] = {}

    def use(self, page: int) -> None:
        self.ready[page] = self.ready.pop(page)

    def in_use(self) -> set[int]:
        return {*self.ready, *self.filling, *self.condemned}

    @rule(pages=names, filling=st.booleans())
    def add(self, pages, filling):
        entries, dropped = self.index.add(hashes_of(pages), filling)
        wanted = [page for page in pages if page not in self.in_use()]
        free = CAPACITY - len(self.in_use())
        idle = [page for page in self.ready if page not in self.pins and page not in pages]
        fits = wanted[max(0, len(wanted) - free - len(idle)) :]
        gone = idle[: max(0, len(fits) - free)]
        assert [page for page, entry in zip(pages, entries.tolist(), strict=True) if entry >= 0] == fits
        assert dropped[:, 0].tolist() == [page * 64 for page in gone]
        for page in gone:
            del self.ready[page]
        for page, entry in zip(pages, entries.tolist(), strict=True):
            if entry >= 0:
                assert entry not in [*self.ready.values(), *self.filling.values(), *self.condemned.values()]
                (self.filling if filling else self.ready)[page] = entry
            elif page in self.ready and page not in self.pins:
                self.use(page)

    @rule(pages=names)
    def find_and_count(self, pages):
        found = self.index.find(hashes_of(pages)).tolist()
        assert found == [self.ready.get(page, -1) for page in pages]
        assert self.index.count(hashes_of(pages)) == ([*found, -1]).index(-1)

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def pin(self, data):
        page = data.draw(st.sampled_from(list(self.ready)))
        self.index.pin(i32(self.ready[page]))
        self.pins[page] = self.pins.get(page, 0) + 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data(), condemn=st.booleans())
    def unpin(self, data, condemn):
        page = data.draw(st.sampled_from(list(self.pins)))
        entry = self.ready[page] if page in self.ready else self.condemned[page]
        if condemn and page in self.ready:
            self.index.condemn(i32(entry))
            self.condemned[page] = self.ready.pop(page)
        self.index.unpin(i32(entry))
        self.pins[page] -= 1
        if self.pins[page] == 0:
            del self.pins[page]
            self.condemned.pop(page, None)
            if page in self.ready:
                self.use(page)

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), filled=st.booleans())
    def settle(self, data, filled):
        page = data.draw(st.sampled_from(list(self.filling)))
        entry = self.filling.pop(page)
        self.index.settle(entry, filled)
        if filled:
            self.ready[page] = entry

    @rule()
    def clear(self):
        gone = [page for page in self.ready if page not in self.pins]
        assert self.index.clear()[:, 0].tolist() == [page * 64 for page in gone]
        for page in gone:
            del self.ready[page]

    @invariant()
    def the_books_balance(self):
        self.index.check()
        assert len(self.index) == len(self.in_use())
        assert self.index.num_pinned == len(self.pins) + len(self.filling)


IndexMachine.TestCase.settings = settings(max_examples=settings().max_examples, stateful_step_count=40, deadline=None)
TestIndex = IndexMachine.TestCase
