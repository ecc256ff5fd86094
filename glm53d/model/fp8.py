"""FP8 (e4m3), a factor per group: how KV rows are stored when kv.dtype is "fp8", byte for byte as kernels read them.

    latent row    512 e4m3 | 4 float32, one for each 128 of them | 64 bf16, the rotated key           656 bytes
    index page    64 x 128 e4m3 | 64 float32, one for each key, a power of two                        64 x 132 bytes

A factor is the group's largest magnitude over 448, e4m3's largest number, so nothing overflows. Other widths have other
sizes by the same rule. The CPU computes with what it reads back: the same rounding, not the same speed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
GROUP = 128
SMALLEST = 2.0**-126  # of factors: a group of zeros has one too, and it can be divided by


def quantise(x: Tensor, group: int, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """[n, width] -> e4m3 [n, width] and float32 factors [n, ceil(width / group)]; their product is x, rounded.

    power_of_two: factors are rounded up to one, as the indexer's kernels want them.
    """
    width = x.shape[-1]
    groups = F.pad(x.float(), (0, -width % group)).unflatten(-1, (-1, group))
    scale = (groups.abs().amax(-1) / E4M3_MAX).clamp_min(SMALLEST)
    if power_of_two:
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2^exponent, mantissa in [0.5, 1)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    return (groups / scale[..., None]).to(E4M3).flatten(-2)[..., :width], scale


def dequantise(values: Tensor, scale: Tensor, group: int) -> Tensor:
    """Inverse of quantise, float32."""
    return values.float() * scale.repeat_interleave(group, -1)[..., : values.shape[-1]]


def latent_row_bytes(latent_dim: int, rope_dim: int) -> int:
    """Of one token and layer."""
    return latent_dim + 4 * -(-latent_dim // GROUP) + 2 * rope_dim


def pack_latent(row: Tensor, latent_dim: int) -> Tensor:
    """[n, latent_dim + rope_dim] -> [n, latent_row_bytes] uint8."""
    values, scale = quantise(row[:, :latent_dim], GROUP)
    rope = row[:, latent_dim:].to(torch.bfloat16).contiguous()
    return torch.cat([part.contiguous().view(torch.uint8) for part in (values, scale, rope)], -1)


def unpack_latent(data: Tensor, latent_dim: int) -> Tensor:
    """Inverse of pack_latent over the last dimension: [..., bytes] -> float32 [..., latent_dim + rope_dim]."""
    sizes = [latent_dim, 4 * -(-latent_dim // GROUP)]
    values, scale, rope = (part.contiguous() for part in data.tensor_split([sizes[0], sum(sizes)], -1))
    latent = dequantise(values.view(E4M3), scale.view(torch.float32), GROUP)
    return torch.cat([latent, rope.view(torch.bfloat16).float()], -1)
