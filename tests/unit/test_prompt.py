"""The text half on its own: lines taken out, lengths, both encodings of spelled control tokens. [R17] [R20] [R44]"""

import dataclasses
import logging
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from glm53d.chat.conversation import Conversation
from glm53d.chat.jinja import Choice, choose
from glm53d.chat.stable import without_lines
from glm53d.errors import ContextTooLong, InvalidRequest
from glm53d.front.job import Job, Routing
from glm53d.front.prompt import TextHalf
from glm53d.front.sessions import MAX_CHAINS, MAX_SESSIONS, Divergence, Sessions
from glm53d.text.encode import Encoder
from glm53d.text.vocab import Vocab

VOCAB = Vocab.load(Path(str(files("glm53d.nano") / "tokenizer.json")))
ENCODER = Encoder(VOCAB.path, VOCAB, max_threads=1, cache_tokens=10_000)
USER = VOCAB.added["<|user|>"]
LINE = ("x-anthropic-billing-header:",)
BILLING = "x-anthropic-billing-header: cc_version=2.1.197; cch=1a2b3;"


def half(literal: bool = False, encoder: Encoder = ENCODER) -> TextHalf:
    return TextHalf(encoder, choose(VOCAB.added, None, None, literal=literal), LINE, 16, bytes(16), bytes(16))


@pytest.mark.parametrize("kind", ["image_url", "video", "input_audio"])
def test_the_flash_template_is_given_no_media(kind):
    """It would write tokens that the model knows from pictures, and there is none."""
    choice = Choice(choose(VOCAB.added, None, None, literal=False).template, literal=False, kind="glm-5.3-flash")
    flash = dataclasses.replace(half(), choice=choice)
    talk = [{"role": "user", "content": "hi"}, {"role": "user", "content": [part("look"), {"type": kind}]}]
    with pytest.raises(InvalidRequest) as refused:
        flash.encode(Conversation(talk))
    assert refused.value.param == "messages[1].content[1]"
    assert len(half().encode(Conversation(talk))) > 20, "GLM-5.3 is told that there was something"


def system(content) -> dict:
    return {"role": "system", "content": content}


def stripped(*messages: dict) -> list:
    return [message["content"] for message in without_lines(Conversation(list(messages)), LINE).messages]


def part(text: str) -> dict:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("content", "left"),
    [
        (BILLING + "\nYou are", "You are"),
        (BILLING + "\n" + BILLING + "\n\nYou are", "\nYou are"),
        (BILLING, ""),
        ([part(BILLING), part("You are"), part("more")], [part("You are"), part("more")]),
        ([part(BILLING + "\nYou are"), part("more")], [part("You are"), part("more")]),
        ([part(BILLING)], []),
        ([part(BILLING)] * 3000 + [part("a")], [part("a")]),
        ([part(BILLING), part(""), part("a")], [part(""), part("a")]),
        ((BILLING + "\n") * 300_000 + "a", "a"),  # a second of copying, if each line is cut off the whole rest
        ((BILLING + "\n") * 3, ""),
    ],
)
def test_a_billing_line_at_the_head_of_the_system_prompt_is_taken_out(content, left):
    """[F-H6]"""
    assert stripped(system(content), {"role": "user", "content": BILLING}) == [left, BILLING]


@pytest.mark.parametrize(
    "content",
    ["You are\n" + BILLING, " " + BILLING, "", None, [], [{"type": "image"}, part(BILLING)], [part("a")], [7]],
)
def test_all_else_stays_as_it_is(content):
    """[F-H6] Lines further down too: only a line at the head is known to be a client's own."""
    conv = Conversation([system(content), {"role": "user", "content": "q"}, system(BILLING)])
    assert without_lines(conv, LINE) is conv
    assert without_lines(Conversation([system(BILLING)]), ()).messages == [system(BILLING)]


def test_a_system_entry_in_the_middle_stays_in_place():
    """[F-H7]"""
    messages = [{"role": "user", "content": "a"}, system("left: 7"), {"role": "user", "content": "b"}]
    text = half().choice.template.render_text(without_lines(Conversation(messages), LINE))
    assert text.endswith("<|user|>a<|system|>left: 7<|user|>b<|assistant|><think>")


def test_the_beginning_of_a_raw_prompt_is_cut_and_never_that_of_a_chat():
    """[R20]"""
    ids = ENCODER.encode_text("one two three four five")
    for job in (Job("r", 0, text="one two three four five"), Job("r", 0, ids=ids)):
        prompt = half().prepare(job, len(ids) - 2, True)
        assert (prompt.ids.tolist(), prompt.num_cut) == (ids[2:].tolist(), 2)
        assert half().prepare(job, len(ids), True).num_cut == 0
        with pytest.raises(ContextTooLong, match=f"has {len(ids)} tokens; at most {len(ids) - 2} fit"):
            half().prepare(job, len(ids) - 2, False)
    chat = Job("r", 0, conversation=Conversation([{"role": "user", "content": "one two three"}]))
    with pytest.raises(ContextTooLong) as error:
        half().prepare(chat, 5, True)
    assert error.value.code == "context_length_exceeded"


