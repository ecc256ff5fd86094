"""The scheduler under random arrivals, aborts, finishes, full rings and tight pools. [R13] [R26]–[R30]

SchedWorld checks after every step: pages and tree in balance, every row reads only its own KV, ids arrive in order,
nobody was admitted before one that goes first, and no rank is idle that somebody may go to. The walk below adds that
something runs while somebody waits, that gaps are bounded, and what a finished request has put out and was counted.
"""

import os
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53d.ipc.batch import Batch
from glm53d.ipc.records import HELPER, ROW_FEED, FinishReason
from glm53d.sched.placement import POLICIES
from glm53d.sched.tiers import TierCounters, TierLimits
from tests.helpers.sched_world import SchedWorld

STEPS = 1_000_000 if os.environ.get("GLM53D_LONG") else 40_000
SEEDS = 40
TIERS = ("device", "host", "storage")


def prompt_tokens(batch: Batch) -> int:
    """Of the rank that has most."""
    return int(np.bincount(batch.row_dp_rank, np.where(batch.row_flags & ROW_FEED, 0, batch.row_extend_len)).max())


def step(world: SchedWorld, *, collect: bool = True) -> None:
    """One that finds work where there is some, and lets no stream wait longer than its target or a page takes."""
    was_idle, target = not world.launched, world.limits.target_itl_ns
    batch = world.step(collect=collect)
    if batch is None:
        assert not was_idle or not world.sched.reqs or world.sched.is_paused, "somebody waits and nothing runs"
    elif target and batch.num_rows and (batch.row_flags & ROW_FEED).any():
        assert prompt_tokens(batch) <= world.limits.page_size or world.step_ns(batch) <= target


