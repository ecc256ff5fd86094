"""Record layouts and channels: C++ and Python agree, the topology is complete. [R2] [R10]"""

import pickle
import struct
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest

from glm53d import _native
from glm53d.errors import AbiMismatch, IpcError, PeerGone
from glm53d.ipc import records
from glm53d.ipc.batch import Batch, Logprobs, StepResult
from glm53d.ipc.channels import Channels, plan

RING_BYTES = 1 << 16
WORLD = 0x5151


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


# As records.h asserts them: both sides say the numbers, so that neither changes them alone.
@pytest.mark.parametrize(
    ("dtype", "size", "offsets"),
    [
        (records.GENERATE, 184, {"num_prompt_ids": 72, "temperature": 160}),
        (records.ABORT, 8, {"handle": 0}),
        (records.CONTROL, 16, {"op": 8}),
        (records.CONTROL_RESULT, 24, {"value": 16}),
        (records.OUTPUT, 128, {"held_bytes": 28, "inbox_ns": 72}),
        (records.BIAS, 8, {"bias": 4}),
        (records.LOGPROB, 8, {"logprob": 4}),
        (records.SLOT_INIT, 40, {"temperature": 16}),
        (records.TABLE_INIT, 24, {"repetition_penalty": 20}),
        (records.BATCH, 80, {"num_rows": 16}),
        (records.PAGE_MOVE, 40, {"kind": 16, "id": 36}),
        (records.RESULT, 56, {"width": 36}),
        (records.LOAD_ROW, 360, {"pages_total": 56}),
        (records.RANK_ROW, 624, {"phase": 80, "last_words": 112}),
    ],
)
def test_a_dtype_has_the_size_and_offsets_of_the_struct(dtype, size, offsets):
    assert dtype.itemsize == size
    assert {name: dtype.fields[name][1] for name in offsets} == offsets


@pytest.mark.parametrize("name", sorted(_native.record_layouts()))
def test_fields_follow_one_another_without_padding_or_overlap(name):
    layout = _native.record_layouts()[name]
    end = 0
    for _, fmt, offset in layout.fields:
        assert offset == end
        end += np.dtype(fmt).itemsize
    assert end == layout.size


def test_native_code_writes_the_bytes_that_numpy_reads():
    segment = _native.Segment.create("test", _native.ring_segment_bytes(RING_BYTES))
    _native.ring_init(segment, WORLD)
    writer, reader = _native.RingWriter(segment, WORLD), _native.RingReader(segment, WORLD)
    heads = np.zeros(2, records.OUTPUT)
    heads["handle"], heads["num_ids"], heads["matched_id"] = [1 << 40, 7], [3, 0], -1
    assert writer.try_append_outputs(heads, ids(10, 11, 12)) == 2
    writer.publish()
    (kind, first), (_, second) = reader.read_all()
    assert kind == records.RecordType.OUTPUT
    assert np.frombuffer(first, records.OUTPUT, 1)[0] == heads[0]
    assert np.frombuffer(first, np.int32, offset=records.OUTPUT.itemsize).tolist() == [10, 11, 12]
    assert second == heads[1].tobytes()
    assert struct.unpack_from("<QIIIi", first) == (1 << 40, 0, 3, 0, -1)


