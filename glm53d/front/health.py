"""State of the world as main sees it: what /health, /ready and /live answer from. [R4]

STARTING ──all ranks loaded──► UP ──SIGTERM──► DRAINING        from each, when ranks fail ──► UNHEALTHY
"""

import time
from enum import Enum
from typing import NamedTuple

import numpy as np

from glm53d.ipc.board import Board
from glm53d.ipc.records import LOAD_PHASES, RankState


class State(Enum):
    """Legal changes are in NEXT."""

    STARTING = "starting"
    UP = "up"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"


NEXT = {
    State.STARTING: (State.UP, State.UNHEALTHY, State.DRAINING),
    State.UP: (State.UNHEALTHY, State.DRAINING),
    State.UNHEALTHY: (State.UNHEALTHY, State.DRAINING),
    State.DRAINING: (State.UNHEALTHY,),
}


class Waiting(NamedTuple):
    """What waits for admission, as of the leader's last step."""

    num_requests: int
    num_tokens: int  # of prompts, not cached
    rate: int  # prompt tokens per second that the ranks compute, 0: not measured
    num_running: int  # that wait no more
    num_received: int  # since the world began, all that it knew of

    @property
    def drain_s(self) -> int:
        """Seconds until it is computed, as a client should be told: 1 to 60."""
        return min(60, max(1, -(-self.num_tokens // self.rate))) if self.rate else 1


class Health:
    """Reads the board; never sends a message, never costs a step."""

    def __init__(self, board: Board):
        self._board = board
        self.state = State.STARTING
        self.reason = ""

    def become(self, state: State, reason: str = "") -> None:
        """The one way to change state."""
        assert state in NEXT[self.state], f"{self.state.name} -> {state.name}"
        self.state, self.reason = state, reason

    @property
    def accepts_work(self) -> bool:
        return self.state is State.UP

    def check(self, watchdog_s: float) -> tuple[bool, dict[str, object]]:
        """Healthy: up, and the leader was heard of within watchdog_s. A long prefill is no illness. [F-B1]"""
        report: dict[str, object] = {"state": self.state.value}
        if self.state is not State.UP:
            if self.reason:
                report["reason"] = self.reason
            return False, report
        hang = found_hanging(self._board, watchdog_s)
        return (False, report | {"reason": hang}) if hang else (True, report)

    def progress(self) -> dict[str, object]:
        """State, and while starting the phase and percent of the rank that is furthest behind."""
        report: dict[str, object] = {"state": self.state.value}
        if self.state is State.STARTING:
            came = [(LOAD_PHASES.index(row["phase"].decode()), int(row["percent"])) for row in self._board.ranks()]
            phase, percent = min(came)
            report |= {"phase": LOAD_PHASES[phase] or "spawning", "percent": percent}
        return report

    def waiting(self) -> Waiting:
        """The scheduler's queue."""
        rows = self._board.loads()
        num_requests, num_tokens, rate, num_received = (
            int(rows[name][0]) for name in ("num_waiting", "num_waiting_tokens", "prefill_rate", "received")
        )
        return Waiting(num_requests, num_tokens, rate, int(rows["num_running"].sum()), num_received)

    def loads(self) -> list[dict[str, object]]:
        """Each attention-DP rank's row as a dict."""
        return [_as_dict(row) | {"dp_rank": i} for i, row in enumerate(self._board.loads())]

    def ranks(self) -> list[dict[str, object]]:
        """Each rank's row as a dict."""
        return [
            _as_dict(row) | {"rank": i, "state": RankState(row["state"]).name.lower()}
            for i, row in enumerate(self._board.ranks())
        ]


def _as_dict(row: np.void) -> dict[str, object]:
    values = ((name, row[name].item()) for name in row.dtype.names or ())
    return {name: v.decode(errors="replace") if isinstance(v, bytes) else v for name, v in values}


def found_hanging(board: Board, watchdog_s: float) -> str:
    """What has not gone on for that long, or "".

    The leader shows itself on the board as each step begins, and when idle several times a second: what is older is a
    step that does not end, or a leader that hangs between two.
    """
    rows = board.loads()
    starts, shown = rows["step_start_ns"], rows["updated_ns"]
    running = starts[starts > 0]
    for since, what in ((running, "a step has been running"), (shown[shown > 0], "rank 0 has not been heard of")):
        if len(since) and (age := (time.monotonic_ns() - int(since.min())) / 1e9) > watchdog_s:
            return f"{what} for {age:.0f} s"
    return ""
