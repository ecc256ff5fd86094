"""Logprobs of a stream: each token once, on the chunk that carries its text, however it is cut. [F-F5]"""

import codecs
from itertools import pairwise
from types import SimpleNamespace

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53d._native import TokenLogprob
from glm53d.chat.reasoning import ReasoningParser
from glm53d.ipc.records import FinishReason
from glm53d.server.common import Offered
from glm53d.server.logprobs import PART, Legacy, TokenDeltas, TokenNames, Tokens
from glm53d.server.openai_tools import Tools
from tests.property.test_pump import ARG_KEY, SPECIAL, THINK, THINK_END, TOKENS, TOOL_CALL, Rig, handle_of

ADDED = {TOKENS[i].decode(): i for i in (ARG_KEY, THINK, TOOL_CALL, THINK_END)}
ENGINE = SimpleNamespace(vocab=SimpleNamespace(token_bytes=TOKENS, special=SPECIAL, added=ADDED))
NAMES = TokenNames(ENGINE, skip_special=True)  # type: ignore[arg-type]

records = st.lists(st.tuples(st.lists(st.integers(0, THINK_END), max_size=5), st.integers(0, 12)), max_size=8)
cuts = st.lists(st.integers(0, 60), max_size=8)


def pieces_of(cut: list[tuple[list[int], int]], *, starts: bool, collects: bool = False) -> tuple[list, str, str]:
    """What the pump makes of these records, and the texts that it has collected."""
    with Rig() as rig:
        rig.open(handle_of(0), None, None, starts=starts, all_python=not collects, with_logprobs=True)
        for ids, held in cut:
            rig.output(handle_of(0), ids, held, top=0)
        rig.output(handle_of(0), [], 0, FinishReason.LENGTH)
        rig.wait_finished(handle_of(0))
        seen = rig.seen[handle_of(0)]
    return seen.pieces, seen.reasoning.decode(), seen.text.decode()


def wakes(pieces: list, at: list[int]) -> list[list]:
    """Cut anywhere, but that tokens which share a character come together, as from the pump."""
    places = [i for i, piece in enumerate(pieces) if not isinstance(piece, TokenLogprob)]
    bounds = sorted({0, len(pieces), *(places[i] for i in at if i < len(places))})
    return [pieces[a:b] for a, b in pairwise(bounds)]


def entries_of(logprobs: dict) -> list[dict]:
    """As a client reads them."""
    return msgspec.json.decode(msgspec.json.encode(logprobs["content"]))


def text_of(entries: list[dict], but: tuple[str, ...] = ()) -> str:
    """What the tokens' bytes say, without those of some tags."""
    return b"".join(bytes(e["bytes"] or ()) for e in entries if e["token"] not in but).decode(errors="replace")


@settings(max_examples=150, deadline=None)
@given(records, cuts)
def test_a_chats_chunks_have_the_tokens_of_their_texts(cut, at):
    pieces, _, _ = pieces_of(cut, starts=True)
    tools = Tools(Offered(None, None, None), is_legacy=False)
    deltas = TokenDeltas(NAMES, ReasoningParser(ADDED, tools.offered.parser(ADDED, has_parsers=True)), tools.deltas)
    chunks = [chunk for wake in wakes(pieces, at) for chunk in deltas.feed(wake)] + deltas.finish()
    entries = [e for _, logprobs in chunks for e in entries_of(logprobs)] + entries_of(deltas.rest())
    assert [e["logprob"] for e in entries] == [-i for ids, _ in cut for i in ids]
    void = ("<think>", "</think>")  # say nothing in a chat, unless the answer or the thinking spells them out
    for delta, logprobs in chunks:
        ((_, text),) = delta.items()
        tokens = entries_of(logprobs)
        if not any(e["token"] in void for e in tokens):
            assert text == text_of(tokens)


def test_a_chats_tokens_without_text_do_not_pile_up_until_its_end():
    """The likeliest of a hundred thousand would be made to JSON in one go, on the loop."""
    tools = Tools(Offered(None, None, None), is_legacy=False)
    deltas = TokenDeltas(NAMES, ReasoningParser(ADDED, tools.offered.parser(ADDED, has_parsers=True)), tools.deltas)
    silent = TokenLogprob(SPECIAL.index(True), -1.0, [])
    chunks = [chunk for _ in range(40) for chunk in deltas.feed([silent] * 250)] + deltas.finish()
    counts = [len(entries_of(logprobs)) for _, logprobs in chunks] + [len(entries_of(deltas.rest()))]
    assert sum(counts) == 10_000 and max(counts) <= PART + 250
    assert all(delta == {"content": ""} for delta, _ in chunks)


@settings(max_examples=150, deadline=None)
@given(records, cuts)
def test_a_completions_chunks_have_the_tokens_of_their_texts_and_offsets_into_the_whole(cut, at):
    pieces, _, whole = pieces_of(cut, starts=False)
    stream, lists, said, shown = Tokens(), Legacy(NAMES), "", b""
    for wake in wakes(pieces, at):
        found = stream.feed(wake)
        text = "".join(p if isinstance(p, str) else NAMES.text(p) for pieces, _ in found for p in pieces)
        by = [token for _, tokens in found for token in tokens]
        for token, offset in zip(by, lists.of(by)["text_offset"], strict=True):
            adds = NAMES.adds(token)
            is_new = bool(adds) and adds[0] & 0xC0 != 0x80  # what has begun before it has no other end then
            assert offset == len(codecs.utf_8_decode(shown, "replace", is_new)[0])  # the characters before it
            shown += adds
        said += text
        assert said == shown.decode(errors="replace")
    assert whole == ""
    ids = [i for ids, _ in cut for i in ids]
    assert said == b"".join(b"" if SPECIAL[i] else TOKENS[i] for i in ids).decode(errors="replace")


@settings(max_examples=100, deadline=None)
@given(records)
def test_a_plain_answer_has_all_tokens_beside_its_texts(cut):
    tokens, reasoning, content = pieces_of(cut, starts=False, collects=True)
    assert [token.id for token in tokens] == [i for ids, _ in cut for i in ids]
    assert reasoning == "" and content == text_of(entries_of(NAMES.content(tokens)))
