"""Both rings against a plain queue, for any order of calls and record sizes that fall around the end. [R6] [R7]

A model of the room is part of it: what is refused must be what really does not fit, not only what is taken be right.
"""

import itertools
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from glm53d import _native
from glm53d.errors import PeerGone

CAPACITY = 256  # small: a few records reach the end
LONGEST = CAPACITY // 2 - 8
WORLD = 3

# Around the multiples of 8 where padding changes, and around what a ring of this size just takes.
lengths = st.one_of(st.integers(0, 40), st.integers(LONGEST - 20, LONGEST))
records = st.tuples(st.integers(1, 0xFFFE), lengths, st.integers(0, 255)).map(lambda r: (r[0], bytes([r[2]]) * r[1]))


class RingMachine(RuleBasedStateMachine):
    """num_readers live readers, each with the queue of what it has still to see."""

    num_readers = 1

    def __init__(self):
        super().__init__()
        segment = _native.Segment.create("test", _native.ring_segment_bytes(CAPACITY, self.num_readers))
        _native.ring_init(segment, WORLD, self.num_readers)
        self.segment = segment
        self.writer = _native.RingWriter(segment, WORLD)
        self.readers = {i: _native.RingReader(segment, WORLD, i) for i in range(self.num_readers)}
        self.unseen: dict[int, deque] = {i: deque() for i in self.readers}  # (record, where it ends)
        self.appended: list[tuple[tuple[int, bytes], int]] = []
        self.tail = 0  # of what was appended
        self.heads = dict.fromkeys(self.readers, 0)

    def end_of(self, record: tuple[int, bytes]) -> int:
        """Where the record would end: behind the wrap mark when the rest before the end is too short for it."""
        taken = 8 + (len(record[1]) + 7) // 8 * 8
        rest = CAPACITY - self.tail % CAPACITY
        return self.tail + taken + (rest if taken > rest else 0)

    @precondition(lambda self: self.readers)
    @rule(record=records, cuts=st.lists(st.integers(0, LONGEST), max_size=3))
    def append(self, record, cuts):
        kind, data = record
        cuts = [0, *sorted(cut for cut in cuts if cut <= len(data)), len(data)]
        parts = [data[a:b] for a, b in itertools.pairwise(cuts)]
        end = self.end_of(record)
        fits = end - min(self.heads.values()) <= CAPACITY
        assert self.writer.try_append(kind, parts) == fits
        if fits:
            self.appended.append((record, end))
            self.tail = end

    @rule()
    def publish(self):
        self.writer.publish()
        for queue in self.unseen.values():
            queue.extend(self.appended)
        self.appended.clear()

    @rule(data=st.data(), max_records=st.integers(1, 5))
    def read(self, data, max_records):
        if not self.readers:
            return
        i = data.draw(st.sampled_from(sorted(self.readers)))
        expected = [self.unseen[i].popleft() for _ in range(min(max_records, len(self.unseen[i])))]
        if expected:
            assert self.readers[i].wait(0, 0)
            self.heads[i] = expected[-1][1]
        assert self.readers[i].read_all(max_records) == [record for record, _ in expected]

    @invariant()
    def the_free_bytes_are_those_behind_the_slowest_live_reader(self):
        free = CAPACITY - (self.tail - min(self.heads.values())) if self.heads else 0
        assert self.writer.free_bytes == free


class BroadcastMachine(RingMachine):
    """Three readers, of which any may die."""

    num_readers = 3

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def kill(self, data):
        i = data.draw(st.sampled_from(sorted(self.readers)))
        _native.mark_reader_gone(self.segment, WORLD, i)
        del self.readers[i], self.unseen[i], self.heads[i]

    @precondition(lambda self: not self.readers)
    @rule(record=records)
    def append_for_nobody(self, record):
        with pytest.raises(PeerGone):
            while True:  # what is still free may be filled
                assert self.writer.try_append(record[0], [record[1]])


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=100, stateful_step_count=50)
TestBroadcast = BroadcastMachine.TestCase
TestBroadcast.settings = settings(max_examples=100, stateful_step_count=50)


@given(st.lists(records, max_size=60))
def test_a_reader_that_follows_at_once_sees_each_record_as_it_was_written(sent):
    segment = _native.Segment.create("test", _native.ring_segment_bytes(CAPACITY))
    _native.ring_init(segment, WORLD)
    writer, reader = _native.RingWriter(segment, WORLD), _native.RingReader(segment, WORLD)
    for kind, data in sent:  # an empty ring takes any record, wherever its head stands
        assert writer.try_write(kind, [data])
        assert reader.read() == (kind, data)
    assert reader.read() is None
    writer.close()
    with pytest.raises(PeerGone):
        reader.wait(0, 10**9)
