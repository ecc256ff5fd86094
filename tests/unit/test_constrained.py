"""Requests with grammars in the scheduler: where a grammar begins, and who waits for what. [R35] [F-E15]"""

import re

import numpy as np
import pytest

from glm53d.ipc.records import IGNORE_EOS, ROW_SAMPLE, FinishReason, GrammarKind
from glm53d.sched.req import ReqState
from tests.helpers.grammar_world import END, TOKENS, GrammarWorld
from tests.helpers.sched_world import generate_record

GRAMMAR = 'start: "abc" /[a-d]{2,5}/'
FORM = re.compile(r"abc[a-d]{2,5}\.")
AFTER = {"grammar": GRAMMAR, "grammar_kind": GrammarKind.AFTER_THINKING}
LAYOUTS = [{}, {"max_in_flight": 2}, {"num_draft_tokens": 3}, {"attn_dp_size": 2, "max_in_flight": 2}]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(5))
def test_a_grammar_holds_from_the_first_token_or_from_behind_thinking_and_others_are_free(layout, seed):
    world = GrammarWorld(seed, **layout)
    world.send(1, [1, 2, 3], 30, grammar=GRAMMAR)
    world.send(2, [1, 2, 3], 30)
    world.send(3, [1, 2, 3], 100, **AFTER)
    world.send(4, [1, 2, 3, 4], 60, **AFTER, thinking_budget=5)
    world.run()
    assert FORM.fullmatch(world.text(1)) and len(world.received[2]) == 30
    for handle in (3, 4):
        _, closed, answer = world.text(handle).partition("</think>")
        assert closed and FORM.fullmatch(answer), world.text(handle)
    assert len(world.text(4).partition("</think>")[0]) <= 5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_complete_form_ends_the_turn_that_would_ignore_its_end(layout):
    world = GrammarWorld(**layout)
    world.send(1, [1, 2, 3], 60, grammar=GRAMMAR, flags=IGNORE_EOS)
    world.send(2, [1, 2, 3], 200, **AFTER, flags=IGNORE_EOS)
    world.run()
    assert FORM.fullmatch(world.text(1))
    assert FORM.fullmatch(world.text(2).partition("</think>")[2])


@pytest.mark.parametrize("drafts", [[], [3], [3, 4], [3, 4, 5]])
def test_what_a_block_holds_behind_the_end_of_thinking_is_sampled_anew(drafts):
    """F-E15: `.</think>ab` in one block: a and b had no mask."""
    world = GrammarWorld(num_draft_tokens=4)
    world.send(1, [1, 2, 3], 60, **AFTER)
    script = iter([5, *drafts, END, 9, 9, 9, 9])
    world.sample = lambda: next(script, 9)
    world.rng.randrange = lambda count: count - 1
    world.run()
    before = "e" + "".join("cde"[i] for i in range(len(drafts)))
    assert re.fullmatch(before + "</think>" + FORM.pattern, world.text(1))


def test_under_overlap_the_token_launched_behind_the_end_of_thinking_is_dropped():
    """F-E15: when it is known that thinking has ended, the next step is running already."""
    world = GrammarWorld(max_in_flight=2)
    world.send(1, [1, 2, 3], 60, **AFTER)
    script = iter([5, 5, END])
    world.sample = lambda: next(script, 9)
    world.run()
    assert re.fullmatch("ee</think>" + FORM.pattern, world.text(1)) and world.sched.counters.dropped == 1


@pytest.mark.parametrize("layout", [{}, {"max_in_flight": 2}, {"num_draft_tokens": 3}])
@pytest.mark.parametrize("budget", [-1, 3, 9])
def test_a_call_in_the_thinking_ends_it_and_the_grammar_begins(layout, budget):
    """F-E7: else what follows the tag would have no form. The end of thinking stands in the tag's place."""
    world = GrammarWorld(call_begin=20, **layout)
    world.send(1, [1, 2, 3], 60, **AFTER, thinking_budget=budget)
    world.send(2, [1, 2, 3], 20)
    script = iter([5, 6, 5, 6, 20])
    world.sample = lambda: next(script, 20)
    world.run()
    assert re.fullmatch("[^t]*</think>" + FORM.pattern, world.text(1))
    assert "t" in world.text(2), "a turn without a grammar goes on with its call"


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_thinking_may_end_with_the_very_first_token(max_in_flight):
    world = GrammarWorld(max_in_flight=max_in_flight)
    world.send(1, [1, 2, 3], 60, **AFTER)
    world.sample = lambda: END
    world.run()
    assert re.fullmatch("</think>" + FORM.pattern, world.text(1))


