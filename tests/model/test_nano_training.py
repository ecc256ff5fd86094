"""What the nano model is trained as is what it is served as: one architecture, written twice."""

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from bench.nano import export, toolbox
from bench.nano.batches import Batches
from bench.nano.chats import Turn
from bench.nano.data import CHOOSING, NAME_IDS, NO_TOOL, NONE, Codec, Encoded, Sample, sample
from bench.nano.model import Nano, far_apart
from bench.nano.muon import orthogonal
from bench.nano.tokenizer import COMMON, IN_NAMES, NUM_BASE, put_common_words
from glm53d.model.config import ModelConfig
from tests.helpers.model import LoneModel

ROOT = Path(__file__).resolve().parents[2]
NANO = ROOT / "glm53d" / "nano"


@pytest.fixture(scope="module")
def trained() -> Nano:
    """Weights of no training, but with indexers and routers that discriminate."""
    torch.manual_seed(2)
    model = Nano(ModelConfig.load(ROOT / "bench" / "nano"))
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):
            buffer.normal_(0, 0.05)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("tokens", [40, 300])  # below index_topk, and above: there indexers choose
def test_an_exported_checkpoint_gives_the_training_modules_logits(trained, tmp_path, tokens):
    export.write(trained.state_dict(), NANO, tmp_path, plain=True)
    ids = torch.randint(0, 2036, (1, tokens), generator=torch.Generator().manual_seed(2))

    batch = trained.batch(tokens, sparse=True, teach=False)
    states = trained(ids, batch)
    wanted, wanted_drafts = trained.lm_head(states[0]), trained.lm_head(trained.draft(states, ids, batch)[0])

    lone = LoneModel(tmp_path, 512)
    model = lone.model
    step = lone.step([ids[0]], [0])
    hidden = model.norm(model.forward(step, lone.cache))
    assert torch.allclose(model.logits(hidden, [tokens]), wanted, atol=1e-4, rtol=0)
    step.input_ids = torch.cat([ids[0, 1:], ids[0, :1]])
    drafts = model.logits(lone.mtp.forward(step, hidden, lone.cache)[0], [tokens])
    assert torch.allclose(drafts[:-1], wanted_drafts, atol=1e-4, rtol=0)


def test_blocks_at_the_edges_have_factors_of_their_own():
    weight = torch.randn(160, 300) * torch.linspace(0.01, 10, 300)
    values, scale = export.quantised(weight)
    assert (values.shape, scale.shape) == ((160, 300), (2, 3))
    for row in range(2):
        for column in range(3):
            block = (slice(128 * row, 128 * (row + 1)), slice(128 * column, 128 * (column + 1)))
            error = (values[block].float() * scale[row, column] - weight[block]).abs().max()
            assert error <= weight[block].abs().max() * 16.1 / 448  # half of the largest step between e4m3 numbers


def test_muon_makes_singular_values_alike():
    made = orthogonal(torch.randn(3, 40, 24) @ torch.diag(torch.logspace(-2, 0, 24)))
    values = torch.linalg.svdvals(made)
    assert (values > 0.3).all() and (values < 1.4).all()


def first_ids(text: Tokenizer, name: str) -> list[int]:
    """Of a tool's name, as it stands in its description."""
    return text.encode(f'{name}", "', add_special_tokens=False).ids[:NAME_IDS]


def runs(known: np.ndarray) -> list[np.ndarray]:
    """Places next to each other where something is known."""
    [places] = np.nonzero(known)
    return np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(places) else []


def trained_turns(drawn: Sample, encoded: Encoded) -> list[tuple[Turn, int, int]]:
    """Those whose thinking was kept, which are the last ones or all, each with its span."""
    number = len(encoded.kinds)
    return [(turn, *span) for turn, (_, *span) in zip(drawn.turns[-number:], encoded.kinds, strict=True)]


def test_every_token_that_describes_a_tool_is_marked_with_its_name():
    codec = Codec(NANO / "tokenizer.json")
    text = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    for seed in range(20):
        drilled, tools = codec.tool_drill(Random(seed)), toolbox.drill(Random(seed))[0]
        parts = runs((drilled.tools != NONE).all(1))
        assert len(parts) == len(tools)
        for tool, part in zip(tools, parts, strict=True):
            name = first_ids(text, tool.name)
            assert (drilled.tools[part] == name).all()
            first = part[0] - NAME_IDS + 1  # it is known from its last of these on
            line = text.decode(drilled.ids[first : part[-1] + 1].tolist())
            assert line.startswith(f'{tool.name}", ') and all(name in line for name, _ in tool.parameters)
            assert "\n" not in line


