"""Decoding in fixed shapes: which shape a step gets, and that padding and replay change no token. [R34]"""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from glm53d.config import Config
from glm53d.ipc.batch import Batch
from glm53d.ipc.records import ROW_FEED, ROW_SAMPLE
from glm53d.model.config import ModelConfig
from glm53d.model.layout import Layout
from glm53d.runner.graphs import MAX_ELEMENTS, ROW_BUCKETS, Graphs, Key, SlotState, choose, padded_slots
from glm53d.runner.rows import Rows
from tests.model.synthetic import make_checkpoint
from tests.model.test_parallel import config_of
from tests.model.world import Alone, Ranks, ServedWorld, serve

NUM_NEW = 12
MAX_CONTEXT = 1 << 20


def served(ranks: Ranks | Alone, config: Config, *, graphs: bool) -> ServedWorld:
    return ServedWorld(ranks, config, ModelConfig.load(Path(config.model.path)).vocab_size, graphs=graphs)


def decoding(rows_of_groups: list[int], prefix_len: int = 10, decode_len: int = 1) -> Batch:
    """A step of so many decoding rows in each group, in slots 0, 1, 2 ..."""
    num_rows = sum(rows_of_groups)
    return Batch(
        1, 1, np.arange(num_rows, dtype=np.int32), np.repeat(np.arange(len(rows_of_groups)), rows_of_groups),
        np.full(num_rows, prefix_len), np.full(num_rows, decode_len), np.full(num_rows, ROW_FEED | ROW_SAMPLE),
        np.full(num_rows * decode_len, -1), dp_num_tokens=np.array(rows_of_groups) * decode_len,
    )  # fmt: skip


def key_of(batch: Batch, decode_len: int = 1, max_context: int = MAX_CONTEXT) -> Key | None:
    """The same from every rank's point of view, or an assertion."""
    size = len(batch.dp_num_tokens)
    keys = {choose(Rows.of(batch, Layout(rank, size, size, 1)), decode_len, max_context) for rank in range(size)}
    assert len(keys) == 1
    return keys.pop()


@pytest.mark.parametrize(
    ("rows_of_groups", "prefix_len", "expected"),
    [
        ([1], 10, Key(1, 256)),
        ([3], 255, Key(4, 256)),  # 256 tokens with the one computed now
        ([3], 256, Key(4, 512)),
        ([5], 2047, Key(8, 2048)),
        ([13], 2048, Key(16, 4096)),
        ([17, 0, 9, 1], 100, Key(24, 256)),  # the group with most says how many all get
        ([0, 1], 900_000, Key(1, 1 << 20)),
        ([16], 900_000, Key(16, 1 << 20)),
        ([17], 900_000, None),  # would gather more than MAX_ELEMENTS
        ([256], 10, Key(256, 256)),
        ([257], 10, None),
    ],
)
def test_a_step_gets_the_smallest_shape_that_holds_it(rows_of_groups, prefix_len, expected):
    assert key_of(decoding(rows_of_groups, prefix_len)) == expected
    if expected is not None:
        assert expected.num_rows * expected.context <= MAX_ELEMENTS


def test_the_context_is_bounded_by_what_a_table_can_hold():
    assert key_of(decoding([1], 2900), max_context=3000) == Key(1, 3000)
    assert key_of(decoding([1], 10), max_context=100) == Key(1, 100)


def test_a_step_with_a_prompt_or_without_a_row_is_run_as_it_is():
    mixed = decoding([3])
    mixed.row_flags[1] = ROW_SAMPLE
    assert key_of(mixed) is None
    assert key_of(Batch(1, 1, dp_num_tokens=np.zeros(2, np.int32))) is None
    assert key_of(decoding([2], decode_len=4), decode_len=4) == Key(2, 256)
    assert key_of(decoding([2], decode_len=1), decode_len=4) is None


def test_shapes_are_few_and_waste_little():
    assert all(0 < after - before <= 8 and after <= 2 * before for before, after in itertools.pairwise(ROW_BUCKETS))


def test_each_group_s_rows_come_first_and_padding_fills_them_up():
    rows = Rows.of(decoding([2, 0, 3]), Layout(0, 3, 3, 1))
    assert padded_slots(rows, 4, 99, 3).tolist() == [0, 1, 99, 99, 99, 99, 99, 99, 2, 3, 4, 99]


