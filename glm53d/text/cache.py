"""IdCache: ids of texts seen before, the least recently used first out. [R18] [R52]

key = 16 bytes of BLAKE2b over the text      of what the model wrote: over the text and the control id before it
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock

import numpy as np

ENTRY_TOKENS = 64
"""What an entry weighs beside its ids: key, array and links take about as much memory."""


def key_of(text: Iterable[bytes], after: int | None = None) -> bytes:
    """The key of a text, given as UTF-8 in pieces. `after`: the control id it follows, when the model wrote it.

    The two kinds never meet: what a user types has the ids of plain encoding even where the model has typed the same.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"" if after is None else b"written%d" % after)
    for piece in text:
        digest.update(piece)  # lets go of the GIL for all but short ones
    return digest.digest()


class IdCache:
    """Bounded by tokens. Any number of threads may use it. Arrays are shared: nobody writes to one."""

    def __init__(self, max_tokens: int):
        self._max_tokens = max_tokens
        self._lock = Lock()  # guards all below
        self._ids: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._num_tokens = 0  # in _ids, with ENTRY_TOKENS for each entry
        self._hits = self._misses = self._hit_tokens = self._evictions = 0

    def get(self, keys: Sequence[bytes], *, count_misses: bool = True) -> list[np.ndarray | None]:
        """The ids under each key, now last used. A key that nobody may ever have put is no miss."""
        found = []
        with self._lock:
            for key in keys:
                ids = self._ids.get(key)
                if ids is not None:
                    self._ids.move_to_end(key)
                    self._hit_tokens += len(ids)
                found.append(ids)
            hits = sum(ids is not None for ids in found)
            self._hits += hits
            if count_misses:
                self._misses += len(found) - hits
        return found

    def put(self, entries: Iterable[tuple[bytes, np.ndarray]]) -> None:
        """Keep ids under their keys, in place of what was there. What is larger than the whole cache is not kept."""
        with self._lock:
            for key, ids in entries:
                self._drop(self._ids.pop(key, None))
                if len(ids) + ENTRY_TOKENS <= self._max_tokens:
                    self._ids[key] = ids
                    self._num_tokens += len(ids) + ENTRY_TOKENS
            while self._num_tokens > self._max_tokens:
                self._drop(self._ids.popitem(last=False)[1])
                self._evictions += 1

    def _drop(self, ids: np.ndarray | None) -> None:
        if ids is not None:
            self._num_tokens -= len(ids) + ENTRY_TOKENS

    def stats(self) -> dict[str, int]:
        """Counts since the start (hits, hit_tokens, misses, evictions), and what is held now (entries, tokens)."""
        with self._lock:
            return {
                "hits": self._hits,
                "hit_tokens": self._hit_tokens,
                "misses": self._misses,
                "evictions": self._evictions,
                "entries": len(self._ids),
                "tokens": self._num_tokens - ENTRY_TOKENS * len(self._ids),
            }
