"""Grammars on the reference engine: masks in the sampler, on every layout, with drafts and without. [R35] [R36]"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glm53d.config import Config, Kv, Model, Parallel, Scheduler, Speculation
from glm53d.grammar.compiler import Compiler
from glm53d.ipc.records import GrammarKind
from glm53d.model.config import ModelConfig
from glm53d.runner.masks import Masks
from glm53d.sched.grammar import Grammars
from tests.helpers.grammar_world import EXECUTOR, Jobs
from tests.model.synthetic import make_checkpoint
from tests.model.world import Alone, Ranks, ServedWorld, serve

NUM_NEW = 16
FORM = "(<1[0-9]>){3}(<2[1-5]>){0,4}<31>"  # a token is its id in brackets
AFTER = {"grammar_kind": GrammarKind.AFTER_THINKING, "thinking_budget": 3}
CASES: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9, "top_k": 5}, AFTER]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grammars")
    make_checkpoint(folder, 1)
    return folder


def served(
    ranks: Ranks | Alone, folder: Path, *, attn_dp_size: int = 1, drafts: int = 0, pages: int = 64
) -> ServedWorld:
    vocab = ModelConfig.load(folder).vocab_size
    compiler = Compiler([b"", *(b"<%d>" % i for i in range(1, vocab))], vocab - 1, [0])
    config = Config(
        model=Model(path=str(folder), max_context_len=128),
        kv=Kv(page_size=4, num_pages=pages),
        parallel=Parallel(tp_size=getattr(ranks, "size", 1), attn_dp_size=attn_dp_size),
        scheduler=Scheduler(max_running_requests=6, max_step_tokens=24),
        speculation=Speculation(num_draft_tokens=drafts),
    )
    return ServedWorld(ranks, config, vocab, grammars=Grammars(compiler, Jobs(), Jobs(), 8, EXECUTOR))


def answers(world: ServedWorld, case: dict[str, Any]) -> list[str]:
    """What six requests get, as ids in brackets."""
    found = serve(world, 7, NUM_NEW, **{"grammar": f"start: /{FORM}/", "top_p": 1.0} | case)
    return ["".join(f"<{token}>" for token in ids) for ids in found]


@pytest.mark.parametrize("case", CASES)
def test_what_the_model_says_has_the_form_and_drafts_change_nothing(folder, case):
    plain = served(Alone(), folder)
    expected, end = answers(plain, case), plain.vocab - 1
    thought = rf"(<\d+>)*<{end}>" if case is AFTER else ""
    assert all(re.fullmatch(rf"{thought}{FORM}<0>", answer) for answer in expected), expected
    for num_drafts in (1, 4):
        assert answers(served(Alone(), folder, drafts=num_drafts), case) == expected


def test_who_is_retracted_says_the_same(folder):
    case, short = {"grammar": "start: /(<[1-4][0-9]>){40}/"}, served(Alone(), folder, pages=27)
    assert answers(short, case) == answers(served(Alone(), folder), case) and short.sched.counters.retracted


@pytest.mark.parametrize("case", [CASES[2], AFTER])
def test_every_layout_says_the_same(ranks, folder, case):
    """The vocabulary is sharded; whoever owns a row narrows it."""
    expected = answers(served(Alone(), folder), case)
    for attn_dp_size, drafts in ((1, 0), (ranks.size, 2)):
        assert answers(served(ranks, folder, attn_dp_size=attn_dp_size, drafts=drafts), case) == expected


def bits(*legal: int, words: int = 2) -> np.ndarray:
    mask = np.zeros(32 * words, np.uint8)
    mask[list(legal)] = 1
    return np.packbits(mask, bitorder="little").view(np.int32)


def test_a_mask_narrows_its_row_and_leaves_the_others():
    logits = torch.arange(3 * 40, dtype=torch.float32).view(3, 40)
    narrowed = Masks(np.array([1]), bits(0, 31, 32, 39)[None]).apply(logits)
    assert torch.equal(narrowed[[0, 2]], logits[[0, 2]])
    assert torch.isfinite(narrowed[1]).nonzero().flatten().tolist() == [0, 31, 32, 39]
    assert torch.equal(narrowed[1, [0, 31, 32, 39]], logits[1, [0, 31, 32, 39]])


def test_where_a_bias_has_ruled_out_all_that_is_legal_the_legal_ids_are_alike():
    logits = torch.zeros(1, 40)
    logits[0, [3, 5]] = -torch.inf
    narrowed = Masks(np.array([0]), bits(3, 5)[None]).apply(logits)
    assert narrowed[0, [3, 5]].tolist() == [0.0, 0.0] and narrowed.isneginf().sum() == 38


def test_ids_beyond_the_model_s_vocabulary_are_cut_off():
    assert Masks(np.array([0]), bits(3, 63)[None]).apply(torch.zeros(1, 40)).isfinite().sum() == 1
