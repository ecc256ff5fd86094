"""The native passes over a step's rows do what their rules say, one row at a time. [R33] [R37] [R38]"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from glm53d._native import TokenLog, cut
from glm53d.ipc.records import OUTPUT
from glm53d.sched.results import END_OF_TURN, FULL, GOES_ON

EOS = (0, 3)
IS_EOS = np.array([i in EOS for i in range(8)])

blocks = st.lists(st.integers(-1, 9), min_size=1, max_size=4)
rows = st.lists(  # (block, num_output, room, ignore_eos)
    st.tuples(blocks, st.integers(0, 5), st.integers(1, 5), st.booleans()), min_size=1, max_size=6
)


@given(rows)
def test_a_block_ends_behind_its_first_end_of_turn_or_where_there_is_no_room(drawn):
    width = max(len(block) for block, _, _, _ in drawn)
    ids = np.array([block + [-7] * (width - len(block)) for block, _, _, _ in drawn], np.int32)
    num_output = np.array([n for _, n, _, _ in drawn], np.int64)
    max_output = num_output + [room for _, _, room, _ in drawn]
    ignore = np.array([i for _, _, _, i in drawn])
    slots = np.arange(len(drawn), dtype=np.int32)
    counts = np.array([len(block) for block, _, _, _ in drawn], np.int32)
    got = cut(slots, ids, counts, num_output, max_output, ignore, IS_EOS).tolist()
    for (block, _, room, ignores), (count, verdict) in zip(drawn, got, strict=True):
        ends = [] if ignores else [i for i, token in enumerate(block[:room]) if token in EOS]
        if ends:
            assert (count, verdict) == (ends[0] + 1, END_OF_TURN)
        else:
            assert (count, verdict) == (min(len(block), room), FULL if len(block) >= room else GOES_ON)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=6), st.booleans()
)
def test_what_leaves_is_the_first_token_then_every_interval_or_all_that_is_unsent(drawn, everything):
    sent = np.array([s for s, _, _ in drawn], np.int64)
    total = sent + [unsent for _, unsent, _ in drawn]
    interval = np.array([i for _, _, i in drawn], np.int64)
    log, heads = TokenLog(len(drawn)), np.zeros(len(drawn), OUTPUT)
    heads["handle"] = np.arange(len(drawn)) + 100
    for slot, n in enumerate(total.tolist()):
        said = np.arange(n, dtype=np.int32)[None] + 1000 * slot
        log.advance(np.array([slot], np.int32), np.array([n], np.int32), said, *np.zeros((3, len(drawn)), np.int64), 0)
    slots = np.arange(len(drawn), dtype=np.int32)[::-1].copy()
    view = heads.view(np.uint8).reshape(len(heads), -1)
    left, got, ids = log.leaving(slots, total, sent, interval, view, 55, everything)
    due = [
        s
        for s in slots.tolist()
        if everything or (total[s] > sent[s] and (sent[s] == 0 or total[s] - sent[s] >= interval[s]))
    ]
    assert left.tolist() == due
    at = 0
    for slot, head in zip(due, got.view(OUTPUT)[:, 0] if len(got) else (), strict=True):
        assert (head["handle"], head["token_offset"], head["num_output_ids"]) == (100 + slot, sent[slot], total[slot])
        assert (head["num_ids"], head["last_token_ns"]) == (total[slot] - sent[slot], 55)
        assert ids[at : at + head["num_ids"]].tolist() == [1000 * slot + i for i in range(sent[slot], total[slot])]
        at += int(head["num_ids"])
    assert at == len(ids)
