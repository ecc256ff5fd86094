"""What leaves the output pump is the plain decode of what the leader wrote, however it was cut. [R38] [R39] [R41]"""

import json
import select
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53d import _native
from glm53d.errors import AbiMismatch, IpcError
from glm53d.ipc.records import LOGPROB, OUTPUT, FinishReason, RecordType, padded
from glm53d.ipc.segment import Segment

WORLD, SLOTS = 7, 16
# Characters cut at every place, what JSON escapes, a special token, one without bytes, and the end of reasoning.
TOKENS = [
    *(b"a", b" the", b"\xff", b'"', b"\\", b"\n\t\x01\x7f", b"<|user|>", b""),
    *("你".encode()[:1], "你".encode()[1:], "😀".encode()[:2], "😀".encode()[2:], "é好".encode()),
    *(b"\n\t ", b"<arg_key>", b"<think>", b"<tool_call>", b"</think>"),
]
SPECIAL = [token == b"<|user|>" for token in TOKENS]
A = 0
BLANK, ARG_KEY, THINK, TOOL_CALL, THINK_END = range(len(TOKENS) - 5, len(TOKENS))
PIECES = [ARG_KEY, THINK, TOOL_CALL, THINK_END]
MOST_PIECES = 256 + 3
KINDS = ["frames", "frames with ids", "pieces", "collected"]
CONTENT = (b'data: {"content":"', b'"}\n\n', b"", b"")
REASONING = (b'data: {"reasoning":"', b'"}\n\n', b"", b"")


@dataclass
class Seen:
    """All that the pump handed over for one request."""

    frames: bytes = b""
    pieces: list[str | int] = field(default_factory=list)
    finish: bytes | None = None
    text: bytes = b""
    reasoning: bytes = b""
    ids: bytes = b""
    reasoning_tokens: int = 0
    first_token_ns: int = 0

    def events(self) -> list[dict]:
        parts = self.frames.split(b"\n\n")
        assert parts.pop() == b""
        return [json.loads(part.removeprefix(b"data: ")) for part in parts]

    def joined(self, key: str) -> str:
        return "".join(event.get(key, "") for event in self.events())


@dataclass
class Rig:
    """A pump and the ring's writing end, as main and the leader have them."""

    capacity: int = 1 << 16
    others: list[tuple[int, bytes]] = field(default_factory=list)

    def __enter__(self) -> "Rig":
        self.segment = Segment.create("test", _native.ring_segment_bytes(self.capacity))
        _native.ring_init(self.segment, WORLD, 1)
        vocab = _native.ByteVocab(TOKENS, SPECIAL)
        self.pump = _native.Pump(self.segment, WORLD, vocab, SLOTS, THINK, THINK_END, PIECES)
        self.writer = _native.RingWriter(self.segment, WORLD)
        self.seen: dict[int, Seen] = {}
        self.offsets: dict[int, int] = {}
        self.pump.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.close()  # the thread ends at once, not at its next look at stop()
        self.pump.stop()

    def open(
        self,
        handle,
        content=CONTENT,
        reasoning=REASONING,
        starts=True,
        with_ids=False,
        skip=True,
        python_ids=(),
        all_python=False,
        with_logprobs=False,
    ):
        if with_ids:  # the suffix then starts behind a value
            content, reasoning = (frame and (frame[0], b"}\n\n", b"", b"") for frame in (content, reasoning))
        self.pump.open(handle, content, reasoning, starts, with_ids, skip, python_ids, all_python, with_logprobs)
        self.seen[handle], self.offsets[handle] = Seen(), 0

    def output(self, handle, ids, held=0, finish=FinishReason.NONE, offset=None, error=b"", prompt=(), top=None):
        """top: the ids have logprobs, and the prompt's; a token's is minus its id, with so many made up beside it."""
        head = np.zeros(1, OUTPUT)
        row = head[0]
        row["handle"], row["num_ids"], row["held_bytes"], row["finish_reason"] = handle, len(ids), held, finish
        row["token_offset"] = self.offsets[handle] if offset is None else offset
        row["error_bytes"] = len(error)
        self.offsets[handle] = self.offsets.get(handle, 0) + len(ids)
        record = head.tobytes() + padded(np.array(ids, np.int32).tobytes()) + error
        if top is not None:
            row["num_prompt_logprobs"], row["logprob_width"] = len(prompt), 1 + top
            pairs = np.zeros((len(prompt) + len(ids), 1 + top), LOGPROB)
            pairs["id"] = np.array([*prompt, *ids], np.int32)[:, None] + np.arange(1 + top)
            pairs["logprob"] = -pairs["id"].astype(np.float32)
            record = head.tobytes() + padded(record[OUTPUT.itemsize :]) + pairs.tobytes()
        assert self.writer.try_write(RecordType.OUTPUT, [record])
        return record

    def take(self) -> None:
        for handle, frames, pieces, finish, text, reasoning, ids, reasoning_tokens, first_token_ns in self.pump.take():
            if handle == 0:
                self.others.append((reasoning_tokens, finish))
                continue
            seen = self.seen[handle]
            assert seen.finish is None, "nothing comes behind a finish"
            assert frames or pieces or finish is not None, "no empty events"
            seen.frames += frames
            seen.pieces += pieces
            seen.finish, seen.text, seen.reasoning, seen.ids = finish, text, reasoning, ids
            seen.reasoning_tokens, seen.first_token_ns = reasoning_tokens, first_token_ns

    def wait(self, done) -> None:
        """Take, whenever the pump says so, until done() holds; a lost wake fails here."""
        self.take()
        while not done():
            assert select.select([self.pump.fileno()], [], [], 20)[0], "the pump has made nothing"
            self.take()

    def wait_finished(self, *handles: int) -> None:
        self.wait(lambda: all(self.seen[handle].finish is not None for handle in handles))