def test_a_batch_and_a_result_survive_encoding():
    batch = Batch(9, WORLD, ids(4, 2, 8), ids(0, 0, 1), ids(0, 5, 6), ids(3, 1, 1), ids(0, 1, 3), ids(1, 2, 3, 4, -1))
    batch.inits = np.zeros(1, records.SLOT_INIT)
    batch.inits["seed"] = 1 << 63
    batch.run_slot, batch.run_start, batch.run_count, batch.pages = ids(4), ids(0), ids(3), ids(9, 8, 7)
    batch.dp_num_tokens = ids(4, 1)
    batch.tables = np.zeros(1, records.TABLE_INIT)
    batch.tables["base_bias"] = -np.inf
    batch.bias_row, batch.bias_id, batch.bias = ids(2, 2, 2), ids(7, 8, 9), np.array([0.5, -1, 2], np.float32)
    batch.said_row, batch.said_id, batch.said = ids(2), ids(8), ids(3)
    batch.top_logprobs, batch.targets = ids(-1, 20, 0), ids(2, 3, -1, -1, -1)
    copy = Batch.decode(batch.encode())
    assert (copy.step, copy.world_id) == (9, WORLD)
    for name in Batch.__slots__[2:]:
        np.testing.assert_array_equal(getattr(copy, name), getattr(batch, name), strict=True)
    result = StepResult(9, ids(1, 0, 1), np.arange(6, dtype=np.int32).reshape(3, 2), 100, 200)
    copied = StepResult.decode(result.encode(WORLD))
    assert (copied.step, copied.start_ns, copied.end_ns) == (9, 100, 200)
    np.testing.assert_array_equal(copied.counts, result.counts, strict=True)
    np.testing.assert_array_equal(copied.ids, result.ids, strict=True)
    assert copied.logprobs is None
    pairs = np.zeros((3, 2), records.LOGPROB)
    pairs["id"], pairs["logprob"] = np.arange(6).reshape(3, 2), -0.5
    result.logprobs = Logprobs(ids(1, 1, 2), pairs)
    found = StepResult.decode(result.encode(WORLD)).logprobs
    np.testing.assert_array_equal(found.rows, ids(1, 1, 2), strict=True)
    np.testing.assert_array_equal(found.pairs, pairs, strict=True)


def test_parts_that_a_batch_does_not_have_are_nobodys_to_write_to_and_take_no_room():
    batch = Batch(9, WORLD)
    assert len(batch.encode()) == records.BATCH.itemsize
    parts = Batch.decode(batch.encode())._tail() + batch._tail()
    assert len(parts) == 2 * (len(Batch.__slots__) - 4)
    assert not any(part.size or part.flags.writeable for part in parts)


def test_wrong_arguments_raise_and_leave_the_ring_as_it_was():
    segment = _native.Segment.create("test", _native.ring_segment_bytes(RING_BYTES))
    _native.ring_init(segment, WORLD)
    writer, reader = _native.RingWriter(segment, WORLD), _native.RingReader(segment, WORLD)
    heads = np.zeros(2, records.OUTPUT)
    heads["num_ids"] = 1
    for wrong in (heads.tobytes()[:-1], heads):  # not whole records; two ids announced, one given
        with pytest.raises(ValueError):
            writer.try_append_outputs(wrong, ids(1))
    with pytest.raises(TypeError):  # int64 must not be taken for pairs of int32
        writer.try_append_outputs(heads, np.array([1, 2]))
    heads["error_bytes"][1] = 3
    with pytest.raises(ValueError, match="error text"):
        writer.try_append_outputs(heads, ids(1, 2))
    for kind in (0, 0xFFFF):
        with pytest.raises(ValueError):
            writer.try_write(kind, [b""])
    with pytest.raises(ValueError):
        writer.try_write(1, [bytes(writer.max_length + 1)])
    with pytest.raises(ValueError):
        writer.try_write(1, [b""] * 33)
    with pytest.raises(ValueError):  # not contiguous
        writer.try_write(1, [np.zeros((4, 4))[:, 0]])
    writer.publish()
    assert reader.read() is None
    assert writer.free_bytes == RING_BYTES


def test_the_plan_names_every_channel_and_create_follows_it():
    channels = Channels.create(WORLD, num_ranks=3, attn_dp_size=2, ring_bytes=RING_BYTES)
    assert [(c["name"], c["from"], c["to"]) for c in channels.describe()] == [
        ("request", "main", "rank 0"),
        ("output", "rank 0", "main"),
        ("batch", "rank 0", "rank 1, rank 2"),
        ("result-1", "rank 1", "rank 0"),
        ("result-2", "rank 2", "rank 0"),
        ("signals", "every rank", "rank 0, rank 1, rank 2"),
        ("memory-0", "rank 0", "rank 0, rank 1, rank 2"),
        ("memory-1", "rank 1", "rank 0, rank 1, rank 2"),
        ("memory-2", "rank 2", "rank 0, rank 1, rank 2"),
        ("board", "every rank", "main, rank 0"),
    ]
    assert channels.plan == tuple(plan(3, 2, RING_BYTES))
    assert {c.name: c.size for c in channels.plan} == {name: s.size for name, s in channels.segments.items()}
    assert channels.main_ends().requests.free_bytes == RING_BYTES


