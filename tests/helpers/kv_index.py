"""A router's picture of what is cached, built from KV events alone."""

import numpy as np

from glm53d._native import page_hashes
from glm53d.kv.events import AllBlocksCleared, BlockStored, KvEvent

LOW_63_BITS = 2**63 - 1


class KvIndex:
    """One attention-DP rank's. Every block must say its true ids, and stand behind one that is known."""

    def __init__(self, page_size: int, hash_key: bytes, chain_seed: bytes):
        self._page_size, self._hash_key, self._chain_seed = page_size, hash_key, chain_seed
        self.blocks: dict[int, np.ndarray] = {}  # the whole hash by its key

    def take(self, events: list[KvEvent]) -> None:
        """Events as they come. Fails on one that cannot be."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockStored):
                self._store(event)
            else:
                for key in event.block_hashes:
                    del self.blocks[key]

    def _store(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        seed = self._chain_seed if parent is None else self.blocks[parent].tobytes()
        assert event.block_size == self._page_size
        hashes = page_hashes(np.array(event.token_ids, np.int32), self._page_size, self._hash_key, seed)
        assert event.block_hashes == [int(low) & LOW_63_BITS for low in hashes[:, 0]]
        for key, whole in zip(event.block_hashes, hashes, strict=True):
            assert key not in self.blocks, "stored twice"
            self.blocks[key] = whole