@pytest.mark.parametrize(("seed", "num_draft_tokens"), [(0, 0), (1, 0), (2, 3), (3, 3)])
def test_padded_and_replayed_steps_give_the_same_tokens(seed, num_draft_tokens, tmp_path):
    """Greedy and seeded; what the padding page holds is nobody's business, be it no number at all."""
    make_checkpoint(tmp_path, seed, predictable=seed == 3)
    sampling = {"temperature": 0.8, "top_p": 0.9} if seed % 2 else {}
    config = config_of(tmp_path, num_draft_tokens=num_draft_tokens)
    expected = serve(served(Alone(), config, graphs=False), seed, NUM_NEW, **sampling)
    world = served(Alone(), config, graphs=True)
    graphs = world.ranks.runner.graphs
    for pool in world.ranks.runner.cache.latent:
        pool.data[-world.limits.page_size :] = float("nan")
    assert serve(world, seed, NUM_NEW, **sampling) == expected
    assert graphs is not None and 2 <= len(graphs._captured) <= 4  # each captured once, and replayed from then on
    places = {tuple(output.data_ptr() for output in outputs) for _, _, outputs in graphs._captured.values()}
    assert len(places) == 1, "their outputs lie in the same place: of all shapes together they would be gigabytes"


def test_idle_groups_pad_too_and_all_ranks_take_the_same_graph(ranks, tmp_path):
    make_checkpoint(tmp_path, 1)
    expected = serve(served(Alone(), config_of(tmp_path), graphs=False), 1, NUM_NEW)
    for attn_dp_size, num_draft_tokens in ((1, 0), (ranks.size, 0), (2, 2)):
        config = config_of(tmp_path, ranks.size, attn_dp_size, ranks.size, num_draft_tokens=num_draft_tokens)
        world = served(ranks, config, graphs=True)
        assert serve(world, 1, NUM_NEW) == expected
        assert attn_dp_size == 1 or world.num_idle
        captured = ranks.call(captured_keys)
        assert all(keys == captured[0] for keys in captured) and len(captured[0]) >= 2


def captured_keys(runner) -> list[Key]:
    return list(runner.graphs._captured)


def test_graphs_are_gone_before_the_ranks_part(tmp_path, monkeypatch):
    """NCCL waits for all that were captured with one of its collectives."""
    make_checkpoint(tmp_path, 1)
    ranks = Alone()
    served(ranks, config_of(tmp_path), graphs=True)
    assert ranks.runner.graphs is not None
    left = []
    monkeypatch.setattr(ranks.runner.ranks, "close", lambda: left.append(ranks.runner.graphs))
    ranks.runner.close()
    assert left == [None]


def test_a_slot_s_last_id_is_read_once_and_its_length_is_the_scheduler_s(tmp_path, monkeypatch):
    """Poisoned with -1 as soon as a step has taken it, it would be seen by the next if the step did not set it."""
    make_checkpoint(tmp_path, 2)
    expected = serve(served(Alone(), config_of(tmp_path), graphs=False), 2, NUM_NEW)
    world = served(Alone(), config_of(tmp_path), graphs=True)
    inputs, run, num_read = SlotState.inputs, Graphs.run, 0

    def once(self: SlotState, slots: torch.Tensor) -> torch.Tensor:
        nonlocal num_read
        found = inputs(self, slots)
        real = slots[slots < len(self.last_id) - 1]
        assert (found >= 0).all() and len(set(real.tolist())) == len(real)
        self.last_id[real] = -1
        num_read += len(real)
        return found

    def checked(self: Graphs, key: Key, rows: Rows):
        assert torch.equal(self._state.length[rows.slot] - 1, torch.from_numpy(rows.prefix_len.astype(np.int64)))
        return run(self, key, rows)

    monkeypatch.setattr(SlotState, "inputs", once)
    monkeypatch.setattr(Graphs, "run", checked)
    assert serve(world, 2, NUM_NEW) == expected
    assert num_read > NUM_NEW


def test_a_step_is_told_slots_and_nothing_else():
    """What graphs send to the device is one array of slots; ids, drafts and lengths are there already."""
    rows = Rows.of(decoding([2, 1]), Layout(0, 2, 2, 1))
    sent = padded_slots(rows, 2, 9, 2)
    assert sent.dtype == np.int64 and sent.tolist() == [0, 1, 2, 9]
    state = SlotState.zeros(9, 2, torch.device("cpu"))
    state.last_id[:3], state.drafts[:3, 0] = torch.tensor([5, 6, 7]), torch.tensor([50, 60, 70])
    assert state.inputs(torch.from_numpy(sent)).tolist() == [[5, 50, 0], [6, 60, 0], [7, 70, 0], [0, 0, 0]]
    assert state.length.tolist() == [0] * 9 + [1]
