"""The mixture of experts: a sigmoid router, its chosen experts, and one expert that sees every token.

On many ranks each has some experts, or a part of each one's width. It routes the tokens of all groups, computes what
its experts give to them, and every group gets the sum of its tokens. Ranks see equal tokens and so route them alike.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from glm53d.model.config import ModelConfig
from glm53d.model.groups import RankGroups
from glm53d.model.layers import Mlp
from glm53d.model.weights import Checkpoint

STACKED_EXPERTS, STACKED_TOKENS = 16, 16  # at most: so little too much costs less than finding whose each token is


class Stack:
    """A few experts of equal width as one wide one, whose parts count as much as a token's choice says.

    Their own weights become views of it.
    """

    def __init__(self, experts: list[Mlp], gate_up: list[Tensor], down: list[Tensor]):
        self.gate_up, self.down, self.width = torch.cat(gate_up, 1), torch.cat(down), len(down[0])
        views = zip(self.gate_up.split(2 * self.width, 1), self.down.split(self.width), strict=True)
        for expert, (of_gate_up, of_down) in zip(experts, views, strict=True):
            expert.gate_up.plain, expert.down.plain = of_gate_up, of_down

    @classmethod
    def of(cls, experts: list[Mlp]) -> "Stack | None":
        """None where they are many, differ in width, are kept as FP8, or round their inputs."""
        gate_up = [expert.gate_up.plain for expert in experts if expert.gate_up.plain is not None]
        down = [expert.down.plain for expert in experts if expert.down.plain is not None]
        is_plain = len(gate_up) == len(down) == len(experts) and len({len(w) for w in down}) == 1
        return cls(experts, gate_up, down) if is_plain and len(experts) <= STACKED_EXPERTS else None

    def __call__(self, x: Tensor, shares: Tensor) -> Tensor:
        """[num_tokens, hidden], shares [num_tokens, experts] -> [num_tokens, hidden]: the sum of share * expert(x)."""
        gate, up = (x @ self.gate_up).view(len(x), -1, 2, self.width).unbind(2)
        return (F.silu(gate) * up * shares[..., None]).flatten(1) @ self.down


class Moe:
    """sum of weight * expert(x) over the chosen, plus shared(x).

    The bias decides who is chosen and nothing else: weights are the chosen's unbiased scores, normalised and scaled.
    """

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, prefix: str, ranks: RankGroups):
        layout = ranks.layout
        self.ranks = ranks
        self.num_chosen = config.num_experts_per_tok
        self.num_experts = config.n_routed_experts
        self.mine = layout.expert_part(config.n_routed_experts)
        self.scaling = config.routed_scaling_factor
        self.gate = checkpoint.read_float32(prefix + "gate.weight")
        self.bias = checkpoint.read_float32(prefix + "gate.e_score_correction_bias")
        part = layout.expert_width_part(config.moe_intermediate_size)
        self.experts = [Mlp(checkpoint, f"{prefix}experts.{i}.", part) for i in range(self.mine.start, self.mine.stop)]
        width = config.moe_intermediate_size * config.n_shared_experts
        self.shared = Mlp(checkpoint, prefix + "shared_experts.", layout.attn_part("the shared experts' width", width))
        self.stack = Stack.of([*self.experts, self.shared])
        stacked = [*range(self.mine.start, self.mine.stop), self.num_experts]
        self.stacked = torch.tensor(stacked, device=self.gate.device)

    def __call__(self, x: Tensor, dp_num_tokens: Sequence[int], *, is_static: bool) -> Tensor:
        """[num_tokens, hidden] of this rank's group -> the same; dp_num_tokens: how many each group has.

        is_static: no size may depend on who was chosen, so every expert sees every token.
        """
        own, every = self.ranks.own(dp_num_tokens), self.ranks.gather_tokens(x, dp_num_tokens)
        chosen, weights = self._route(every)
        if self.stack is not None and (is_static or len(every) <= STACKED_TOKENS):
            shares = every.new_zeros(len(every), self.num_experts + 1)
            shares[own, self.num_experts] = 1.0  # the shared expert: of this group's tokens, as below
            shares.scatter_(1, chosen, weights)
            part = self.stack(every, shares if len(self.experts) == self.num_experts else shares[:, self.stacked])
        else:
            by_choice = (self._of_every_expert if is_static else self._of_chosen_experts)(every, chosen)
            # Summed per token in the order of its own choice, not of the experts' turn: other tokens change nothing.
            part = torch.bmm(weights[:, None], by_choice)[:, 0]
            part[own] += self.shared(x)  # one sum over ranks for both
        return self.ranks.sum_all(part, dp_num_tokens)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[num_tokens, num_chosen]: who is chosen, and how much each counts."""
        # In float32 throughout: rounded scores would choose other experts.
        scores = F.linear(x.float(), self.gate).sigmoid()
        chosen = (scores + self.bias).topk(self.num_chosen, -1, sorted=False).indices
        weights = scores.gather(1, chosen)
        return chosen, (weights * (self.scaling / (weights.sum(-1, keepdim=True) + 1e-20))).to(x.dtype)

    def _of_every_expert(self, x: Tensor, chosen: Tensor) -> Tensor:
        """[num_tokens, num_chosen, hidden]: what each chosen expert gives, zeros where it is another rank's."""
        every = torch.stack([expert(x) for expert in self.experts])
        token = torch.arange(len(x), device=x.device)[:, None]
        if len(self.experts) == self.num_experts:
            return every[chosen, token]
        every = torch.cat([every, torch.zeros_like(x)[None]])
        is_mine = (chosen >= self.mine.start) & (chosen < self.mine.stop)
        at = torch.where(is_mine, chosen - self.mine.start, len(self.experts))
        return every[at, token]

    def _of_chosen_experts(self, x: Tensor, chosen: Tensor) -> Tensor:
        """The same, with tokens sorted by expert, so that each expert is one product over its own."""
        flat = chosen.flatten()
        counts = torch.bincount(flat, minlength=self.num_experts).tolist()
        mine, start = counts[self.mine], sum(counts[: self.mine.start])
        order = flat.argsort(stable=True)[start : start + sum(mine)]
        sorted_x = x[order // self.num_chosen].split(mine)
        by_token = x.new_zeros(len(flat), x.shape[1])
        if len(order):
            out = torch.cat([expert(part) for expert, part in zip(self.experts, sorted_x, strict=True) if len(part)])
            by_token.index_copy_(0, order, out)
        return by_token.unflatten(0, chosen.shape)
