"""Drafts: made by the MTP layer behind every step, verified by the model in the next one. [R36]

    step     last id, d1 .. dk  ->  samples s0 .. sk, each by its position's own random number
    verify   s0 is the next token whatever the drafts; s_i is one if d_1 .. d_i equal s_0 .. s_(i-1)
    draft    the MTP layer over the same tokens, with the samples as next tokens; then k - 1 steps of its own

So outputs are those of decoding without drafts, token for token: a draft saves a step or is worth nothing.

Of a prompt's chunk, the next token of the last one is not here yet, and its MTP row is made with that token itself; the
same goes for a cached prefix that is continued otherwise. Drafts may be the worse for it, outputs cannot.

Where the checkpoint says so (index_share_for_mtp_iteration), a chain's later drafts attend to what the first one's
indexer chose, and to the chain's own rows. They cache no index keys: the next step does, for what was accepted.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from glm53d.model.kv_cache import KvCache
from glm53d.model.mtp import Mtp
from glm53d.model.step import Gathered, Step, choice_of, last_tokens, plan_step
from glm53d.runner.rows import Rows
from glm53d.runner.sampler import Sampler

ShareIds = Callable[[Tensor, Sequence[int]], Tensor]


def accepted(samples: Tensor, drafts: Tensor, fed: Tensor) -> Tensor:
    """How many drafts of each row equal the samples, up to the first that does not.

    Args:
        samples: [n, 1 + k]. drafts: [n, k]. fed: [n] bool, whether the row had drafts at all.
    Returns:
        [n] int64, 0 .. k.
    """
    return ((drafts == samples[:, :-1]) & fed[:, None]).long().cumprod(1).sum(1)


class Drafter:
    """Makes drafts, and keeps each slot's until its next step. Owned by one runner."""

    def __init__(self, mtp: Mtp, cache: KvCache, sampler: Sampler, share_ids: ShareIds, drafts: Tensor):
        """share_ids: RankGroups'. drafts: [max_slots, k], where the runner finds them."""
        self.mtp = mtp
        self.cache = cache
        self.sampler = sampler
        self.share_ids = share_ids
        self.drafts = drafts

    def draft(self, rows: Rows, step: Step, hidden: Tensor, ids: Tensor, num_accepted: Tensor) -> None:
        """Fill the MTP layer's KV of a step's tokens, and draft behind each row that has sampled.

        Args:
            hidden: [num_tokens, hidden] of this rank's tokens, behind the model's last norm.
            ids: [sum(num_logits)] samples of all groups, token by token. num_accepted: [num sampled rows] likewise.
        """
        step = replace(step, input_ids=_next_ids(rows, step.input_ids, ids))
        state, chosen = self.mtp.forward(step, hidden, self.cache)
        if not rows.sampled.any():
            return
        own = np.zeros_like(rows.sampled)
        own[rows.own] = rows.sampled[rows.own]
        # Of the tokens that gave logits, the last that counts: behind it stands a sample that is no draft.
        back = rows.num_logits[rows.sampled] - num_accepted.cpu().numpy()
        position = np.zeros_like(rows.prefix_len)
        position[rows.sampled] = rows.seq_len[rows.sampled] - back
        first = int(rows.extend_len[: rows.own.start].sum())
        at = (rows.ends[own] - first) - back[own[rows.sampled]]
        if step.split is None:
            state = state[torch.from_numpy(at).to(state.device)]
        else:
            state = self.mtp.model.at_owner(step, state[step.logits_idx])
        slots, counts = torch.from_numpy(rows.slot[rows.sampled]).to(state.device), rows.dp_num_sampled
        ones = np.ones(int(own.sum()), np.int64)
        num_drafts = self.drafts.shape[1]
        shared: Gathered | None = None
        if self.mtp.shares_choice and step.split is None and len(at) and num_drafts > 1:
            shared = choice_of(chosen, at.tolist(), num_drafts - 1)
        for i in range(num_drafts):
            logits = self.mtp.model.logits(state, counts)
            slot = rows.slot[rows.owned]
            drawn = self.sampler.sample(logits, slot, position[rows.owned] + 2 + i, np.full(len(slot), i))
            ids = self.share_ids(drawn, counts)
            self.drafts[slots, i] = ids
            if i + 1 < num_drafts:
                prefix_len = position[own] + 1 + i
                step = plan_step(self.cache, ids, counts, counts, rows.slot[own], prefix_len, ones, ones)
                if shared is not None:
                    _show(shared, i - (num_drafts - 1), step.out_cache_loc)
                    step = replace(step, groups=[shared], keeps_choice=True)
                state, _ = self.mtp.forward(step, state, self.cache)


def _show(choice: Gathered, column: int, locs: Tensor) -> None:
    """Let each query see one row more, its own: chosen behind the first draft, it could not have been."""
    choice.locs[:, column] = locs
    choice.hidden[:, 0, column] = 0.0


def _next_ids(rows: Rows, input_ids: Tensor, ids: Tensor) -> Tensor:
    """Of each token of all groups, the one behind it: the row's next, or what was sampled there."""
    ends = rows.ends
    index = np.arange(len(input_ids)) + 1
    index[ends - 1] -= 1
    following = input_ids[torch.from_numpy(index).to(input_ids.device)]
    sampled = torch.from_numpy(last_tokens(ends, rows.num_logits)).to(input_ids.device)
    return following.index_copy_(0, sampled, ids)