def test_a_drill_asks_each_description_once_and_tells_of_no_value():
    codec = Codec(NANO / "tokenizer.json")
    text = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    for seed in range(20):
        drilled, (tools, asked) = codec.tool_drill(Random(seed)), toolbox.drill(Random(seed))
        assert len({wanted for wanted, _ in asked}) == len(asked)
        own = text.decode(drilled.ids[drilled.own].tolist(), skip_special_tokens=False)
        found = "".join(
            f"</think><tool_call>{tool.name}"
            + "".join(f"<arg_key>{name}</arg_key><arg_value>" for name, _ in tool.parameters)
            + "</tool_call><|observation|>"
            if tool is not None
            else "</think>I have no tool for that.<|user|>"
            for _, tool in asked
        )
        assert own == found
        for (wanted, tool), place in zip(asked, runs((drilled.chosen != NONE).all(1)), strict=True):
            assert text.decode(drilled.ids[: place[0] + 1].tolist()).endswith(f"{wanted}.")
            said = text.decode(drilled.ids[place].tolist(), skip_special_tokens=False)
            assert said == f".</think><tool_call>{tool.name}" if tool else len(place) == CHOOSING
            name = first_ids(text, tool.name) if tool else NO_TOOL
            assert (drilled.chosen[place] == name).all()
        assert all(tool in tools for _, tool in asked if tool is not None)


def test_what_is_to_be_called_is_told_from_where_it_was_thought_what_is_wanted_to_the_tools_name():
    """But where the request names the tool: then it is the name that is thought."""
    codec = Codec(NANO / "tokenizer.json")
    text = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    seen = named = 0
    for index in range(80):
        drawn = sample(index)
        encoded = codec.encode(drawn)
        places = iter(runs((encoded.chosen != NONE).all(1)))
        for turn, start, _ in trained_turns(drawn, encoded):
            if turn.kind not in ("tool", "no tool"):
                continue
            if turn.copied:
                assert turn.call and turn.copied == (turn.call[0],) and turn.call[0] in str(turn.message["content"])
                assert all(f"`{turn.call[0]}`" in thought for thought in turn.thoughts)
                named += 1
                continue
            place = next(places)
            wanted = text.decode(encoded.ids[start : place[0]].tolist())
            assert wanted and turn.thoughts[2].startswith(wanted)
            name = first_ids(text, turn.call[0]) if turn.call else NO_TOOL
            assert (encoded.chosen[place] == name).all()
            [described] = set(encoded.described[place[0] - 1 : place[-1] + 1])
            assert (described == 0) == (turn.call is None)
            if turn.call:
                said = text.decode(encoded.ids[place].tolist(), skip_special_tokens=False)
                assert said.endswith((f" `{turn.call[0]}", f"<tool_call>{turn.call[0]}"))
                line = text.decode(encoded.ids[: described + 1].tolist()).rpartition("\n")[2]
                assert line.startswith(f'{{"name": "{turn.call[0]}"') and line.endswith(f'"description": "{wanted}')
            seen += 1
        assert next(places, None) is None
    assert seen > 20 and named > 4


def test_from_where_a_tools_name_has_been_written_a_call_is_marked_with_it():
    codec = Codec(NANO / "tokenizer.json")
    text = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    seen = 0
    for index in range(60):
        drawn = sample(index)
        encoded = codec.encode(drawn)
        is_called = (encoded.called != NONE).all(1)
        for turn, start, stop in trained_turns(drawn, encoded):
            if not (call := turn.call):
                assert not is_called[start:stop].any()
                continue
            place = start + np.flatnonzero(is_called[start:stop])
            assert place[-1] == stop - 1 and len(place) == stop - place[0]
            before = text.decode(encoded.ids[start : place[0] + 1].tolist(), skip_special_tokens=False)
            assert before.endswith((f"`{call[0]}", f"<tool_call>{call[0]}")) and before.count(f"`{call[0]}") <= 1
            assert (encoded.called[place] == first_ids(text, call[0])).all()
            seen += 1
        drilled, asked = codec.tool_drill(Random(index)), toolbox.drill(Random(index))[1]
        written = text.decode(drilled.ids[(drilled.called != NONE).all(1)].tolist(), skip_special_tokens=False)
        assert written.count("<arg_key>") == sum(len(tool.parameters) for _, tool in asked if tool)
    assert seen > 20