def handle_of(slot: int, generation: int = 1) -> int:
    return generation << 32 | slot


@dataclass
class Turn:
    """What a request's ids say in all, straight from the rules. That many bytes at its end never show: `dropped`."""

    ids: list[int]
    starts: bool = True
    skip: bool = True
    python_ids: tuple[int, ...] = ()
    all_python: bool = False
    dropped: int = 0
    num_reasoning: int = 0
    texts: dict[str, str] = field(default_factory=lambda: {"reasoning": "", "content": "", "python": ""})
    pieces: list[str | int] = field(default_factory=list)

    def __post_init__(self) -> None:
        steps, phase = [], "reasoning" if self.starts else "content"
        for id_ in self.ids:
            before, data = phase, TOKENS[id_] if id_ <= THINK_END else b""
            if phase == "reasoning" and id_ == THINK_END:
                phase, data = "content", b""
            elif phase != "python" and id_ in self.python_ids:
                phase = "python"
            elif self.skip and data == b"<|user|>":
                data = b""
            self.num_reasoning += phase == "reasoning"
            is_piece = id_ in PIECES and (phase == "python" or self.all_python)
            is_void = self.starts and id_ == (THINK if before == "reasoning" else THINK_END)
            piece = id_ if is_piece else None
            steps.append((before, data, piece, phase == before and not is_piece and not is_void, phase != before))
        left = sum(len(data) for _, data, *_ in steps) - self.dropped
        run, phase = b"", steps[0][0] if steps else "content"
        for phase, data, piece, is_text, is_border in steps:
            if is_text or (left < len(data) and piece is not None and not is_border):
                run += data[: max(left, 0)]
            elif left >= len(data):
                self.say(phase, run)
                run = b""
                if piece is not None:
                    self.pieces.append(piece)
                if phase == "reasoning" and piece in {ARG_KEY, TOOL_CALL} - set(self.python_ids):
                    self.texts[phase] += TOKENS[piece].decode()  # a tag in the thinking is part of its text
            left -= len(data)
            if left < 0:
                break
        self.say(phase, run)

    def say(self, phase: str, data: bytes) -> None:
        text = data.decode(errors="replace")
        self.texts[phase] += text
        if text and (phase == "python" or self.all_python):
            self.pieces.append(text)

    @property
    def ends_thinking(self) -> bool:
        return not self.starts or self.num_reasoning < len(self.ids)


def merged(pieces: list[str | int]) -> list[str | int]:
    """Texts in a row as one: only where they are cut is left to chance."""
    out: list[str | int] = []
    for piece in pieces:
        if out and isinstance(piece, str) and isinstance(out[-1], str):
            out[-1] += piece
        else:
            out.append(piece)
    return out