def test_before_the_grammar_has_begun_no_turn_ends():
    """A turn that stops in its thinking has no answer, of whatever form."""
    world = GrammarWorld(eos_chance=0.5)
    world.send(1, [1, 2, 3], 200, **AFTER)
    world.run()
    assert re.fullmatch("[a-t]*</think>" + FORM.pattern, world.text(1))


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_an_abort_while_a_dropped_token_is_in_flight_frees_the_slot_once(max_in_flight):
    for steps in range(3, 9):
        world = GrammarWorld(max_in_flight=max_in_flight, max_running=1)
        world.send(1, [1, 2, 3], 60, **AFTER)
        script = iter([5, 5, END])
        world.sample = lambda script=script: next(script, 9)
        for _ in range(steps):
            world.step()
        world.sched.abort(1)
        world.send(2, [1, 2, 3], 60, grammar=GRAMMAR)
        world.run()
        assert FORM.fullmatch(world.text(2)) and world.ended[1] is FinishReason.ABORT


def test_who_waits_for_a_grammar_waits_alone():
    world = GrammarWorld()
    world.compiling.at_once = False
    world.send(1, [1, 2, 3], 30, grammar=GRAMMAR)
    world.send(2, [1, 2, 3], 30)
    for _ in range(5):
        world.step()
    assert world.sched.reqs[1].state is ReqState.GRAMMAR and len(world.received[2]) == 5
    assert world.sched.num_waiting == 1
    world.compiling.run()
    world.run()
    assert FORM.fullmatch(world.text(1)) and len(world.received[2]) == 30


def test_an_abort_while_the_grammar_is_compiled_leaves_nothing():
    """DESIGN, abort phases: grammar wait."""
    world = GrammarWorld()
    world.compiling.at_once = False
    for handle in (1, 2):
        world.send(handle, [1, 2, 3], 30, grammar=GRAMMAR)
    world.sched.abort(1)
    world.step()
    assert world.ended[1] is FinishReason.ABORT
    world.compiling.run()
    world.run()
    assert FORM.fullmatch(world.text(2)) and world.sched.num_waiting == 0


def test_a_row_whose_mask_is_not_there_sits_out_and_the_others_go_on():
    world = GrammarWorld()
    world.send(1, [1, 2, 3], 30, grammar=GRAMMAR)
    world.send(2, [1, 2, 3], 30)
    world.step()
    world.masking.at_once = False
    world.step()
    slot = world.sched.reqs[1].slot
    for _ in range(5):
        assert slot not in world.step().row_slot
    assert len(world.received[1]) == 2 and len(world.received[2]) == 7
    world.masking.run()
    assert slot in world.step().row_slot
    world.masking.at_once = True
    world.masking.run()
    world.run()
    assert FORM.fullmatch(world.text(1))


def test_one_job_serves_all_rows_of_a_grammar_in_a_step_and_none_that_has_no_grammar():
    world = GrammarWorld()
    for handle in range(1, 5):
        world.send(handle, [1, 2, handle], 30, grammar=GRAMMAR)
    world.send(9, [1, 2, 3], 30)
    world.step()
    before = world.masking.num_submitted
    batch = world.step()
    assert world.masking.num_submitted == before + 1 and len(batch.mask_row) == 4 and batch.num_rows == 5
    world.run()
    assert world.sched.slots.num_free == world.limits.max_running


def test_a_grammar_is_compiled_once_and_the_one_used_longest_ago_is_forgotten_first():
    world = GrammarWorld(max_cached=2)
    texts = [f'start: "{letter}"' for letter in "abc"]
    for handle, text in enumerate([texts[0], texts[0], texts[1], texts[0], texts[2], texts[0], texts[1]], 1):
        world.send(handle, [1], 5, grammar=text)
        world.step()
    assert world.compiling.num_submitted == 4  # a, b, c, and b again
    world.run()
    assert [world.text(handle) for handle in range(1, 8)] == ["a.", "a.", "b.", "a.", "c.", "a.", "b."]


