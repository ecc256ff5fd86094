"""Process groups and the collectives of a step, by torch.distributed: gloo on the CPU, NCCL on GPUs. [R1] [R9]

    tokens    what a rank computes itself: those of its attention-DP group, equal on all ranks of the group
    all       tokens of all groups, in order of group; the step's plan says how many each has, so nobody asks

Sums of parts are taken in order of rank, whatever the tensor's shape: a reduction kernel adds each stretch of a tensor
in another order, and then a request's numbers would depend on who computes beside it. [R51]

Rendezvous is by a file, connections are pinned to the loopback interface: nothing of a request is heard outside.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from glm53d.model.layout import Layout


class RankGroups:
    """This rank's layout and its connections; of one rank alone there are none, and every method is the identity.

    All ranks of a world call the same methods in the same order, ranks without tokens too.
    """

    def __init__(self, layout: Layout):
        self.layout = layout
        self._heads: dist.ProcessGroup | None = None
        self._peers: dist.ProcessGroup | None = None

    def connect(self, rendezvous: Path | None, device: torch.device, timeout_s: float) -> None:
        """Wait until all ranks are here. rendezvous: a folder of this world alone; of one rank, None.

        timeout_s: for a rank that comes late, now or to any collective; the longest is to be that for loading.
        """
        layout = self.layout
        if layout.tp_size == 1:
            return
        assert rendezvous is not None, "many ranks need a place to meet"
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"  # it would ask the rendezvous for ever, which is not kept
        backend, place = "nccl" if device.type == "cuda" else "gloo", f"file://{rendezvous.absolute()}/store"
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            backend, init_method=place, timeout=timeout, rank=layout.rank, world_size=layout.tp_size
        )
        ranks = torch.arange(layout.tp_size).view(layout.attn_dp_size, layout.attn_tp_size)
        if layout.attn_tp_size > 1:  # every rank makes every group, as torch.distributed wants it
            groups = [dist.new_group(row, timeout) for row in ranks.tolist()]
            self._heads = groups[layout.attn_dp_rank]
        if layout.attn_dp_size > 1:
            groups = [dist.new_group(column, timeout) for column in ranks.T.tolist()]
            self._peers = groups[layout.attn_tp_rank]
        for group in (dist.group.WORLD, self._heads, self._peers):
            if group is not None:
                dist.barrier(group)  # connects it; behind the last one nobody needs the rendezvous any more

    def close(self) -> None:
        """Leave the world."""
        if self.layout.tp_size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def own(self, counts: Sequence[int]) -> slice:
        """Where this group's rows stand among those of all groups."""
        start = sum(counts[: self.layout.attn_dp_rank])
        return slice(start, start + counts[self.layout.attn_dp_rank])

    def sum_heads(self, part: Tensor) -> Tensor:
        """The sum over the attention group: [num_tokens, n] -> the same."""
        if self._heads is None or not len(part):
            return part
        parts = [torch.empty_like(part) for _ in range(self.layout.attn_tp_size)]
        dist.all_gather(parts, part.contiguous(), group=self._heads)
        return _sum(parts)

    def gather_tokens(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows of all groups: [counts[attn_dp_rank], n] -> [sum(counts), n]."""
        if self._peers is None:
            return x
        assert len(x) == counts[self.layout.attn_dp_rank], "a collective's size is not the plan's"
        padded = F.pad(x, (0, 0, 0, max(counts) - len(x)))
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=self._peers)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def spread(self, rows: Tensor, owner: int) -> Tensor:
        """What the attention-DP rank `owner` has, to all: there it is `rows`, elsewhere `rows` is overwritten."""
        if self._peers is not None:
            source = owner * self.layout.attn_tp_size + self.layout.attn_tp_rank
            dist.broadcast(rows, source, group=self._peers)
        return rows

    def sum_all(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        """The sum over all ranks, of this group's rows: [sum(counts), n] -> [counts[attn_dp_rank], n]."""
        if self.layout.tp_size == 1:
            return part
        assert len(part) == sum(counts), "a collective's size is not the plan's"
        sent = [count for count in counts for _ in range(self.layout.attn_tp_size)]
        if self.layout.attn_tp_size > 1:  # each rank of a group is sent the group's rows
            part = torch.cat([rows for rows in part.split(list(counts)) for _ in range(self.layout.attn_tp_size)])
        mine = counts[self.layout.attn_dp_rank]
        parts = part.new_empty(self.layout.tp_size, mine, part.shape[1])
        dist.all_to_all_single(parts.flatten(0, 1), part.contiguous(), [mine] * self.layout.tp_size, sent)
        return _sum(list(parts))

    def join_vocab(self, shard: Tensor, counts: Sequence[int]) -> Tensor:
        """Logits of all groups' rows and this rank's ids -> whole rows, each at its owner; elsewhere none.

        [sum(counts), shard] -> [counts[attn_dp_rank], tp_size * shard], or [0, tp_size * shard] off the owner.
        """
        layout = self.layout
        if layout.tp_size == 1:
            return shard
        mine = counts[layout.attn_dp_rank] if layout.owns_rows else 0
        sent = [count if i == 0 else 0 for count in counts for i in range(layout.attn_tp_size)]
        parts = shard.new_empty(layout.tp_size, mine, shard.shape[1])
        dist.all_to_all_single(parts.flatten(0, 1), shard.contiguous(), [mine] * layout.tp_size, sent)
        return parts.transpose(0, 1).flatten(1)

    def share_ids(self, ids: Tensor, counts: Sequence[int]) -> Tensor:
        """What each owner has sampled, to every rank: [counts[attn_dp_rank]] at an owner -> [sum(counts)]."""
        layout = self.layout
        if layout.tp_size == 1:
            return ids
        padded = F.pad(ids, (0, max(counts) - len(ids)))
        parts = [torch.empty_like(padded) for _ in range(layout.tp_size)]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts[:: layout.attn_tp_size], counts, strict=True)])

    def least(self, value: int, device: torch.device) -> int:
        """The smallest of all ranks' values."""
        if self.layout.tp_size == 1:
            return value
        least = torch.tensor([value], device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