def drive(seed: int, steps: int) -> SchedWorld:
    """Random traffic for so many steps, then run dry."""
    rng = random.Random(seed)
    target_itl_ns = rng.choice([0, 0, 5, 15])
    tiers = TierLimits(
        host_pages=rng.choice([0, 0, 5, 40]),
        file_pages=rng.choice([0, 10, 100]),
        step_pages=rng.choice([1, 4, 100]),
        load_ns=rng.choice([0, 1]),
        peer_ns=rng.choice([-1, 0, 0]),
        group_size=rng.choice([1, 2]),
    )
    world = SchedWorld(
        seed,
        tiers=tiers if tiers.host_pages else replace(tiers, file_pages=0),
        attn_dp_size=rng.choice([1, 1, 2, 3, 4, 8]),
        num_pages=rng.choice([12, 30, 60]),
        max_running=rng.choice([1, 1, 2, 6, 12]),
        ageing_ns=rng.choice([0, 20, 1000]),
        num_draft_tokens=rng.choice([0, 0, 0, 2]),
        max_in_flight=rng.choice([1, 2, 2]),
        session_ttl_ns=rng.choice([0, 5, 100]),
        max_session_pages=rng.choice([4, 100]),
        max_biased=rng.choice([1, 3, 100]),
        placement=rng.choice(list(POLICIES)),
        max_step_area=rng.choice([200, 1 << 30]),
        target_itl_ns=target_itl_ns,
        step_ns=(lambda batch: 1 + prompt_tokens(batch) if batch.num_rows else 1) if target_itl_ns else lambda batch: 1,
    )
    num_ranks, longest = world.limits.attn_dp_size, {}
    world.kv.fails = rng.choice([0.0, 0.1])
    needs_value = rng.choice([0.0, 0.1])
    shared = [[rng.randrange(1, world.vocab) for _ in range(60)] for _ in range(3)]
    handle, session_of = 0, {}
    for _ in range(steps):
        if rng.random() < 0.25 and len(world.sched.reqs) < 40:
            before, session = rng.choice(shared)[: rng.randrange(60)], rng.choice([0, 1, 2, 3])
            if handle and rng.random() < 0.3:  # a session's next turn
                last = rng.randint(max(1, handle - 5), handle)
                before, session = world.prompts[last] + world.received[last], session_of[last]
            prompt = before + [rng.randrange(1, world.vocab) for _ in range(rng.randint(1, 20))]
            fields = {
                "priority": rng.choice([-3, 0, 0, 1]), "flags": rng.choice([0, 0, HELPER]),
                "deadline_ns": rng.choice([0, 0, world.now + 30]), "stream_interval": rng.choice([1, 1, 3, 50]),
                "session": session, "thinking_budget": rng.choice([-1, -1, 0, 1, 5]),
                "frequency_penalty": rng.choice([0.0, 0.0, 0.5]), "repetition_penalty": rng.choice([1.0, 1.0, 1.2]),
                "top_logprobs": rng.choice([-1, -1, 0, 3]),
                "logprob_start": rng.choice([-1, -1, 0, 1, len(prompt) - 1]),
                "dp_rank": rng.choice([-1, -1, -1, rng.randrange(num_ranks)]),
                "bootstrap_room": rng.choice([-1, rng.randrange(100)]),
            }  # fmt: skip
            prompt = prompt[: world.limits.max_req_input_len]
            first, count = handle + 1, rng.choice([1, 1, 1, 4])  # several: answers to one prompt [R20]
            fields["group"] = first if count > 1 else 0
            for handle in range(first, first + count):
                session_of[handle] = session
                max_new = rng.randint(1, rng.choice([2, 40]))
                longest[handle] = min(max_new, world.limits.max_seq_len - len(prompt))
                world.send(handle, prompt, max_new, **fields)
        if rng.random() < 0.02:
            world.sched.flush_cache()
        if rng.random() < 0.02:
            world.pause(retract=rng.random() < 0.5)
        elif world.sched.is_paused and rng.random() < 0.3:
            world.sched.resume()
        is_held = len(world.launched) == 2  # then abort one whose row may be in flight
        victims = [handle for handle, req in world.sched.reqs.items() if req.slot >= 0 or not is_held]
        if rng.random() < (0.3 if is_held else 0.05) and victims:
            world.sched.abort(rng.choice(victims))
        if rng.random() < needs_value:
            slots = world.sched.slots
            at_random = np.array([rng.random() < 0.3 for _ in slots.needs_value])
            slots.needs_value[:] = np.isin(slots.think_left, (0, 1)) | at_random
        if rng.random() < 0.05:
            world.ring_room = rng.choice([None, 0, 1, 5])
        step(world, collect=rng.random() < 0.8)
    world.sched.resume()
    world.ring_room = None
    while world.sched.reqs or world.launched or world.sched.throttle.take_last() or len(world.sched.sessions):
        step(world)
    for handle, reason in world.ended.items():
        head, said = world.last_heads[handle], len(world.received[handle])
        assert said <= longest[handle] and (reason is not FinishReason.LENGTH or said == longest[handle])
        assert int(head["num_prompt_ids"]) == len(world.prompts[handle])
        assert sum(int(head[f"cached_{tier}"]) for tier in TIERS) < len(world.prompts[handle])
    assert world.sched.counters.decode_tokens == sum(map(len, world.received.values()))
    return world


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_books_balance_and_nothing_is_left_after_random_traffic(seed):
    """[R13] order, size, ownership after each of 40,000 steps, or a million; every request ends once."""
    world = drive(seed, STEPS // SEEDS)
    assert world.is_idle()
    assert set(world.ended) == set(world.prompts)
    assert world.sched.counters.finished > 0
    while world.sched.tiers.has_moves or world.launched:
        world.step()
    assert not world.kv.is_quiet or not any(host.num_pinned for host in world.sched.tiers.hosts)


@pytest.mark.parametrize("seed", range(3))
def test_each_token_has_its_logprob_once_whatever_the_traffic(seed):
    """[R38] Of the prompt from where it was asked for, and of all that was put out; retracted, cached, forced."""
    world, num_prompt = drive(seed, 1500), 0
    for handle, (top, start) in world.asked.items():
        prompt, said, (of_prompt, of_output) = world.prompts[handle], world.received[handle], world.logprobs[handle]
        assert all(len(row) == 1 + top for row in [*of_prompt, *of_output])
        assert [row[0][0] for row in of_output] == (said if top >= 0 else [])
        wanted = prompt[start:] if top >= 0 <= start else []
        assert [row[0][0] for row in of_prompt] == (wanted if said else wanted[: len(of_prompt)])  # else it was aborted
        num_prompt += len(of_prompt)
        for position, row in [*enumerate(of_prompt, start), *enumerate(of_output, len(prompt))]:
            if position == 0:
                assert np.isnan(row[0][1]) and {id_ for id_, _ in row[1:]} <= {-1}
            elif row[0][1] != 0.0:
                assert row == [(row[0][0] + i, world.logprob(position, row[0][0] + i)) for i in range(1 + top)]
            else:
                assert row[0][0] == world.limits.think_end, "only what is forced has no logprob"
    assert num_prompt > 100


def test_random_traffic_really_retracts_aborts_and_hits_the_cache():
    """The test above is worth something only if these happen."""
    worlds = [drive(seed, 600) for seed in range(8)]
    counters = [world.sched.counters for world in worlds]
    assert sum(c.retracted for c in counters) > 10
    assert sum(c.expired for c in counters) > 10
    assert sum(c.dropped for c in counters) > 10
    assert sum(c.thinking_forced for c in counters) > 10
    kept = [w.sched.sessions.counters for w in worlds]
    assert min(sum(getattr(k, name) for k in kept) for name in ("kept", "resumed", "expired", "evicted")) > 0
    assert sum(c.aborted for c in counters) > 10
    assert sum(c.cached_tokens for c in counters) > 1000
    moved = [w.sched.tiers.counters for w in worlds]
    assert min(sum(getattr(m, name) for m in moved) for name in TierCounters.__slots__) > 0


prompts = st.lists(st.integers(1, 8), min_size=1, max_size=40)  # few ids: many shared prefixes


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(st.tuples(prompts, st.integers(1, 12), st.integers(0, 6)), min_size=1, max_size=12),
    aborts=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), max_size=6),
    num_pages=st.integers(12, 40),
    max_step_tokens=st.integers(16, 40),
)
def test_any_small_history_ends_in_balance(requests, aborts, num_pages, max_step_tokens):
    """As above, in a form that hypothesis can shrink: requests (prompt, max_new, wait), aborts (step, handle)."""
    world = SchedWorld(0, num_pages=num_pages, max_running=4, max_step_tokens=max_step_tokens)
    step = 0
    for handle, (prompt, max_new, wait) in enumerate(requests, 1):
        world.send(handle, prompt, max_new)
        for _ in range(wait):
            step += 1
            world.step()
            for when, victim in aborts:
                if when == step and victim in world.sched.reqs:
                    world.sched.abort(victim)
    for _ in range(2000):
        if not world.sched.reqs:
            break
        world.step()
    world.step()
    assert world.is_idle() and set(world.ended) == set(world.prompts)