def test_siblings_share_one_compilation_and_each_follows_the_grammar():
    world = GrammarWorld()
    world.compiling.at_once = False
    for handle in (1, 2, 3):
        world.send(handle, [1, 2, 3, 4, 5], 30, grammar=GRAMMAR, group=1)
    assert world.compiling.num_submitted == 1
    world.compiling.run()
    world.run()
    assert all(FORM.fullmatch(world.text(handle)) for handle in (1, 2, 3))


def test_a_grammar_that_cannot_be_compiled_is_an_error_of_its_request():
    world = GrammarWorld()
    world.send(1, [1, 2, 3], 30, grammar="start: nothing")
    world.send(2, [1, 2, 3], 30)
    world.run()
    assert world.failed(1) and world.received[1] == [] and len(world.received[2]) == 30


def test_a_grammar_that_cannot_go_on_is_an_error_of_its_request_and_is_compiled_anew_for_the_next():
    world = GrammarWorld()
    world.send(1, [1, 2, 3], 30, grammar=GRAMMAR)
    world.send(2, [1, 2, 3], 30, grammar=GRAMMAR)
    world.step()
    world.sched.reqs[1].matcher.machine.consume_token(END)  # as if a limit of the library had been hit
    world.run()
    assert world.failed(1) and FORM.fullmatch(world.text(2))
    world.send(3, [1, 2, 3], 30, grammar=GRAMMAR)
    assert world.compiling.num_submitted == 2
    world.run()
    assert FORM.fullmatch(world.text(3))


def test_a_library_that_breaks_in_a_job_breaks_one_request(monkeypatch):
    world = GrammarWorld()
    world.send(1, [1, 2, 3], 30, grammar=GRAMMAR)
    world.send(2, [1, 2, 3], 30, grammar='start: "cab"')
    world.step()
    matcher = world.sched.reqs[1].matcher
    monkeypatch.setattr(matcher.grammar, "advance", lambda *_: 1 / 0)
    world.run()
    assert world.failed(1) and world.text(2) == "cab."


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(4))
def test_who_was_retracted_goes_on_in_its_grammar(layout, seed):
    world = GrammarWorld(seed, **layout | {"num_pages": 14})
    for handle in (1, 2, 3, 4):
        world.send(handle, [handle] * 6, 40, grammar="start: /(abcd){6,}/")
        world.send(handle + 4, [handle + 4] * 6, 40, **AFTER | {"grammar": "start: /(abcd){6,}/"}, thinking_budget=4)
    world.run(2000)
    assert world.sched.counters.retracted > 0
    for handle in range(1, 9):
        answer = world.text(handle).partition("</think>")[2] if handle > 4 else world.text(handle)
        assert re.fullmatch(r"(abcd){6,}\.|(abcd)*a?b?c?", answer), world.text(handle)


def test_who_is_retracted_while_its_mask_is_computed_waits_for_it():
    world = GrammarWorld()
    world.send(1, [1, 2, 3], 30, grammar=GRAMMAR)
    world.send(2, [1, 2, 3], 30)
    world.step()
    world.masking.at_once = False
    world.step()
    world.pause(retract=True)
    world.sched.resume()
    for _ in range(4):
        world.step()
    assert len(world.received[1]) == 2 and len(world.received[2]) == 6
    world.masking.at_once = True
    world.masking.run()
    world.run()
    assert FORM.fullmatch(world.text(1))