def test_one_rank_needs_no_batch_ring():
    channels = Channels.create(WORLD, num_ranks=1, attn_dp_size=1, ring_bytes=RING_BYTES)
    leader = channels.leader_ends()
    assert leader.batches is None and leader.results == ()
    assert [c.name for c in channels.plan] == ["request", "output", "board"]


def test_an_end_is_taken_once_and_only_by_its_world():
    channels = Channels.create(WORLD, num_ranks=2, attn_dp_size=1, ring_bytes=RING_BYTES)
    ends = channels.follower_ends(1)
    with pytest.raises(IpcError):
        channels.follower_ends(1)
    with pytest.raises(AbiMismatch):
        _native.RingWriter(channels.segments["request"], WORLD + 1)
    with pytest.raises(AbiMismatch):
        _native.Board(channels.segments["request"], WORLD)
    assert ends.batches.read() is None


def test_a_board_row_is_read_by_name():
    board = Channels.create(WORLD, num_ranks=2, attn_dp_size=1, ring_bytes=RING_BYTES).board()
    row = np.zeros(1, records.RANK_ROW)
    row["state"], row["last_words"] = 4, b"out of memory"
    board.write_rank(1, row)
    assert board.read_rank(1)["last_words"] == b"out of memory"
    assert board.ranks()["state"].tolist() == [0, 4]
    assert board.loads()["step"].tolist() == [0]
    with pytest.raises(IndexError):
        board.read_rank(2)
    with pytest.raises(ValueError):
        board.write_load(0, row)


@pytest.mark.parametrize("dumps", [pickle.dumps, ForkingPickler.dumps])
def test_channels_cannot_be_pickled_outside_a_spawn(dumps):
    channels = Channels.create(WORLD, num_ranks=1, attn_dp_size=1, ring_bytes=RING_BYTES)
    with pytest.raises((TypeError, RuntimeError)):
        dumps(channels)


def test_who_waits_for_a_dead_rank_is_told_and_for_a_living_one_goes_on_waiting():
    channels = Channels.create(WORLD, num_ranks=3, attn_dp_size=1, ring_bytes=RING_BYTES)
    ends = channels.mailbox_ends(0)
    assert ends is not None and len(ends.memories) == 3 and ends.ring is None
    channels.mark_gone(2)
    with pytest.raises(PeerGone):
        ends.signals.wait(2, 1, 0, 60_000_000_000)
    assert not ends.signals.wait(1, 1, 0, 1_000_000)
    with pytest.raises(IpcError):
        channels.mailbox_ends(0)
    assert Channels.create(WORLD, num_ranks=1, attn_dp_size=1, ring_bytes=RING_BYTES).mailbox_ends(0) is None


def test_a_record_can_be_read_where_it_lies_and_is_the_writers_again_when_popped():
    channels = Channels.create(WORLD, num_ranks=2, attn_dp_size=1, ring_bytes=RING_BYTES)
    writer, reader = channels.leader_ends().batches, channels.follower_ends(1).batches
    assert writer is not None and reader.peek() is None
    writer.try_write(7, [b"first"])
    writer.try_write(8, [b"second"])
    kind, data = reader.peek()
    assert (kind, data.tobytes()) == (7, b"first") and reader.peek()[1].ctypes.data == data.ctypes.data
    reader.pop()
    kind, data = reader.peek()
    assert (kind, data.tobytes()) == (8, b"second")
    start = channels.segments["batch"].array().ctypes.data
    assert start < data.ctypes.data < start + channels.segments["batch"].size  # no copy: what a GPU has pinned
    reader.pop()
    assert reader.peek() is None and writer.free_bytes == RING_BYTES