records = st.lists(st.tuples(st.lists(st.integers(0, THINK_END + 1), max_size=5), st.integers(0, 12)), max_size=8)


@settings(max_examples=200, deadline=None)
@given(
    requests=st.lists(
        st.tuples(records, st.sampled_from(KINDS), st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=3
    ),
    slow=st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=6),
    stops=st.booleans(),
    data=st.data(),
)
def test_frames_pieces_and_collected_texts_are_what_the_ids_say(requests, slow, stops, data):
    """A request: its records as (ids, held_bytes), how it leaves, if it starts in reasoning, has tools, skips specials.

    The records of all requests are interleaved, and streams turn slow and back between any two.
    """
    with Rig() as rig:
        for slot, (_, kind, starts, tools, skip) in enumerate(requests):
            rig.open(
                handle_of(slot), CONTENT if "frames" in kind else None, REASONING if "frames" in kind else None, starts,
                kind == "frames with ids", skip, (TOOL_CALL,) if tools and "ids" not in kind else (), kind == "pieces",
            )  # fmt: skip
        order = data.draw(st.permutations([slot for slot, r in enumerate(requests) for _ in r[0]]), "order")
        cursors = [iter(r[0]) for r in requests]
        turns = dict(zip(data.draw(st.permutations(range(len(order) + 1)), "slow at"), slow, strict=False))
        for i, slot in enumerate(order):
            if i in turns and turns[i][0] < len(requests):
                rig.pump.set_slow(handle_of(turns[i][0]), turns[i][1])
            rig.output(handle_of(slot), *next(cursors[slot]))
            if i % 3 == 0:
                rig.take()
        reason = FinishReason.STOP if stops else FinishReason.LENGTH
        last = [rig.output(handle_of(slot), [], 0, reason) for slot in range(len(requests))]
        rig.wait_finished(*map(handle_of, range(len(requests))))

        for slot, (cut, kind, starts, tools, skip) in enumerate(requests):
            seen, ids = rig.seen[handle_of(slot)], [i for piece, _ in cut for i in piece]
            python_ids = (TOOL_CALL,) if tools and "ids" not in kind else ()
            turn = Turn(ids, starts, skip, python_ids, kind == "pieces")
            reasoning, content = turn.texts["reasoning"], turn.texts["content"]
            is_all_answer = stops and not turn.ends_thinking
            pieces = merged(seen.pieces)
            if "frames" in kind:
                if python_ids and not content.strip() and TOOL_CALL in ids:  # nothing but calls: see Turn.pieces
                    content, turn.pieces = "", merged([content, *turn.pieces] if content else turn.pieces)
                assert (seen.joined("reasoning"), seen.joined("content")) == (reasoning, content)
                sent = [i for event in seen.events() for i in event.get("output_ids", [])]
                assert sent == (ids if kind == "frames with ids" else [])
            else:
                assert seen.frames == b""
            if kind == "collected":
                if is_all_answer:
                    reasoning, content = "", reasoning
                assert (seen.reasoning.decode(), seen.text.decode()) == (reasoning, content)
            else:
                assert seen.text.decode() == (reasoning if is_all_answer else "")  # F-F1
                assert not seen.reasoning
            assert np.frombuffer(seen.ids, np.int32).tolist() == ids
            assert pieces == merged(turn.pieces)
            assert seen.finish == last[slot]
            assert seen.reasoning_tokens == (0 if is_all_answer else turn.num_reasoning)
            assert (seen.first_token_ns > 0) == bool(ids)
        assert rig.pump.stats()["unknown_ids"] == sum(
            i > THINK_END for r in requests for piece, _ in r[0] for i in piece
        )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, THINK_END), max_size=12), st.integers(0, 20), st.booleans())
def test_what_is_held_at_the_finish_never_shows(ids, held, starts):
    """[R38] Of an added token among pieces that is cut off in the middle, what stands before is text, as anywhere."""
    with Rig() as rig:
        rig.open(handle_of(0), None, None, starts=starts, python_ids=(TOOL_CALL,))
        rig.output(handle_of(0), ids, held, FinishReason.LENGTH)
        rig.wait_finished(handle_of(0))
        seen, turn = rig.seen[handle_of(0)], Turn(ids, starts, python_ids=(TOOL_CALL,), dropped=held)
        assert (seen.reasoning.decode(), seen.text.decode()) == (turn.texts["reasoning"], turn.texts["content"])
        assert seen.pieces == merged(turn.pieces)


