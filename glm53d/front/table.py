"""The request table: one slot per request in flight, bounded. [R12] [R22]

handle = generation << 32 | index        an index is used again, a handle never: what comes late for an old one is stale
"""

import asyncio
from dataclasses import dataclass, field
from enum import Enum, auto

from glm53d.errors import Overloaded
from glm53d.front.job import Finish, Job


class EntryState(Enum):
    """Where a request stands in main. Legal changes are in NEXT."""

    TEXT = auto()  # its prompt is being made
    SENT = auto()  # the leader has it
    DONE = auto()  # finished, failed or aborted; the slot is free


NEXT = {EntryState.TEXT: (EntryState.SENT, EntryState.DONE), EntryState.SENT: (EntryState.DONE,), EntryState.DONE: ()}


@dataclass(slots=True, eq=False)
class Entry:
    """One request in flight. Owned by the engine."""

    handle: int
    job: Job
    finish: "asyncio.Future[Finish]"
    state: EntryState = EntryState.TEXT
    num_prompt_ids: int = 0
    num_cut_ids: int = 0  # of a prompt that was too long
    last_prompt_id: int = -1
    marks: dict[str, int] = field(default_factory=dict)

    def is_over(self) -> bool:
        """For submit_all(), after each time it waited: whether it was aborted meanwhile. Raises what else ended it."""
        if self.state is not EntryState.DONE:
            return False
        self.finish.result()
        return True

    def become(self, state: EntryState) -> None:
        """The one way to change state."""
        assert state in NEXT[self.state], f"request {self.handle:#x}: {self.state.name} -> {state.name}"
        self.state = state


class Table:
    """Slots by index. Used on the loop's thread alone."""

    def __init__(self, size: int):
        self.size = size
        self._entries: list[Entry | None] = [None] * size
        self._generation = [1] * size
        self._free = list(range(size - 1, -1, -1))

    def __len__(self) -> int:
        return self.size - len(self._free)

    def take(self, job: Job) -> Entry:
        """A slot for a new request. Raises Overloaded when all are taken."""
        if not self._free:
            raise Overloaded(f"{self.size} requests are in flight; try again later.")
        index = self._free.pop()
        entry = Entry(self._generation[index] << 32 | index, job, asyncio.get_running_loop().create_future())
        self._entries[index] = entry
        return entry

    def release(self, entry: Entry) -> None:
        """The request is over; its handle will not come again for 2**32 uses of the slot."""
        entry.become(EntryState.DONE)
        index = entry.handle & 0xFFFFFFFF
        self._entries[index] = None
        self._generation[index] = self._generation[index] % 0xFFFFFFFF + 1
        self._free.append(index)

    def entries(self) -> list[Entry]:
        """All in flight."""
        return [entry for entry in self._entries if entry is not None]
