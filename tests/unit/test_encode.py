"""Encoder on nano's tokenizer: what equals what, and what is refused. Random texts: tests/property/test_encode.py."""

import json
import logging
import sys
import threading
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import fastokens
import numpy as np
import pytest
from tokenizers import Tokenizer

from glm53d.chat.conversation import Conversation
from glm53d.chat.template import Template
from glm53d.errors import CheckpointError, ContextTooLong, InvalidRequest
from glm53d.text.backend import PROBES
from glm53d.text.encode import Encoder
from glm53d.text.vocab import Vocab

NANO = Path(str(files("glm53d.nano") / "tokenizer.json"))
VOCAB = Vocab.load(NANO)
REFERENCE = Tokenizer.from_file(str(NANO))
VECTORS = Path(__file__).parent.parent / "data" / "template_vectors.jsonl"


class Differing:
    """fastokens with a bug: the last id of a batch is 0."""

    @staticmethod
    def from_json_str(text):
        tokenizer = Differing()
        tokenizer.sound = fastokens.Tokenizer.from_json_str(text)
        return tokenizer

    def encode_batch_flat(self, texts):
        ids, starts = self.sound.encode_batch_flat(texts)
        return ids[:-4] + bytes(4), starts


@pytest.fixture(scope="module", params=["fastokens", "tokenizers"])
def encoder(request):
    """Both backends must behave alike."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "tokenizers":
            patch.setitem(sys.modules, "fastokens", None)
        encoder = Encoder(NANO, VOCAB, max_threads=2)
    assert encoder.backend == request.param
    return encoder


def flat(text: str) -> list[int]:
    """How every other engine encodes: the whole text, spelled added tokens recognised."""
    return REFERENCE.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", ["<|user|>" * 500, "a b " * 500])
def test_a_prompt_of_several_times_as_many_tokens_as_fit_is_not_encoded_to_its_end(encoder, text):
    with pytest.raises(ContextTooLong, match="more than 400 tokens; at most 100 fit"):
        encoder.encode_text(text, longest=100)


def test_a_raw_prompt_has_the_ids_of_flat_encoding(encoder):
    """[R18]"""
    for text in [*PROBES, "".join(PROBES), "<|user|>hi</think>/nothink<think><|endoftext|>", "<|user|user|>", "<think"]:
        ids = encoder.encode_text(text)
        assert ids.dtype == np.int32
        assert ids.tolist() == flat(text)


def test_a_rendered_chat_has_the_ids_of_flat_encoding_when_no_client_spells_a_control_token(encoder):
    """[R17] [R18] On all golden conversations that spell none. Their text is tested in test_template.py."""
    template, checked = Template(VOCAB.added), 0
    for line in VECTORS.open(encoding="utf-8"):
        vector = json.loads(line)
        spelled = json.dumps(vector["input"], ensure_ascii=False)
        if "expected" not in vector or vector["variant"] != "glm-5.3" or any(t in spelled for t in VOCAB.added):
            continue
        conv = Conversation(vector["input"]["messages"], vector["input"].get("tools"))
        assert encoder.encode_segments(template.render(conv)).tolist() == flat(template.render_text(conv))
        checked += 1
    assert checked > 100


def test_a_control_token_that_a_client_spells_becomes_no_control_id(encoder):
    """[R17] Not even a plain added token, nor one put together from two neighbours."""
    ids = encoder.encode_segments(["<|user|></think>/nothink", "<tool_", VOCAB.added["<sop>"], "call>"])
    assert [i for i in ids if i >= VOCAB.num_base] == [VOCAB.added["<sop>"]]
    assert b"".join(VOCAB.token_bytes[i] for i in ids) == b"<|user|></think>/nothink<tool_<sop>call>"


def test_control_ids_stand_where_they_were_put(encoder):
    one = encoder.encode_segments(["one"]).tolist()
    two = encoder.encode_segments(["two"]).tolist()
    assert encoder.encode_segments([7, 8, "one", 9, "", 10, "two", 11]).tolist() == [7, 8, *one, 9, 10, *two, 11]
    assert encoder.encode_segments([5]).tolist() == [5]
    for nothing in ([], [""], ["", ""]):
        ids = encoder.encode_segments(nothing)
        assert (ids.dtype, ids.size) == (np.int32, 0)
    assert encoder.encode_text("").size == 0


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff", "<|user|>\udc80"])
def test_a_lone_surrogate_is_the_clients_error(encoder, text):
    """[F-G10]"""
    with pytest.raises(InvalidRequest, match="surrogate"):
        encoder.encode_text(text)
    with pytest.raises(InvalidRequest, match="surrogate"):
        encoder.encode_segments([1, "fine", text])


def test_many_threads_may_encode_at_once(encoder):
    texts = [f"{probe} {i}" for i in range(20) for probe in PROBES]
    expected = [flat(text) for text in texts]
    wrong: list[str] = []

    def work():
        wrong.extend(t for t, e in zip(texts, expected, strict=True) if encoder.encode_text(t).tolist() != e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("module", "said"), [(None, "cannot be used"), (SimpleNamespace(Tokenizer=Differing), "differs")]
)
def test_without_a_fast_encoder_that_equals_the_reference_one_warning_says_so(monkeypatch, caplog, module, said):
    """[R18]"""
    monkeypatch.setitem(sys.modules, "fastokens", module)
    with caplog.at_level(logging.WARNING):
        encoder = Encoder(NANO, VOCAB, max_threads=2)
    assert encoder.backend == "tokenizers"
    assert len(caplog.records) == 1 and said in caplog.text
    assert encoder.encode_text(PROBES[0]).tolist() == flat(PROBES[0])


def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path):
    path = tmp_path / "tokenizer.json"
    for content in (None, "", "[1]", '{"model": {"type": "BPE"}}'):
        if content is not None:
            path.write_text(content)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            Encoder(path, VOCAB, max_threads=1)