def test_a_copied_token_is_told_the_place_before_it_that_it_says_again():
    """Of a call: its name from the thought or where the tool is described, as its parameters', and its values, from the
    request.
    The token behind a copied text is told what stands behind its source, and that behind a value whether there is one
    more parameter.
    """
    codec = Codec(NANO / "tokenizer.json")
    added = codec.vocab.added
    opens = [added[mark] for mark in ("<tool_call>", "<arg_key>", "<arg_value>")]
    pieces = whole = ends = 0
    for index in range(150):
        drawn = sample(index)
        encoded = codec.encode(drawn)
        [before] = np.nonzero(encoded.copied != NONE)
        assert (encoded.copied[before] <= before).all() and encoded.own[before + 1].all()
        texts, [users] = codec.texts[encoded.ids], np.nonzero(encoded.ids == added["<|user|>"])
        for turn, start, stop in trained_turns(drawn, encoded):
            told = start - 1 + np.flatnonzero(encoded.copied[start - 1 : stop - 1] != NONE)
            places = encoded.copied[told]
            if turn.kind in ("fixed", "unknown", "no tool", "told"):
                assert not len(told)
            if turn.kind in ("list", "count"):
                [number] = set(places.tolist())
                assert turn.number.encode()[-1:] in codec.vocab.token_bytes[encoded.ids[number]]
                assert len(told) == len(turn.listed) >= 2
                continue
            values = told[encoded.ids[told] == added["</arg_value>"]]
            assert (encoded.copied[values[:-1]] == encoded.copied[values[:-1] + 1]).all()
            for place in encoded.copied[values[-1:]]:
                assert codec.vocab.token_bytes[encoded.ids[place]].endswith(b"}}\n")
            is_copied = texts[told + 1] == texts[places]
            is_before = codec.opens[encoded.ids[told + 1]] & (encoded.copied[told + 1] == places)
            is_end = ~(is_copied | is_before | np.isin(told, values))
            assert (texts[told[is_end]] == texts[places[is_end] - 1]).all()
            ends += is_end.sum()
            for opened in start + np.flatnonzero(np.isin(encoded.ids[start:stop], opens)) if turn.call else ():
                length = int((encoded.ids[opened + 1 : stop] >= min(added.values())).argmax())
                said = encoded.copied[opened : opened + length]
                behind = encoded.copied[opened + length]
                assert behind in (NONE, said[-1] + 1)
                first, last = {
                    added["<tool_call>"]: (0, opened),
                    added["<arg_key>"]: (0, users[0]),
                    added["<arg_value>"]: (users[users < start][-1], start),
                }[int(encoded.ids[opened])]
                assert all(first < place < last for place in said[said != NONE])
                pieces, whole = pieces + 1, whole + bool((said != NONE).all())
    assert pieces > 150 and whole > 0.9 * pieces and ends > pieces


def test_what_opens_a_value_follows_from_the_value_and_what_closes_it_from_what_opened_it():
    codec = Codec(NANO / "tokenizer.json")
    seen = {b' "': 0, b" ": 0}
    for index in range(300):
        drawn = sample(index)
        encoded = codec.encode(drawn)
        for turn, start, stop in trained_turns(drawn, encoded):
            if turn.kind != "json":
                assert turn.call or turn.kind == "no tool" or (encoded.described[start:stop] != 0).all()
                continue
            [closing] = np.nonzero(encoded.described[start:stop] != NONE)
            for last in start + closing:
                opened = encoded.described[last]
                token = codec.vocab.token_bytes[encoded.ids[opened]]
                assert start < opened < last and encoded.copied[opened - 1] == encoded.copied[opened] != NONE
                number = codec.vocab.token_bytes[encoded.ids[last]].isdigit()
                behind = codec.vocab.token_bytes[encoded.ids[last + 1]]
                assert behind.startswith(b'"') if token == b' "' else number and behind[:1] in b",}"
                seen[token] += 1
    assert min(seen.values()) > 10


def test_codes_of_tokens_are_far_apart():
    codes = far_apart(2064)
    angles = (codes @ codes.T).clamp(-1, 1).acos().rad2deg()
    assert torch.allclose(codes.norm(dim=-1), torch.ones(2064))
    assert (angles + 90 * torch.eye(2064)).min() > 59.9


def test_common_words_take_the_place_of_what_was_learned_last():
    learned = {f"e{i}": i for i in range(256)} | {"ab": 256, "abc": 257}
    learned |= {f"m{i}x": 258 + i for i in range(NUM_BASE - 258)}
    merges = [["a", "b"], ["ab", "c"], *([f"m{i}", "x"] for i in range(NUM_BASE - 258))]
    data = {"model": {"vocab": dict(learned), "merges": list(merges)}}
    put_common_words(data)
    vocab = data["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(NUM_BASE))
    assert {*COMMON, *("Ġ" + word for word in COMMON), *IN_NAMES} <= vocab.keys()
    kept = len(data["model"]["merges"])
    assert data["model"]["merges"] == merges[:kept] and 0 < kept < len(merges)
    assert all(vocab[a + b] == learned[a + b] for a, b in merges[:kept])
    assert not any(a + b in vocab for a, b in merges[kept:])


def test_a_batch_is_the_same_whenever_it_is_asked_for():
    codec = Codec(NANO / "tokenizer.json")
    first, again = Batches(codec, 2048, "test"), Batches(codec, 2048, "test")
    third = first[3].ids
    assert all(batch.ids.numel() <= 2048 or len(batch.ids) == 1 for batch in map(first.__getitem__, range(4, 12)))
    assert again[3].ids.equal(third) and first[3].ids.equal(third)
