"""Ranks killed while they use their channels: what they published arrives, nobody waits for ever. [R5] [R6] [R7]

native/tests/test_ring_kill.cc kills far more often; here it is the Python ends, over a real spawn.
"""

import multiprocessing
import os
import random
import signal
import threading
import time

import pytest

from glm53d._native import RingReader, RingWriter
from glm53d.errors import PeerGone
from glm53d.ipc.channels import Channels

WORLD = 11
RING_BYTES = 1 << 16
SECOND = 10**9
PATIENCE = 60 * SECOND  # guards the suite, not a claim

spawn = multiprocessing.get_context("spawn")


def record(n: int) -> bytes:
    """Record n: its length and content follow from n, so a torn, lost or repeated one shows."""
    return n.to_bytes(8, "little") * (1 + n * 7919 % 600)


def write_for_ever(writer: RingWriter) -> None:
    n = 0
    while True:
        while not writer.try_append(4, [record(n)]):
            writer.publish()
        if n % 3 == 0:  # so that a kill may fall between append and publish
            writer.publish()
        n += 1


def read_to_the_end(reader: RingReader) -> int:
    """How many records came before PeerGone; each is checked."""
    n = 0
    try:
        while reader.wait(0, PATIENCE):
            for kind, data in reader.read_all():
                assert (kind, data) == (4, record(n))
                n += 1
    except PeerGone:
        return n
    raise AssertionError("the reader was never told that its writer is gone")


def leader(channels: Channels) -> None:
    write_for_ever(channels.leader_ends().outputs)


def follower(channels: Channels, rank: int) -> None:
    """Answers how much it has read, after each wake and at the end."""
    ends = channels.follower_ends(rank)
    n = 0
    try:
        while ends.batches.wait(0, PATIENCE):
            for kind, data in ends.batches.read_all():
                assert (kind, data) == (4, record(n))
                n += 1
            ends.results.try_write(7, [n.to_bytes(8, "little")])
    except PeerGone:
        return


def kill(process) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL


def start(target, *args):
    process = spawn.Process(target=target, args=args, daemon=True)
    process.start()
    return process


@pytest.mark.parametrize("longest_s", [0.0, 0.02, 0.2])
def test_all_that_a_killed_leader_published_arrives_whole(longest_s):
    channels = Channels.create(WORLD, num_ranks=1, attn_dp_size=1, ring_bytes=RING_BYTES)
    reader = RingReader(channels.main_ends().outputs, WORLD)
    process = start(leader, channels)
    assert reader.wait(0, PATIENCE)
    taken: list[int] = []
    thread = threading.Thread(target=lambda: taken.append(read_to_the_end(reader)))
    thread.start()  # it reads, and falls asleep, while the leader is killed
    time.sleep(random.uniform(0, longest_s))
    kill(process)
    channels.mark_gone(0)
    thread.join(PATIENCE / SECOND)
    assert taken and taken[0] > 0


def test_the_other_follower_goes_on_when_one_is_killed():
    channels = Channels.create(WORLD, num_ranks=3, attn_dp_size=1, ring_bytes=RING_BYTES)
    ends = channels.leader_ends()
    followers = [start(follower, channels, rank) for rank in (1, 2)]
    n = 0
    while n < 500:
        n += ends.batches.try_append(4, [record(n)])
        ends.batches.publish()
    kill(followers[0])
    while ends.batches.try_append(4, [record(n)]):  # the dead one keeps the ring full
        n += 1
    ends.batches.publish()
    channels.mark_gone(1)
    for _ in range(500):
        while not ends.batches.try_append(4, [record(n)]):
            time.sleep(0.001)
        n += 1
        ends.batches.publish()
    ends.batches.close()
    followers[1].join()
    assert followers[1].exitcode == 0
    assert ends.results[1].read_all(1 << 20)[-1] == (7, n.to_bytes(8, "little"))
    with pytest.raises(PeerGone):
        for _ in range(1 << 20):  # the answers of the dead one end
            if ends.results[0].wait(0, PATIENCE):
                ends.results[0].read_all()


def test_a_writer_learns_that_its_only_reader_was_killed():
    channels = Channels.create(WORLD, num_ranks=2, attn_dp_size=1, ring_bytes=RING_BYTES)
    ends = channels.leader_ends()
    process = start(follower, channels, 1)
    assert ends.batches.try_write(4, [record(0)])
    assert ends.results[0].wait(0, PATIENCE)  # it has read, and sleeps
    kill(process)
    channels.mark_gone(1)
    with pytest.raises(PeerGone):
        while ends.batches.try_write(4, [record(1)]):
            pass


def test_a_signal_ends_a_sleep_so_that_its_handler_runs():
    channels = Channels.create(WORLD, num_ranks=1, attn_dp_size=1, ring_bytes=RING_BYTES)
    requests = channels.leader_ends().requests
    arrived: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: arrived.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)  # again and again: the first may come before the sleep begins
        start = time.monotonic_ns()
        assert not requests.wait(0, PATIENCE)
        assert arrived and time.monotonic_ns() - start < PATIENCE
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_no_segment_has_a_name_that_could_stay_behind():
    channels = Channels.create(WORLD, num_ranks=2, attn_dp_size=1, ring_bytes=RING_BYTES)
    for name, segment in channels.segments.items():
        assert os.readlink(f"/proc/self/fd/{segment.fd}") == f"/memfd:glm53d-{name} (deleted)"