@pytest.mark.parametrize(
    ("said", "kind", "rest"),
    [
        ("abca", GrammarKind.FROM_START, "[a-d]{1,4}"),
        ("ttt</think>abcdd", GrammarKind.AFTER_THINKING, "[a-d]{0,3}"),
        ("ttt</think>", GrammarKind.AFTER_THINKING, "abc[a-d]{2,5}"),
        ("ttt", GrammarKind.AFTER_THINKING, "[a-t]*</think>abc[a-d]{2,5}"),
    ],
)
def test_a_resumed_request_goes_on_where_its_output_stands(said, kind, rest):
    """[R53]"""
    world = GrammarWorld()
    output = [TOKENS.index(part.encode()) for part in re.findall("</think>|.", said)]
    record = generate_record(1, [1, 2, 3], 80, output=output, grammar=GRAMMAR, grammar_kind=kind)
    world.receive(1, [1, 2, 3], output, record)
    world.run()
    assert re.fullmatch(re.escape(said) + rest + r"\.", world.text(1))


def test_no_thinking_is_ended_in_a_grammar_that_holds_from_the_first_token():
    world = GrammarWorld()
    world.send(1, [1, 2, 3], 30, grammar=GRAMMAR, thinking_budget=2)
    world.run()
    assert FORM.fullmatch(world.text(1))


def test_length_ends_an_answer_in_the_middle_of_its_form():
    """F-E14, seen from the scheduler: `length`, and no error."""
    world = GrammarWorld()
    world.send(1, [1, 2, 3], 2, grammar=GRAMMAR)
    world.run()
    assert world.text(1) == "ab" and world.ended[1] is FinishReason.LENGTH


def test_a_mask_stands_at_each_row_that_samples_and_at_no_other():
    world = GrammarWorld(max_step_tokens=16)
    world.send(1, [1] * 40, 30, grammar=GRAMMAR)
    masked = []
    while (batch := world.step()) is not None:
        samples = (batch.row_flags & ROW_SAMPLE) != 0
        assert np.array_equal(batch.mask_row, np.flatnonzero(samples))
        masked.append(len(batch.mask_row))
    assert masked[:3] == [0, 0, 1] and FORM.fullmatch(world.text(1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_whenever_jobs_end_and_whoever_is_aborted_each_answer_has_its_form(layout, seed):
    """Random traffic: jobs end late and in any order, pages are short, clients leave."""
    world = GrammarWorld(seed, **layout | {"num_pages": 24, "eos_chance": 0.05})
    world.masking.at_once = world.compiling.at_once = False
    rng, aborted, handle = np.random.default_rng(seed), set(), 0
    for _ in range(400):
        if rng.random() < 0.15:
            handle += 1
            kind = GrammarKind(int(rng.integers(1, 3)))
            grammar = {"grammar": f'start: "{"abc"[handle % 3]}" /[a-d]*/', "grammar_kind": kind} if handle % 4 else {}
            budget = int(rng.integers(0, 9)) if kind is GrammarKind.AFTER_THINKING else -1
            world.send(
                handle, [int(i) for i in rng.integers(1, 20, 1 + handle % 9)], 30, thinking_budget=budget, **grammar
            )
        if rng.random() < 0.03 and world.sched.reqs:
            aborted.add(gone := int(rng.choice(list(world.sched.reqs))))
            world.sched.abort(gone)
        for jobs in (world.masking, world.compiling):
            if jobs.waiting and rng.random() < 0.5:
                jobs.waiting.pop(int(rng.integers(len(jobs.waiting))))()
        world.step()
    for jobs in (world.masking, world.compiling):
        jobs.at_once = True
        jobs.run()
    world.run(2000)
    for number in range(1, handle + 1):
        kind = "grammar" if number % 4 else "free"
        text = world.text(number).rpartition("</think>")[2]
        if kind == "grammar" and number not in aborted and "</think>" in world.text(number):
            assert re.fullmatch(f"({'abc'[number % 3]}[a-d]*\\.?)?", text), (number, world.text(number))
    assert world.sched.grammars.num_jobs == world.sched.grammars.num_opening == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_token_has_its_logprob_once_where_a_step_s_token_is_dropped_too(layout):
    """[R38]"""
    for seed in range(4):
        world = GrammarWorld(seed, **layout)
        for handle in (1, 2):
            world.send(handle, [1, 2, handle], 100, **AFTER, top_logprobs=2)
        world.run()
        for handle in (1, 2):
            rows = world.logprobs[handle][1]
            assert [row[0][0] for row in rows] == world.received[handle]
            for position, row in enumerate(rows, 3):
                assert row[0][1] == world.logprob(position, row[0][0])
