"""Sessions: where a session's prompt leaves what it has said before. [R44]

An agent's prompt should only ever grow; whatever it changes early on costs the cache all that follows, and shows as
nothing but slowness. Main keeps no prompts: the chained hashes of their pages tell equal beginnings apart.
"""

from collections import OrderedDict
from dataclasses import dataclass
from threading import Lock

import numpy as np

MAX_SESSIONS = 256
MAX_CHAINS = 4  # of one session: an agent's own, and those of sub-agents that carry its key


@dataclass(frozen=True, slots=True)
class Divergence:
    """A prompt began as an earlier one of its session and then went on otherwise."""

    page: int  # the first that differs
    num_pages: int  # of the earlier one, that could have been used again


class Sessions:
    """The page hashes of recent prompts by the hash of their session. Any number of threads may use it."""

    def __init__(self) -> None:
        self._lock = Lock()  # guards the next
        self._chains: OrderedDict[int, list[np.ndarray]] = OrderedDict()  # the latest last, of both

    def follow(self, session: int, hashes: np.ndarray) -> Divergence | None:
        """Take up a prompt's page hashes, [n, 2] uint64; where it left the session's prompt it has most in common with.

        None when it goes on where that ended, and when they have no page in common: then it is another's prompt.
        """
        with self._lock:
            chains = self._chains.setdefault(session, [])
            self._chains.move_to_end(session)
            common = [_common(chain, hashes) for chain in chains]
            best = max(range(len(chains)), key=common.__getitem__, default=None)
            found = None
            if best is not None and common[best] == min(len(chains[best]), len(hashes)):
                longer = max(chains.pop(best), hashes, key=len)  # a shorter one is a retry of an earlier turn
                chains.append(longer)
            else:
                if best is not None and common[best] > 0:
                    found = Divergence(common[best], len(chains[best]))
                chains.append(hashes)
            del chains[:-MAX_CHAINS]
            while len(self._chains) > MAX_SESSIONS:
                self._chains.popitem(last=False)
        return found


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Pages that two prompts have in common. Hashes are chained, so the first that differs ends them."""
    pages = min(len(a), len(b))
    return int(np.searchsorted((a[:pages] != b[:pages]).any(axis=1), True))
