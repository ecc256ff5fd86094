"""Vocab: what it reads from a tokenizer.json, and what it refuses. [R39]"""

import json
from importlib.resources import files
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from glm53d.errors import CheckpointError
from glm53d.text.vocab import Vocab

NANO = Path(str(files("glm53d.nano") / "tokenizer.json"))


@pytest.fixture(scope="module")
def nano() -> Vocab:
    return Vocab.load(NANO)


def changed(tmp_path: Path, change) -> Path:
    """A copy of nano's file after change(its content)."""
    data = json.loads(NANO.read_text("utf-8"))
    change(data)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(data), "utf-8")
    return path


def test_the_bytes_of_ids_in_a_row_are_the_text_they_decode_to(nano):
    tokenizer = Tokenizer.from_file(str(NANO))
    text = "Grüße, 世界! 😀 \x00\t\n<|user|></think> don't 12345"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(nano.token_bytes[id_] for id_ in ids).decode() == text
    for id_ in range(0, nano.size, 7):
        as_text = nano.token_bytes[id_].decode(errors="replace")
        assert as_text == tokenizer.decode([id_], skip_special_tokens=False)


def test_nano_has_the_shape_of_the_official_tokenizer(nano):
    """2,000 base tokens, all bytes among them, then the 36 added ones in the official order, the first 18 special."""
    assert (nano.num_base, nano.size) == (2000, 2036)
    assert {bytes([byte]) for byte in range(256)} <= set(nano.token_bytes[:2000])
    assert list(nano.added.values()) == list(range(2000, 2036))
    assert [i for i, special in enumerate(nano.special) if special] == list(range(2000, 2018))
    in_order = "<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> <|observation|>"
    assert list(nano.added)[:10] == in_order.split()
    assert nano.think_end == nano.added["</think>"] == 2022
    assert tuple(map(nano.control_id, ("<|endoftext|>", "<|user|>", "<|observation|>"))) == (2000, 2007, 2009)


def test_ids_may_have_gaps_and_a_gap_has_no_bytes(tmp_path):
    def move_added_up(data):
        for i, token in enumerate(data["added_tokens"]):
            token["id"] = 5000 + i

    vocab = Vocab.load(changed(tmp_path, move_added_up))
    assert (vocab.num_base, vocab.size) == (5000, 5036)
    assert vocab.token_bytes[2000:5000] == [b""] * 3000
    assert vocab.token_bytes[5000] == b"<|endoftext|>"


def test_a_token_that_spells_no_bytes_stands_for_itself(tmp_path):
    vocab = Vocab.load(changed(tmp_path, lambda data: data["model"]["vocab"].update({"⟦unused⟧": 2000, "a b": 2001})))
    assert vocab.token_bytes[2001] == b"[MASK]", "an added token wins over a base token of the same id"
    assert "⟦unused⟧".encode() not in vocab.token_bytes


def test_a_missing_control_token_is_named(tmp_path):
    vocab = Vocab.load(changed(tmp_path, lambda data: data.update(added_tokens=data["added_tokens"][:10])))
    assert vocab.control_id("<|user|>") == 2007
    with pytest.raises(CheckpointError, match="</think>"):
        _ = vocab.think_end


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data["model"].update(type="WordPiece"), "BPE"),
        (lambda data: data.update(decoder={"type": "Metaspace"}), "ByteLevel"),
        (lambda data: data.update(decoder=None), "ByteLevel"),
        (lambda data: data["model"]["vocab"].pop("Ā"), "256 bytes"),
        (lambda data: data["added_tokens"][3].update(lstrip=True), "lstrip"),
        (lambda data: data["model"]["vocab"].update(a=-1), "negative"),
        (lambda data: data["model"]["vocab"].update(a="1"), "vocab"),
        (lambda data: data.pop("model"), "model"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_what_is_expected(tmp_path, change, said):
    with pytest.raises(CheckpointError, match=said):
        Vocab.load(changed(tmp_path, change))


def test_a_file_that_is_not_there_or_no_json_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Vocab.load(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_bytes(b"\xff{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Vocab.load(tmp_path / "tokenizer.json")
