"""Stop strings in the scheduler, case by case. [R38] [R40]"""

from collections.abc import Iterable

import numpy as np
import pytest

from glm53d._native import ByteVocab, StopTable
from glm53d.ipc.batch import StepResult
from glm53d.ipc.records import NO_STOP_TRIM, SKIP_SPECIAL, STOP_BEFORE_CALLS, STOP_IN_CONTENT, FinishReason
from glm53d.sched import results
from tests.helpers.sched_world import SchedWorld, generate_record

TOKENS = [b"<eos>", b"\nUser", b":", b"Hi", b" there", b"r: x", b"</think>"]
ALL_TEXT = {"skip_special": False, "in_content": False, "before_calls": False, "keep_match": False}
EOS, USER, COLON, HI, THERE, R_X, THINK_END = range(7)


def make_world(script: Iterable[int], **limits: int) -> SchedWorld:
    """A world whose one running request says what the script says, then "Hi" for ever."""
    world = SchedWorld(tokens=TOKENS, **limits)
    ids = iter(script)
    world.sample = lambda: next(ids, HI)
    return world


def run(world: SchedWorld, handle: int = 1, steps: int = 50) -> np.void:
    """To the request's end; its last head."""
    for _ in range(steps):
        world.step()
        if handle in world.ended:
            return world.last_heads[handle]
    raise AssertionError("the request goes on")


def finish_of(head: np.void) -> tuple[FinishReason, int, int, int]:
    """(reason, matched_id, matched_stop, held_bytes)"""
    return FinishReason(int(head["finish_reason"])), *(
        int(head[n]) for n in ("matched_id", "matched_stop", "held_bytes")
    )


def apply_block(world: SchedWorld, *ids: int) -> None:
    """One step that samples several tokens for the one row there is."""
    batch = world.sched.next_batch(world.now)
    counts, block = np.array([len(ids)], np.int32), np.array([ids], np.int32)
    results.apply(world.sched, batch, StepResult(batch.step, counts, block), 1)
    world.deliver()


def test_generation_ends_at_the_token_that_completes_a_stop_string():
    world = make_world([HI, USER, COLON, THERE])
    world.send(1, [HI], 20, stop=("x", "\nUser:"))
    assert finish_of(run(world)) == (FinishReason.STOP, -1, 1, len("\nUser:"))
    assert world.received[1] == world.sampled[1] == [HI, USER, COLON] and world.is_idle()


def test_text_that_may_become_a_stop_string_is_held_back_and_only_that():
    """[F-D1] [F-D2] not the length of the longest stop string, and nothing at an end without a match."""
    world = make_world([HI, USER, THERE, USER, EOS])
    world.send(1, [HI], 20, stop=("\nUser:", "something much longer than all of the text"))
    held = []
    while 1 not in world.ended:
        world.step()
        held.append(int(world.last_heads[1]["held_bytes"]))
    assert held == [0, len("\nUser"), 0, len("\nUser"), 0]
    assert finish_of(world.last_heads[1]) == (FinishReason.STOP, EOS, -1, 0)


def test_a_block_is_cut_at_the_token_that_completes_a_stop_string():
    """[F-D3] what comes after is neither counted, sent nor cached."""
    world = make_world([])
    world.send(1, [HI] * 3, 20, stop=("er:",))
    apply_block(world, USER, COLON, HI, HI, EOS)
    assert world.received[1] == [USER, COLON] and world.ended[1] is FinishReason.STOP
    assert int(world.last_heads[1]["num_output_ids"]) == world.sched.counters.decode_tokens == 2
    assert finish_of(world.last_heads[1])[2:] == (0, len("er:"))
    assert world.sched.ranks[0].tree.num_pages == 0  # three ids with KV fill no page of four


def test_an_end_of_turn_before_the_match_wins_and_its_text_is_not_held():
    world = make_world([])
    world.send(1, [HI], 20, stop=("\nUser:",))
    apply_block(world, USER, EOS, COLON)
    assert world.received[1] == [USER, EOS]
    assert finish_of(world.last_heads[1]) == (FinishReason.STOP, EOS, -1, 0)


@pytest.mark.parametrize(("max_new", "stop"), [(2, "er:"), (20, "r<eos>")])
def test_a_match_wins_over_another_end_at_the_same_token(max_new, stop):
    world = make_world([])
    world.send(1, [HI], max_new, stop=(stop,))
    apply_block(world, USER, COLON if stop == "er:" else EOS, HI)
    assert finish_of(world.last_heads[1]) == (FinishReason.STOP, -1, 0, len(stop))


def test_with_no_stop_trim_only_what_is_behind_the_match_is_held():
    world = make_world([HI, R_X])
    world.send(1, [HI], 20, stop=("ir:",), flags=NO_STOP_TRIM)
    assert finish_of(run(world)) == (FinishReason.STOP, -1, 0, len(" x"))


def test_a_chat_is_looked_at_behind_its_thinking_only():
    world = make_world([HI, THINK_END, THERE, HI])
    world.send(1, [HI], 20, stop=("Hi", ">"), flags=STOP_IN_CONTENT)
    assert finish_of(run(world))[2:] == (0, len("Hi")) and world.received[1] == [HI, THINK_END, THERE, HI]