@settings(max_examples=100, deadline=None)
@given(prompts=st.lists(st.integers(1, 110), max_size=12), num_running=st.integers(0, 6))
def test_every_running_request_decodes_however_long_the_prompts(prompts, num_running):
    """[R29] decode rows go first, one token each, and a step stays under its budget."""
    world = SchedWorld(0, num_pages=400, max_running=32, eos_chance=0)
    for handle in range(1, num_running + 1):
        world.send(handle, [handle], 100)
    if num_running:
        world.step()
    running = list(world.sched.decoding_slots())
    for handle, length in enumerate(prompts, 100):
        world.send(handle, [handle % 49] * length, 5)
    batch = world.step()
    if batch is None:
        assert not running and not prompts
        return
    assert list(batch.row_slot[: len(running)]) == running
    assert (batch.row_extend_len[: len(running)] == 1).all()
    assert batch.num_tokens <= world.limits.max_step_tokens


@settings(max_examples=30, deadline=None)
@given(level=st.integers(-20, 0), rivals=st.integers(1, 20), ageing_ns=st.integers(0, 30), length=st.integers(1, 100))
def test_no_request_waits_for_ever_behind_others_of_higher_priority(level, rivals, ageing_ns, length):
    """[R28] rivals come without end; only such as come within the head start may go first."""
    world = SchedWorld(0, num_pages=30, max_running=2, eos_chance=0.2, ageing_ns=ageing_ns)
    world.send(1, [1] * length, 2, priority=level)
    handle, bound = 1, 200 + 60 * (rivals - level) * (ageing_ns + 1)
    while 1 not in world.ended:
        if world.sched.num_waiting < 4:
            handle += 1
            world.send(handle, [2 + handle % 40] * 8, 5, priority=rivals)
        world.step()
        assert world.now < bound, "it starves"
