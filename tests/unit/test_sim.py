"""The simulated engine's scripts: what is answered, and to whom. [R43]"""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

import glm53d.nano
from glm53d.config import Config, Sim
from glm53d.errors import StartError
from glm53d.ipc.batch import Batch
from glm53d.ipc.records import ROW_FEED, ROW_SAMPLE, SLOT_INIT
from glm53d.runner.sim import SimRunner

TOKENIZER = Path(glm53d.nano.__file__).parent / "tokenizer.json"
IDS = Tokenizer.from_file(str(TOKENIZER))
USER, TOOL, TEXT = (IDS.token_to_id(tag) for tag in ("<|user|>", "<|observation|>", "a"))


def runner(**sim: str) -> SimRunner:
    made = SimRunner(Config(sim=Sim(base_ms=0, **sim)), 0, 4, 1000, TOKENIZER)
    made.load(lambda phase, percent: None)
    return made


def answers(sim: SimRunner, prompts: dict[int, list[int]], chunk: int = 100, count: int = 6) -> dict[int, str]:
    """What slots say to prompts of theirs, which are computed in chunks, all in the same steps."""
    said: dict[int, list[int]] = {slot: [] for slot in prompts}
    longest = max(map(len, prompts.values()))
    for start in [*range(0, longest, chunk), *range(longest, longest + count - 1)]:
        rows = []
        for slot, prompt in prompts.items():
            have = len(prompt) + len(said[slot])
            if start < longest and said[slot]:
                continue
            at, fed = (start, False) if start < len(prompt) else (have - 1, True)
            ids = [-1] if fed else prompt[at : at + chunk]
            flags = ROW_FEED | ROW_SAMPLE if fed else ROW_SAMPLE * (at + len(ids) == len(prompt))
            rows.append((slot, at, len(ids), flags, ids))
        inits = np.zeros(len(prompts) if start == 0 else 0, SLOT_INIT)
        for init, (slot, prompt) in zip(inits, prompts.items(), strict=False):
            init["slot"], init["num_prompt_ids"] = slot, len(prompt)
        slots, prefix, extend, flags, _ = (np.array(column, object) for column in zip(*rows, strict=True))
        batch = Batch(
            1, 0, *(np.array(c, np.int32) for c in (slots, np.zeros(len(rows)), prefix, extend, flags)),
            input_ids=np.array([i for row in rows for i in row[4]], np.int32), inits=inits,
            dp_num_tokens=np.array([extend.sum()], np.int32),
        )  # fmt: skip
        sim.launch(batch)
        result = sim.collect()
        for (slot, *_), num, ids in zip(rows, result.counts, result.ids, strict=True):
            said[slot] += ids[:num].tolist()
    return {slot: IDS.decode(ids) for slot, ids in said.items()}


def test_every_request_has_the_script_over_and_over():
    assert answers(runner(text="abc"), {0: [TEXT], 2: [USER, TEXT]}, count=40)[2].startswith("abcabcabc")


@pytest.mark.parametrize("chunk", [100, 3, 1])
def test_what_answers_a_tools_result_is_another_script(chunk):
    """Whoever spoke last counts, however the prompt is cut into steps."""
    prompts = {
        0: [USER, TEXT, TEXT],
        1: [USER, TEXT, TOOL, TEXT, TEXT],
        2: [USER, TEXT, TOOL, TEXT, USER, TEXT],
        3: [TEXT] * 4,  # nobody: the rest was cached
    }
    said = answers(runner(text="one", after_tools="two"), prompts, chunk)
    assert {slot: text[:3] for slot, text in said.items()} == {0: "one", 1: "two", 2: "one", 3: "one"}


def test_a_slot_forgets_who_had_it_before():
    sim = runner(text="one", after_tools="two")
    assert answers(sim, {0: [TOOL, TEXT]})[0].startswith("two")
    assert answers(sim, {0: [TEXT]})[0].startswith("one")


def test_a_script_for_tools_alone_is_refused():
    with pytest.raises(StartError, match="no token"):
        runner(after_tools="two")


def asking(ids: list[int], flags: int, targets: list[int]) -> Batch:
    """A step of one row, which wants its tokens' logprobs, and those of these of its prompt."""
    row = (np.array([value], np.int32) for value in (0, 0, 0, len(ids), flags))
    return Batch(
        1, 0, *row, input_ids=np.array(ids, np.int32), dp_num_tokens=np.array([len(ids)], np.int32),
        top_logprobs=np.zeros(1, np.int32), targets=np.array(targets, np.int32),
    )  # fmt: skip


def test_a_chunk_of_a_prompt_that_asks_only_for_its_outputs_logprobs_has_none():
    """An empty block of them is nothing that a result may hold."""
    sim = runner()
    sim.launch(asking([TEXT, TEXT], 0, []))
    assert sim.collect().logprobs is None


def test_of_a_group_one_rank_answers():
    """Two that give the same rows' logprobs are more than the rows have."""
    for attn_tp_rank, count in ((0, 1), (1, 0)):
        sim = SimRunner(Config(sim=Sim(base_ms=0)), 0, 4, 1000, TOKENIZER, attn_tp_rank=attn_tp_rank)
        sim.load(lambda phase, percent: None)
        sim.launch(asking([TEXT, TEXT], ROW_SAMPLE, [TEXT, -1]))
        result = sim.collect()
        assert result.counts.tolist() == [count]
        assert (0 if result.logprobs is None else len(result.logprobs.rows)) == 2 * count