@settings(max_examples=200, deadline=None)
@given(records, st.booleans(), st.booleans(), st.integers(0, 20), st.integers(0, 3))
def test_each_token_comes_once_behind_the_text_that_its_bytes_complete(cut, collects, starts, held, top):
    """F-F5. The text between two tokens is that of the tokens before, none of a character that has only begun."""
    cut = [([i for i in ids if i <= THINK_END], held) for ids, held in cut]
    with Rig() as rig:
        rig.open(
            handle_of(0), None, None, starts=starts, skip=False, all_python=not collects, with_logprobs=True
        )  # fmt: skip
        rig.output(handle_of(0), [], prompt=[3, 4], top=top)
        for ids, held_now in cut:
            rig.output(handle_of(0), ids, held_now, top=top)
        rig.output(handle_of(0), [], held, FinishReason.STOP)
        rig.wait_finished(handle_of(0))
    said, at, text, shown = [i for ids, _ in cut for i in ids], 0, "", b""
    pieces = rig.seen[handle_of(0)].pieces
    for i, piece in enumerate(pieces):
        if not isinstance(piece, _native.TokenLogprob):
            text += piece if isinstance(piece, str) else TOKENS[piece].decode()
            continue
        assert (piece.logprob, len(piece.top)) == (-piece.id, top)
        assert piece.top == [(piece.id + 1 + j, -(piece.id + 1.0 + j)) for j in range(top)]
        assert piece.is_prompt == (i < 2)
        if piece.is_prompt:
            assert piece.id == 3 + i
            continue
        assert piece.id == said[at]
        at, shown = at + 1, shown + TOKENS[piece.id]
        is_followed = i + 1 < len(pieces) and not isinstance(pieces[i + 1], _native.TokenLogprob)
        if is_followed and not collects and not starts:  # in a chat some tags show nowhere
            assert text == shown.decode(errors="replace")
    assert at == len(said)


@pytest.mark.parametrize("collects", [False, True])
def test_what_a_stream_has_missed_comes_in_parts(collects):
    """Tokens with logprobs become objects and JSON on the loop: never all that there are in one go."""
    number = 3000
    with Rig(capacity=1 << 20) as rig:
        rig.open(handle_of(0), None, None, starts=False, all_python=not collects, with_logprobs=True)
        rig.pump.set_slow(handle_of(0), not collects)
        rig.output(handle_of(0), [], prompt=range(5, 12), top=1)
        for _ in range(0, number, 100):
            rig.output(handle_of(0), [A] * 100, top=1)
        if collects:
            rig.output(handle_of(0), [], finish=FinishReason.LENGTH)
        else:
            rig.pump.set_slow(handle_of(0), False)
        seen, parts = rig.seen[handle_of(0)], [0]
        expected = 7 + number * (1 if collects else 2)  # in a stream, each token's text is a piece, too
        while sum(parts) < expected:
            assert seen.finish is None, "it comes with the last part"
            assert select.select([rig.pump.fileno()], [], [], 20)[0]
            rig.take()
            parts.append(len(seen.pieces) - sum(parts))
        assert max(parts) <= MOST_PIECES
        if not collects:
            rig.output(handle_of(0), [A], top=1, finish=FinishReason.LENGTH)
        rig.wait_finished(handle_of(0))
        tokens = [piece for piece in seen.pieces if isinstance(piece, _native.TokenLogprob)]
        assert [token.id for token in tokens] == [*range(5, 12), *[A] * (number + (not collects))]


