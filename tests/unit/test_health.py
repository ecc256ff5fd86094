"""Health reads the board: what is an illness, and what is only long. [R4]"""

import time

import numpy as np
import pytest

from glm53d.front.health import Health, State
from glm53d.ipc.channels import Channels
from glm53d.ipc.records import LOAD_ROW, RANK_ROW

WATCHDOG_S = 10.0


class World:
    """Two attention-DP ranks' rows on a board, and Health over it."""

    def __init__(self) -> None:
        self.board = Channels.create(7, num_ranks=2, attn_dp_size=2, ring_bytes=1 << 16).board()
        self.health = Health(self.board)
        self.health.become(State.UP)

    def show(self, *, updated_s: float, step_s: float | None = None) -> None:
        """The leader wrote its rows so many seconds ago, in a step that began so many seconds ago."""
        now, row = time.monotonic_ns(), np.zeros(1, LOAD_ROW)
        row["updated_ns"] = now - int(updated_s * 1e9)
        row["step_start_ns"] = 0 if step_s is None else now - int(step_s * 1e9)
        for dp_rank in range(2):
            self.board.write_load(dp_rank, row)


@pytest.fixture
def world() -> World:
    return World()


def test_a_world_that_has_not_stepped_yet_is_healthy(world):
    assert world.health.check(WATCHDOG_S)[0]


def test_a_long_step_is_no_illness_until_the_watchdog_says_so(world):
    """F-B1"""
    world.show(updated_s=8, step_s=8)
    assert world.health.check(WATCHDOG_S)[0]
    world.show(updated_s=11, step_s=11)
    good, report = world.health.check(WATCHDOG_S)
    assert not good and report["reason"] == "a step has been running for 11 s"


def test_a_leader_that_hangs_between_two_steps_is_an_illness(world):
    world.show(updated_s=8)
    assert world.health.check(WATCHDOG_S)[0]
    world.show(updated_s=11)
    good, report = world.health.check(WATCHDOG_S)
    assert not good and report["reason"] == "rank 0 has not been heard of for 11 s"
    world.show(updated_s=0)
    assert world.health.check(WATCHDOG_S)[0]


def test_a_world_may_fail_in_more_than_one_way(world):
    """The output ring cannot be read, and then a rank dies."""
    world.health.become(State.UNHEALTHY, "the first")
    world.health.become(State.UNHEALTHY, "the second")
    assert world.health.check(WATCHDOG_S) == (False, {"state": "unhealthy", "reason": "the second"})


def test_while_ranks_load_the_one_furthest_behind_is_shown(world):
    """The first to have its weights waits for the others in the phase after."""
    world.health = Health(world.board)
    assert world.health.progress() == {"state": "starting", "phase": "spawning", "percent": 0}
    row = np.zeros(1, RANK_ROW)
    for rank, row["phase"], row["percent"] in ((0, b"kv cache", 0), (1, b"weights", 60)):
        world.board.write_rank(rank, row)
    assert world.health.progress() == {"state": "starting", "phase": "weights", "percent": 60}


def test_last_words_that_were_cut_in_the_middle_of_a_character_are_shown(world):
    row = np.zeros(1, RANK_ROW)
    row["last_words"] = b"x" * 511 + "é".encode()[:1]
    world.board.write_rank(0, row)
    assert world.health.ranks()[0]["last_words"] == "x" * 511 + "\ufffd"