@pytest.mark.parametrize("raw", [True, False])
def test_a_prompt_that_is_too_long_leaves_the_cache_of_texts_as_it_was(raw):
    """[R18] Refused, cut or only counted: it would drive out what sessions say again."""
    encoder = Encoder(VOCAB.path, VOCAB, max_threads=1, cache_tokens=10_000)
    text = half(encoder=encoder)
    words = "one two three four five " * 20
    conv = Conversation([{"role": "user", "content": words}])
    job = Job("r", 0, text=words) if raw else Job("r", 0, conversation=conv)
    with pytest.raises(ContextTooLong):
        text.prepare(job, 60, False)
    text.encode(words if raw else conv, 60)
    if raw:
        assert text.prepare(job, 60, True).num_cut
    assert encoder.stats()["entries"] == 0
    text.prepare(job, 1000, False)
    assert encoder.stats()["entries"] > 0


def test_a_prompt_that_is_far_too_long_is_not_encoded_to_its_end(monkeypatch):
    encoder = Encoder(VOCAB.path, VOCAB, max_threads=1, cache_tokens=10_000)
    text = half(encoder=encoder)
    batches, encode = [], encoder._backend.encode
    monkeypatch.setattr(encoder._backend, "encode", lambda texts: (batches.append(len(texts)), encode(texts))[1])
    for prompt in ("word " * 500_000, Conversation([{"role": "user", "content": "word " * 500_000}])):
        batches.clear()
        with pytest.raises(ContextTooLong, match="more than 400 tokens; at most 100 fit"):
            text.encode(prompt, 100)
        assert len(batches) == 1


def test_a_prompt_of_nothing_is_refused():
    with pytest.raises(InvalidRequest, match="empty"):
        half().prepare(Job("r", 0, ids=np.empty(0, np.int32)), 10, True)


def test_literal_control_tokens_give_the_flat_ids_of_other_engines():
    """[R17] The switch changes ids alone; the rendered text is the same."""
    conv = Conversation([{"role": "user", "content": "a<|user|>b"}])
    flat, apart = half(literal=True).encode(conv).tolist(), half().encode(conv).tolist()
    assert flat == ENCODER.encode_text(half().choice.template.render_text(conv)).tolist()
    assert (flat.count(USER), apart.count(USER)) == (2, 1)
    assert ENCODER.decode(np.array(flat, np.int32), skip_special=False) == ENCODER.decode(
        np.array(apart, np.int32), skip_special=False
    )


def chain(*pages: int) -> np.ndarray:
    """Page hashes: equal as long as all pages before are."""
    return np.array([(hash(pages[: i + 1]) % 2**63, i) for i in range(len(pages))], np.uint64).reshape(-1, 2)


def test_a_session_whose_prompt_grows_is_quiet_and_a_change_is_placed():
    """[R44]"""
    sessions = Sessions()
    for pages in ((1, 2), (1, 2, 3), (1, 2, 3), (1, 2), (1, 2, 3, 4, 5), ()):
        assert sessions.follow(7, chain(*pages)) is None
    assert sessions.follow(7, chain(1, 2, 9, 4, 5)) == Divergence(page=2, num_pages=5)
    assert sessions.follow(7, chain(1, 2, 9, 4, 5, 6)) is None  # goes on from there
    assert sessions.follow(7, chain(1, 2, 3, 4, 5, 6)) is None  # and from the one before
    assert sessions.follow(7, chain(7, 8)) is None  # a sub-agent's, nothing in common
    assert sessions.follow(8, chain(1, 8)) is None  # another session's


def test_only_so_many_sessions_and_prompts_of_each_are_kept():
    sessions = Sessions()
    for i in range(MAX_CHAINS + 1):
        sessions.follow(7, chain(100 + i, 1))
    assert sessions.follow(7, chain(100, 2)) is None  # the oldest is forgotten
    assert sessions.follow(7, chain(100 + MAX_CHAINS, 2)) == Divergence(1, 2)
    for i in range(MAX_SESSIONS):
        sessions.follow(100 + i, chain(1))
    assert sessions.follow(7, chain(100 + MAX_CHAINS, 3)) is None


def test_the_log_says_where_a_session_changed_with_the_text_there(caplog):
    """[R44]"""
    text = half()
    with caplog.at_level(logging.INFO):
        for word, session in (("before", "s"), ("before", "s"), ("CHANGED", "s"), ("OTHER", "")):
            content = "the same beginning " * 20 + word + " and the same end " * 20
            conv = Conversation([{"role": "user", "content": content}])
            text.prepare(Job("r7", 0, conversation=conv, routing=Routing(session=session)), 10_000, False)
    (record,) = caplog.records
    assert record.rid == "r7" and "CHANGED" in record.getMessage()
