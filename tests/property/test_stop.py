"""A client gets the plain cut of the whole text at its first stop string, however tokens and steps cut it. [R38] [R40]

From the leader's table through output records and the pump to the frames of a stream; and from the scheduler, with
retractions, to the records.
"""

import json
import select

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53d._native import ByteVocab, Pump, RingWriter, StopTable, ring_init, ring_segment_bytes
from glm53d.ipc.records import OUTPUT, STOP_IN_CONTENT, FinishReason, RecordType
from glm53d.ipc.segment import Segment
from tests.helpers.sched_world import SchedWorld

WORLD, HANDLE = 7, 1 << 32
FRAMES = (b'data: {"content":"', b'"}\n\n', b"", b""), (b'data: {"reasoning":"', b'"}\n\n', b"", b"")
# Few letters, so that strings begin, break off and overlap; one of several bytes, cut anywhere.
letters = st.text("ab\n你", min_size=1, max_size=4)
pieces_of_one = st.sampled_from([b"", *("你".encode()[i : i + 1] for i in range(3))])
tokens = st.lists(st.one_of(letters.map(str.encode), pieces_of_one), min_size=1, max_size=6)
stop_strings = st.lists(letters, min_size=1, max_size=4)


def first_match(text: bytes, stops: list[bytes]) -> tuple[int, int] | None:
    """(begin, end) of the match that is complete first; of those that end together, the longest."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[::-1] if found else None


def may_become_a_match(text: bytes, stops: list[bytes]) -> int:
    """The length of the longest end of the text that is the beginning of a stop string, and less than it."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


def shown(
    vocab: ByteVocab, think_end: int, records: list[tuple[list[int], int]], *, in_content: bool
) -> tuple[str, str]:
    """The reasoning and the content of a stream, given its records as (ids, held_bytes); the last is its end."""
    segment = Segment.create("test", ring_segment_bytes(1 << 16))
    ring_init(segment, WORLD, 1)
    pump, writer = Pump(segment, WORLD, vocab, 1, -1, think_end, []), RingWriter(segment, WORLD)
    pump.open(HANDLE, *FRAMES, in_content, False, True, [], False)
    pump.start()
    offset = 0
    for i, (ids, held) in enumerate(records):
        head = np.zeros(1, OUTPUT)
        head["handle"], head["token_offset"], head["num_ids"], head["held_bytes"] = HANDLE, offset, len(ids), held
        head["finish_reason"] = FinishReason.STOP if i == len(records) - 1 else FinishReason.NONE
        assert writer.try_write(RecordType.OUTPUT, [head.tobytes() + np.array(ids, np.int32).tobytes()])
        offset += len(ids)
    frames, is_over = b"", False
    while not is_over:
        assert select.select([pump.fileno()], [], [], 20)[0], "the pump has made nothing"
        for _, new, _, finish, *_ in pump.take():
            frames += new
            is_over = finish is not None
    writer.close()
    pump.stop()
    events = [json.loads(frame.removeprefix(b"data: ")) for frame in frames.split(b"\n\n") if frame]
    return tuple("".join(event.get(key, "") for event in events) for key in ("reasoning", "content"))


@settings(max_examples=150, deadline=None)
@given(
    tokens, stop_strings, st.lists(st.lists(st.integers(0, 8), max_size=5), max_size=12), st.booleans(), st.booleans()
)
def test_a_stream_is_the_whole_text_cut_at_the_first_match(tokens, stops, steps, in_content, keep_match):
    """Frames only add, so text that is right at the end was never ahead: nothing of a match has ever shown."""
    think_end = len(tokens)
    vocab = ByteVocab([*tokens, b"</think>"], [False] * (think_end + 1))
    wanted = [stop.encode() for stop in stops]
    table = StopTable(1, vocab, think_end, -1)
    none, slot = np.empty(0, np.int32), np.zeros(1, np.int32)
    shows = {"skip_special": True, "in_content": in_content, "before_calls": False, "keep_match": keep_match}
    assert table.open(0, wanted, none, **shows) == 0

    records, said, matched = [], [], -1
    for ids in steps:
        ids = [i % (think_end + 1) for i in ids]
        [[count, matched, held]] = table.feed(slot, np.array([len(ids)], np.int32), np.array([ids], np.int32)).tolist()
        said += ids[:count]
        records.append((ids[:count], held))
        content = said[said.index(think_end) + 1 :] if in_content and think_end in said else [] if in_content else said
        text = b"".join((*tokens, b"</think>")[i] for i in content)
        if matched >= 0:
            break
        assert first_match(text, wanted) is None
        assert held == may_become_a_match(text, wanted)
    if matched < 0:
        records.append(([], 0))

    whole = [i % (think_end + 1) for ids in steps for i in ids]
    border = whole.index(think_end) if in_content and think_end in whole else len(whole) if in_content else -1
    reasoning = b"".join(tokens[i] for i in whole[: max(border, 0)])
    text = b"".join((*tokens, b"</think>")[i] for i in whole[border + 1 :])
    if found := first_match(text, wanted):
        begin, end = found
        assert wanted[matched] == text[begin:end]
        text = text[: end if keep_match else begin]
    else:
        assert matched < 0
    # A second </think> of a chat counts as text, but does not show.
    content = text.split(b"</think>") if in_content else [text]
    expected = reasoning.decode(errors="replace"), "".join(part.decode(errors="replace") for part in content)
    assert shown(vocab, think_end, records, in_content=in_content) == expected


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 10), st.integers(1, 25), stop_strings, st.booleans()), min_size=1, max_size=5
    ),
    tokens=tokens,
    num_pages=st.integers(6, 14),
    seed=st.integers(0, 1000),
)
def test_every_record_says_what_is_held_of_its_text_also_behind_a_retraction(requests, tokens, num_pages, seed):
    """A request: its prompt's length, most tokens, stop strings, whether they are for its content only."""
    tokens = [b"", *tokens, b"</think>"]  # the first ends the turn, the last its reasoning
    world = SchedWorld(seed, tokens=tokens, num_pages=num_pages, max_running=4, max_step_tokens=16)
    for handle, (prompt_len, max_new, stops, in_content) in enumerate(requests, 1):
        flags = STOP_IN_CONTENT if in_content else 0
        world.send(handle, [handle % len(tokens)] * prompt_len, max_new, stop=tuple(stops), flags=flags)
    for _ in range(1000):
        if len(world.ended) == len(requests):
            break
        world.step()
        for handle, head in world.last_heads.items():
            check(world, handle, head, tokens, requests[handle - 1])
    assert set(world.ended) == set(range(1, len(requests) + 1)) and world.is_idle()


def check(world: SchedWorld, handle: int, head: np.void, tokens: list[bytes], request: tuple) -> None:
    """What the last record of a request says is true of all that its client has."""
    _, _, stops, in_content = request
    wanted = [stop.encode() for stop in stops]
    ids = world.received[handle]
    if in_content:
        ids = ids[ids.index(len(tokens) - 1) + 1 :] if len(tokens) - 1 in ids else []
    pieces = [tokens[i] for i in ids]
    text, held, index = b"".join(pieces), int(head["held_bytes"]), int(head["matched_stop"])
    found = first_match(text, wanted)
    if found is not None:
        begin, end = found
        assert world.ended[handle] is FinishReason.STOP and wanted[index] == text[begin:end]
        assert held == len(text) - begin and end > len(text) - len(pieces[-1])
    else:
        assert index == -1
        assert held == (0 if handle in world.ended else may_become_a_match(text, wanted))
