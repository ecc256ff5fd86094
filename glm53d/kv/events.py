"""What the prefix trees gain and lose, for routers outside that know by it where a prompt's prefix is cached. [R31]

Blocks are pages. They go by the low 63 bits of their hash: a key that every consumer takes for an integer.
"""

import msgspec
import numpy as np

MEDIUM = "GPU"
LOW_63_BITS = np.uint64(2**63 - 1)


class BlockStored(msgspec.Struct, frozen=True, tag_field="type", tag="BlockStored"):
    """Pages, one behind the other in a sequence, that can be shared from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None  # of the page before them; None: they begin the sequence
    token_ids: list[int]  # block_size for each
    block_size: int
    lora_id: None = None
    medium: str = MEDIUM
    lora_name: None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag_field="type", tag="BlockRemoved"):
    """Pages that no later prompt finds."""

    block_hashes: list[int]
    medium: str = MEDIUM


class AllBlocksCleared(msgspec.Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    """Nothing is cached: what came before is void."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEvents:
    """The events of each attention-DP rank, until they are taken. Owned by one Scheduler."""

    def __init__(self, attn_dp_size: int, page_size: int):
        self._page_size = page_size
        self._events: list[list[KvEvent]] = [[AllBlocksCleared()] for _ in range(attn_dp_size)]

    def stored(self, dp_rank: int, hashes: np.ndarray, first: int, tokens: np.ndarray) -> None:
        """A sequence's pages from the index `first` on are new.

        Args:
            hashes: [num_pages, 2] uint64 of all its pages.
            tokens: int32, its ids, at least those of these pages.
        """
        keys, size = _keys(hashes), self._page_size
        parent = keys[first - 1] if first else None
        ids = tokens[first * size : len(hashes) * size].tolist()
        self._events[dp_rank].append(BlockStored(keys[first:], parent, ids, size))

    def removed(self, dp_rank: int, hashes: np.ndarray) -> None:
        """Pages left the tree; hashes [n, 2] uint64."""
        if len(hashes):
            self._events[dp_rank].append(BlockRemoved(_keys(hashes)))

    def take(self) -> list[tuple[int, list[KvEvent]]]:
        """(attention-DP rank, its events since the last call), of the ranks that have any."""
        taken = [(rank, events) for rank, events in enumerate(self._events) if events]
        for rank, _ in taken:
            self._events[rank] = []
        return taken


def _keys(hashes: np.ndarray) -> list[int]:
    return (hashes[:, 0] & LOW_63_BITS).tolist()