def test_where_calls_are_read_a_call_is_never_cut_by_a_stop_string():
    """Neither one that the content goes on to, nor one in the thinking, which it ends."""
    for said in ([THINK_END, HI, USER, R_X, HI, COLON], [HI, R_X, USER, COLON]):
        world = make_world([*said, EOS], call_begin=R_X)
        world.send(1, [HI], 20, stop=("\nUser:", "x", ": ", "HiHi"), flags=STOP_IN_CONTENT | STOP_BEFORE_CALLS)
        assert finish_of(run(world)) == (FinishReason.STOP, EOS, -1, 0) and world.received[1] == [*said, EOS]
        world = make_world([*said, EOS], call_begin=R_X)
        world.send(1, [HI], 20, stop=("r: x",))
        assert finish_of(run(world))[2:] == (0, len("r: x"))


@pytest.mark.parametrize(("least", "count"), [(0, 3), (3, 3), (4, 6), (6, 6)])
def test_no_stop_string_ends_a_request_before_its_min_new_tokens(least, count):
    """The token that completes one may be the last of them; what it completes may begin before."""
    said = [HI, USER, COLON, HI, USER, COLON]
    for output in ([], said[:2]):  # also of a request that is resumed
        world = make_world(said[len(output) :])
        record = generate_record(1, [HI], 20, output=output, stop=("\nUser:",), min_new_tokens=least)
        world.receive(1, [HI], output, record)
        assert finish_of(run(world)) == (FinishReason.STOP, -1, 0, len("\nUser:"))
        assert world.received[1] == said[:count]


def test_special_tokens_are_text_only_when_main_shows_them():
    tokens = ByteVocab([b"a", b"S", b"b"], [False, True, False])
    for skip, count in ((True, 3), (False, 2)):
        table = StopTable(1, tokens, -1, -1)
        table.open(0, [b"ab", b"S"], np.empty(0, np.int32), **ALL_TEXT | {"skip_special": skip})
        fed = table.feed(np.zeros(1, np.int32), np.array([3], np.int32), np.array([[0, 1, 2]], np.int32))
        assert fed[0].tolist() == [count, 0 if skip else 1, 2 if skip else 1]


def test_a_match_across_a_retraction_is_found():
    """[R30] the state is made again from the ids."""
    world = SchedWorld(num_pages=8, tokens=TOKENS)
    world.sample = lambda: HI
    world.send(1, [HI] * 8, 20)
    world.send(2, [THERE] * 8, 20, stop=("HiHiHiHiHiHiHiHiHiHiHiHi",))  # twelve tokens
    head = run(world, 2, 100)
    assert int(head["num_retractions"]) >= 1
    assert finish_of(head) == (FinishReason.STOP, -1, 0, 24) and world.received[2] == [HI] * 12


def test_a_resumed_request_knows_what_it_has_said():
    """[R53]"""
    world = make_world([COLON])
    record = generate_record(1, [HI], 9, output=[HI, USER], stop=("\nUser:",), cached_device=0)
    world.receive(1, [HI], [HI, USER], record)
    assert finish_of(run(world)) == (FinishReason.STOP, -1, 0, len("\nUser:")) and world.received[1] == [
        HI,
        USER,
        COLON,
    ]


def test_the_next_request_in_a_slot_has_its_own_stop_strings_or_none():
    world = make_world([USER, USER, COLON, HI, USER, COLON], max_running=1)
    world.send(1, [HI], 1, stop=("\nUser:",))
    world.send(2, [HI], 3)
    world.send(3, [HI], 9, stop=(":",), flags=SKIP_SPECIAL)
    run(world, 3)
    assert [world.received[h] for h in (1, 2, 3)] == [[USER], [USER, COLON, HI], [USER, COLON]]
    assert finish_of(world.last_heads[1]) == (FinishReason.LENGTH, -1, -1, 0)
    assert finish_of(world.last_heads[2]) == (FinishReason.LENGTH, -1, -1, 0)
    assert finish_of(world.last_heads[3]) == (FinishReason.STOP, -1, 0, 1)


def test_a_full_output_ring_keeps_ids_and_hold_back_together():
    """[R38] the record that leaves at last says what is held of the text by then."""
    world = make_world([HI, USER, THERE, USER])
    world.send(1, [HI], 20, stop=("\nUser:",))
    world.ring_room = 1
    for _ in range(4):
        world.step()
    assert world.received[1] == [HI]
    world.ring_room = None
    world.deliver()
    assert world.received[1] == [HI, USER, THERE, USER] and int(world.last_heads[1]["held_bytes"]) == len("\nUser")


def test_an_abort_lets_go_of_what_was_held():
    world = make_world([USER])
    world.send(1, [HI], 20, stop=("\nUser:",))
    world.step()
    world.sched.abort(1)
    world.deliver()
    assert finish_of(world.last_heads[1]) == (FinishReason.ABORT, -1, -1, 0)


def test_wrong_arguments_are_refused():
    none, zero, one = np.empty(0, np.int32), np.zeros(1, np.int32), np.ones(1, np.int32)
    table = StopTable(2, ByteVocab([b"a"], [False]), -1, -1)
    table.open(0, [b"aa"], none, **ALL_TEXT)
    for wrong in (
        (one, one, one[None, :]),
        (zero, one + 1, one[None, :]),
        (zero, -one, one[None, :]),
        (zero, none, one[None, :]),
    ):
        with pytest.raises(ValueError):
            table.feed(*wrong)
    with pytest.raises(IndexError):
        table.close(2)
    with pytest.raises(ValueError, match="empty"):
        table.open(1, [b"a", b""], none, **ALL_TEXT)
    with pytest.raises(ValueError, match="already"):
        table.open(1, [b"aa"], np.zeros(2, np.int32), **ALL_TEXT)