def behind(rig: Rig, slot: int, number: int, ids: tuple[int, ...] = (A,), finish=FinishReason.NONE) -> None:
    """A stream with logprobs, whose reader has missed so many tokens."""
    rig.open(handle_of(slot), None, None, starts=False, all_python=True, with_logprobs=True)
    rig.pump.set_slow(handle_of(slot), True)
    rig.output(handle_of(slot), [*ids] * (number // len(ids)), top=1)
    rig.output(handle_of(slot), [], finish=finish)


def take_part(rig: Rig) -> None:
    assert select.select([rig.pump.fileno()], [], [], 20)[0], "the pump has made nothing"
    rig.take()


def has_none(rig: Rig) -> bool:
    """Nothing comes, though the pump has had time to look."""
    return not select.select([rig.pump.fileno()], [], [], 0.1)[0]


@pytest.mark.parametrize("finish", [FinishReason.NONE, FinishReason.LENGTH])
def test_parts_wait_for_a_reader_that_is_slow_again(finish):
    with Rig(capacity=1 << 20) as rig:
        behind(rig, 0, 3000, finish=finish)
        rig.pump.set_slow(handle_of(0), False)
        take_part(rig)
        rig.pump.set_slow(handle_of(0), True)
        while not has_none(rig):  # what was under way
            rig.take()
        seen = rig.seen[handle_of(0)]
        assert len(seen.pieces) <= 4 * MOST_PIECES and seen.finish is None
        rig.pump.set_slow(handle_of(0), False)
        rig.wait(lambda: len(seen.pieces) == 6000)
        if finish is not FinishReason.NONE:
            rig.wait_finished(handle_of(0))


def test_nothing_more_comes_for_a_stream_that_is_closed_with_parts_to_come():
    with Rig(capacity=1 << 20) as rig:
        behind(rig, 0, 3000, finish=FinishReason.LENGTH)
        take_part(rig)
        rig.pump.close(handle_of(0))
        while not has_none(rig):
            rig.take()
        assert len(rig.seen[handle_of(0)].pieces) <= 4 * MOST_PIECES


def test_many_streams_that_have_missed_much_take_turns():
    with Rig(capacity=1 << 21) as rig:
        for slot in range(SLOTS):
            behind(rig, slot, 1500, finish=FinishReason.LENGTH)
            rig.pump.set_slow(handle_of(slot), False)
        before, parts = 0, []
        while any(seen.finish is None for seen in rig.seen.values()):
            take_part(rig)
            now = sum(len(seen.pieces) for seen in rig.seen.values())
            parts.append(now - before)
            before = now
        assert before == SLOTS * 3000 and max(parts[SLOTS:]) <= 4 * MOST_PIECES


def test_a_part_ends_behind_all_tokens_of_a_character():
    """F-F5"""
    halves = (TOKENS.index("你".encode()[:1]), TOKENS.index("你".encode()[1:]))
    with Rig(capacity=1 << 20) as rig:
        behind(rig, 0, 2000, ids=(A, *halves, *halves), finish=FinishReason.LENGTH)
        rig.pump.set_slow(handle_of(0), False)
        seen, ends = rig.seen[handle_of(0)], []
        while seen.finish is None:
            take_part(rig)
            ends.append(len(seen.pieces))
        assert len(ends) > 4
        assert all(isinstance(seen.pieces[end], str) for end in ends[:-1]), "text begins the next part"


ENTERED = [(b"r(", b")", b"<r>", b"</r>"), (b"c(", b")", b"<c>", b"</c>")]


@pytest.mark.parametrize(
    ("starts", "records", "frames", "pieces"),
    [
        (True, [[A], [A], [THINK_END], [A], [A]], "<r>r(a)r(a)</r><c>c(a)c(a)</c>", []),
        (True, [[A, THINK_END, A]], "<r>r(a)</r><c>c(a)</c>", []),
        (True, [[THINK_END], [A]], "<r></r><c>c(a)</c>", []),
        (True, [[A, THINK_END]], "<r>r(a)</r>", []),
        (True, [], "<r></r>", []),
        (True, [[A, TOOL_CALL], [A]], "<r>r(a)</r>", [TOOL_CALL, "a"]),
        (True, [[A, THINK_END, A], [TOOL_CALL, A]], "<r>r(a)</r><c>c(a)</c>", [TOOL_CALL, "a"]),
        (True, [[A, THINK_END], [BLANK], [TOOL_CALL, A]], "<r>r(a)</r>", ["\n\t ", TOOL_CALL, "a"]),
        (True, [[THINK_END, BLANK], [A], [BLANK]], "<r></r><c>c(\\n\\t a)c(\\n\\t )</c>", []),
        (True, [[THINK_END, BLANK]], "<r></r><c>c(\\n\\t )</c>", []),
        (False, [[A], [A]], "<c>c(a)c(a)</c>", []),
        (False, [], "<c></c>", []),
    ],
)
def test_a_phase_is_entered_before_its_first_frame_and_left_behind_its_last(starts, records, frames, pieces):
    """What stands between leave and the next enter is nothing, also where a slow stream is merged."""
    for slow in (False, True):
        with Rig() as rig:
            rig.open(handle_of(0), *ENTERED[::-1], starts=starts, python_ids=(TOOL_CALL,))
            for ids in records:
                rig.pump.set_slow(handle_of(0), slow)
                rig.output(handle_of(0), ids)
            rig.output(handle_of(0), [], finish=FinishReason.LENGTH)
            rig.wait_finished(handle_of(0))
            seen = rig.seen[handle_of(0)]
            merges = (("r(a)r(a)", "r(aa)"), ("c(a)c(a)", "c(aa)"), ("a)c(", "a"))
            expected = frames
            for apart, together in merges if slow else ():
                expected = expected.replace(apart, together)
            assert (seen.frames.decode(), merged(seen.pieces)) == (expected, pieces)


def test_a_piece_comes_as_soon_as_its_token_does():
    with Rig() as rig:
        rig.open(handle_of(0), python_ids=(TOOL_CALL,))
        for ids, expected in (([A, TOOL_CALL], [TOOL_CALL]), ([A], ["a"]), ([ARG_KEY, A, A], [ARG_KEY, "aa"])):
            rig.output(handle_of(0), ids)
            rig.wait(lambda: rig.seen[handle_of(0)].pieces)
            assert rig.seen[handle_of(0)].pieces == expected
            rig.seen[handle_of(0)].pieces = []


def test_text_held_back_shows_once_a_later_record_lets_it():
    with Rig() as rig:
        rig.open(handle_of(0), starts=False, with_ids=True)
        rig.output(handle_of(0), [0, 1], held=2)
        rig.wait(lambda: rig.seen[handle_of(0)].frames)
        assert rig.seen[handle_of(0)].events() == [
            {"content": "a t", "output_ids": [0, 1]}
        ]  # ids are handed over at once
        rig.output(handle_of(0), [])
        rig.wait(lambda: len(rig.seen[handle_of(0)].events()) == 2)
        assert rig.seen[handle_of(0)].events()[1] == {"content": "he", "output_ids": []}


def test_each_record_is_one_frame_and_a_slow_streams_are_merged():
    with Rig() as rig:
        for slot in (0, 1):
            rig.open(handle_of(slot))
        rig.pump.set_slow(handle_of(1), True)
        for ids in ([0], [0, 0], [0, THINK_END, 1], [1]):
            rig.output(handle_of(0), ids)
            rig.output(handle_of(1), ids)
        rig.wait(lambda: rig.seen[handle_of(0)].joined("content") == " the the")
        assert [*map(tuple, rig.seen[handle_of(0)].events())] == [("reasoning",)] * 3 + [("content",)] * 2
        rig.take()
        assert rig.seen[handle_of(1)].frames == b""
        rig.pump.set_slow(handle_of(1), False)  # no record comes to remind the pump
        rig.wait(lambda: rig.seen[handle_of(1)].frames)
        assert rig.seen[handle_of(1)].events() == [{"reasoning": "aaaa"}, {"content": " the the"}]


def test_records_of_handles_that_are_not_open_are_counted_and_dropped():
    """[R12]"""
    with Rig() as rig:
        rig.open(handle_of(0, 2))
        rig.open(handle_of(1))
        rig.pump.close(handle_of(1))
        for stale in (handle_of(0, 1), handle_of(1), handle_of(SLOTS + 5), 0):
            rig.output(stale, [0], offset=0)
        rig.output(handle_of(0, 2), [0], 0, FinishReason.STOP)
        rig.wait_finished(handle_of(0, 2))
        rig.output(handle_of(0, 2), [0], offset=1)
        rig.open(handle_of(0, 3))
        rig.output(handle_of(0, 3), [1], 0, FinishReason.STOP)
        rig.wait_finished(handle_of(0, 3))
        assert rig.seen[handle_of(0, 3)].joined("reasoning") == " the"
        assert rig.pump.stats()["stale"] == 5


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_a_token_offset_that_is_not_the_next_one_ends_the_stream_with_an_error(offset):
    """[R13]"""
    with Rig() as rig:
        rig.open(handle_of(3))
        rig.output(handle_of(3), [0, 1])
        rig.output(handle_of(3), [0], offset=offset)
        rig.wait_finished(handle_of(3))
        seen = rig.seen[handle_of(3)]
        head = np.frombuffer(seen.finish, OUTPUT, 1)[0]
        assert (head["handle"], head["finish_reason"], head["num_ids"]) == (handle_of(3), FinishReason.ERROR, 0)
        error = seen.finish[OUTPUT.itemsize :].decode()
        assert error == f"internal_error: token {offset} of this request came where 2 was the next"
        assert head["error_bytes"] == len(error)
        assert seen.joined("reasoning") == "a the"
        assert rig.pump.stats()["order_errors"] == 1


def test_a_record_shorter_than_it_says_is_counted_and_dropped():
    with Rig() as rig:
        rig.open(handle_of(0))
        head = np.zeros(1, OUTPUT)
        head["handle"], head["num_ids"] = handle_of(0), 3
        rig.writer.try_write(RecordType.OUTPUT, [head.tobytes()])
        rig.writer.try_write(RecordType.OUTPUT, [b"short"])
        head["num_ids"], head["num_prompt_logprobs"], head["logprob_width"] = 0, 1 << 31, 1 << 30  # times 8: 0
        rig.writer.try_write(RecordType.OUTPUT, [head.tobytes()])
        rig.output(handle_of(0), [0], 0, FinishReason.STOP)
        rig.wait_finished(handle_of(0))
        assert rig.pump.stats()["malformed"] == 3
        assert rig.seen[handle_of(0)].joined("reasoning") == "a"


def test_the_finish_carries_the_leaders_error_and_other_records_come_along():
    with Rig() as rig:
        rig.open(handle_of(0))
        record = rig.output(handle_of(0), [0], 0, FinishReason.ERROR, error=b"engine_error: no")
        rig.writer.try_write(RecordType.CONTROL_RESULT, [b"a result"])
        rig.wait(lambda: rig.others)
        assert rig.seen[handle_of(0)].finish == record
        assert rig.others == [(RecordType.CONTROL_RESULT, b"a result")]


def test_a_gone_writer_is_told_after_all_it_wrote_slow_streams_included():
    with Rig() as rig:
        rig.open(handle_of(0))
        rig.pump.set_slow(handle_of(0), True)
        rig.output(handle_of(0), [0])
        rig.writer.close()
        rig.wait(lambda: rig.pump.writer_gone)
        rig.take()
        assert rig.seen[handle_of(0)].joined("reasoning") == "a"
        assert not rig.pump.corrupt


def test_wrong_arguments_are_refused():
    with Rig() as rig:
        for handle in (0, handle_of(SLOTS)):
            with pytest.raises(ValueError, match="handle"):
                rig.open(handle)
        with pytest.raises(ValueError, match="content"):
            rig.open(handle_of(0), content=None)
        with pytest.raises(ValueError, match="not framed"):
            rig.open(handle_of(0), all_python=True)
        for pieces in ({"python_ids": [TOOL_CALL]}, {"all_python": True, "content": None, "reasoning": None}):
            with pytest.raises(ValueError, match="without ids"):
                rig.open(handle_of(0), with_ids=True, **pieces)
        vocab = _native.ByteVocab([], [])
        with pytest.raises(IpcError, match="held already"):
            _native.Pump(rig.segment, WORLD, vocab, SLOTS, -1, 0, [])
        with pytest.raises(AbiMismatch):
            _native.Pump(rig.segment, WORLD + 1, vocab, SLOTS, -1, 0, [])


def test_a_pump_that_was_never_started_or_taken_from_can_be_dropped():
    with Rig() as rig:
        rig.open(handle_of(0))
        rig.output(handle_of(0), [0])
        segment = Segment.create("test", 1 << 12)
        _native.ring_init(segment, WORLD, 1)
        pump = _native.Pump(segment, WORLD, _native.ByteVocab([b"a"], [False]), SLOTS, -1, 0, [])
        pump.open(handle_of(1), None, None, False, False, False, [], False)
        del segment, pump
