"""What every layer is made of: norm, rotary positions, the gated MLP. Weights are tensors, [out, in] as stored."""

from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from glm53d.model.config import ModelConfig
from glm53d.model.fp8 import dequantise, quantise
from glm53d.model.weights import Checkpoint, Fp8Weight, RoundedInput, Weight


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32.

    With n dimensions that is x / hypot(|x|, sqrt(n eps)) * sqrt(n) weight: four operations. torch's own is on a CPU a
    composite of six and takes twice the time: 13 us instead of 6.6 for one token, 25 times in a step of the nano model.
    """

    def __init__(self, weight: Tensor, eps: float):
        self.weight = weight.float() * len(weight) ** 0.5
        self.floor = torch.tensor((len(weight) * eps) ** 0.5, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return (x / torch.hypot(norm, self.floor) * self.weight).to(x.dtype)


class Rope:
    """Angles of positions, computed when needed: a table for a million positions would be 256 MB for nothing."""

    def __init__(self, config: ModelConfig, device: torch.device):
        dim = config.qk_rope_head_dim
        # In float32 and in this order of operations, because the checkpoint was trained with these very frequencies.
        self.inv_freq = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, device=device).float() / dim)

    def angles(self, positions: Tensor) -> Tensor:
        """[num_tokens, 1, dim / 2] complex: cos + i sin per pair, to be broadcast over heads."""
        angle = positions[:, None, None].float() * self.inv_freq
        return torch.polar(torch.ones_like(angle), angle)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the interleaved pairs (2i, 2i + 1) of x [num_tokens, heads, dim]; they stay where they are.

    In place of each other is also the order in which GPU kernels read a cached key.
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles).flatten(-2).to(x.dtype)


class Linear:
    """x W^T, of weights that stand one below the other in W: what reads the same input is one product.

    With inputs that some of them want rounded it is one product for each stretch that reads the same.
    """

    def __init__(self, *weights: Weight):
        groups = [weight.group if isinstance(weight, RoundedInput) else 0 for weight in weights]
        self.stretches: list[tuple[int, tuple[Tensor | Fp8Weight, ...]]] = []
        for group, stretch in groupby(zip(groups, weights, strict=True), lambda pair: pair[0]):
            parts = tuple(weight.weight if isinstance(weight, RoundedInput) else weight for _, weight in stretch)
            plain = [part for part in parts if isinstance(part, Tensor)]
            self.stretches.append((group, (torch.cat(plain),) if len(plain) == len(parts) else parts))
        # All of W^T, where x W^T is all there is to do. Laid out as [in, out], which for a few tokens on a CPU is read
        # in half the time.
        self.plain: Tensor | None = None
        match self.stretches:
            case [(0, (Tensor() as weight,))]:
                self.plain, self.stretches = weight.T.contiguous(), []

    def __call__(self, x: Tensor) -> Tensor:
        if self.plain is not None:
            return x @ self.plain
        if len(self.stretches) == 1 and not self.stretches[0][0]:
            return F.linear(x, _dense(self.stretches[0][1]))
        rounded = {group: dequantise(*quantise(x, group), group).to(x.dtype) for group, _ in self.stretches if group}
        return torch.cat([F.linear(rounded.get(group, x), _dense(parts)) for group, parts in self.stretches], -1)


def _dense(parts: tuple[Tensor | Fp8Weight, ...]) -> Tensor:
    dense = [part if isinstance(part, Tensor) else part.dense() for part in parts]
    return dense[0] if len(dense) == 1 else torch.cat(dense)


class Mlp:
    """down(silu(gate x) * up x). Of a part of the width, a part of the sum."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, part: slice):
        self.gate_up = Linear(
            *(checkpoint.read_weight(f"{prefix}{name}_proj.weight", rows=part) for name in ("gate", "up"))
        )
        self.down = Linear(checkpoint.read_weight(prefix + "down_proj.weight", columns=part))

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)
