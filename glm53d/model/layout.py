"""Layout: one rank's place among all, and which part of a dimension is its own. Arithmetic only, no torch. [R1]

rank           0   1   2   3   4   5   6   7        tp_size 8, attn_dp_size 4, ep_size 2
attn_dp_rank   0   0   1   1   2   2   3   3        a group has one KV pool and splits attention's heads
attn_tp_rank   0   1   0   1   0   1   0   1
ep_rank        0   0   0   0   1   1   1   1        a group has half the experts, and splits each one's width
moe_tp_rank    0   1   2   3   0   1   2   3
"""

from dataclasses import dataclass

from glm53d.errors import StartError


@dataclass(frozen=True, slots=True)
class Layout:
    """One rank of tp_size; attn_dp_size and ep_size divide it."""

    rank: int = 0
    tp_size: int = 1
    attn_dp_size: int = 1
    ep_size: int = 1

    @property
    def attn_tp_size(self) -> int:
        """Ranks that attention's heads, dense MLPs and shared experts are split over."""
        return self.tp_size // self.attn_dp_size

    @property
    def attn_dp_rank(self) -> int:
        return self.rank // self.attn_tp_size

    @property
    def attn_tp_rank(self) -> int:
        return self.rank % self.attn_tp_size

    @property
    def moe_tp_size(self) -> int:
        """Ranks that the width of each routed expert is split over."""
        return self.tp_size // self.ep_size

    @property
    def ep_rank(self) -> int:
        return self.rank // self.moe_tp_size

    @property
    def moe_tp_rank(self) -> int:
        return self.rank % self.moe_tp_size

    @property
    def owns_rows(self) -> bool:
        """Of its attention-DP group's requests, this is the rank that samples and answers."""
        return self.attn_tp_rank == 0

    def attn_part(self, what: str, count: int) -> slice:
        """This rank's part of something split over the attention group. Raises StartError, naming it."""
        return _part(what, count, self.attn_tp_rank, self.attn_tp_size)

    def expert_part(self, count: int) -> slice:
        """The routed experts that are on this rank, whole or a part of their width."""
        return _part("n_routed_experts", count, self.ep_rank, self.ep_size)

    def expert_width_part(self, count: int) -> slice:
        """The part of each of its experts' width."""
        return _part("moe_intermediate_size", count, self.moe_tp_rank, self.moe_tp_size)

    def vocab_shard(self, count: int) -> int:
        """Ids of a vocabulary shard: the same on all ranks, so those of the last ones may lie behind the vocabulary."""
        return -(-count // self.tp_size)


def _part(what: str, count: int, index: int, size: int) -> slice:
    if count % size:
        raise StartError(f"this layout splits {what} over {size} ranks, which does not divide {count}")
    return slice(index * (count // size), (index + 1) * (count // size))
