"""Muon: momentum whose matrices are made orthogonal, for the linears; stacks of equal matrices go as one batch."""

import torch
from torch import Tensor

STEPS = 5
A, B, C = 3.4445, -4.7750, 2.0315  # of the quintic that brings singular values near one, the method's own


class Muon:
    """Updates matrices [..., out, in].

    Every update is as large as the last one however well things go, so without decay scores of attention grow until
    each query sees one token only, and learns no more.
    """

    def __init__(self, matrices: list[Tensor], momentum: float = 0.95, decay: float = 0.3):
        self.matrices, self.momentum, self.decay = matrices, momentum, decay
        self.buffers = [torch.zeros_like(matrix) for matrix in matrices]
        self.batches: dict[tuple[int, ...], list[int]] = {}
        for i, matrix in enumerate(matrices):
            self.batches.setdefault(tuple(matrix.shape[-2:]), []).append(i)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update of every matrix that has a gradient."""
        for shape, members in self.batches.items():
            used = [i for i in members if self.matrices[i].grad is not None]
            updates = []
            for i in used:
                grad = self.matrices[i].grad
                assert grad is not None
                self.buffers[i].lerp_(grad, 1 - self.momentum)
                updates.append(torch.lerp(grad, self.buffers[i], self.momentum).reshape(-1, *shape))
            if not used:
                continue
            scale = lr * max(1.0, shape[0] / shape[1]) ** 0.5
            made = orthogonal(torch.cat(updates)).split([len(update) for update in updates])
            for i, update in zip(used, made, strict=True):
                self.matrices[i].mul_(1 - lr * self.decay).sub_(update.view_as(self.matrices[i]), alpha=scale)


def orthogonal(x: Tensor) -> Tensor:
    """[n, out, in]: about the nearest matrices with singular values of one. Newton-Schulz, in bf16."""
    tall = x.shape[-2] > x.shape[-1]
    y = (x.mT if tall else x).bfloat16()
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        square = y @ y.mT
        y = A * y + (B * square + C * (square @ square)) @ y
    return (y.mT if tall else y).to(x.dtype)
