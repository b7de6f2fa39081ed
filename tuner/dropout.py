"""Dropout whose rate is a tensor, so that trials with different rates can be lanes of one stack."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Dropout(nn.Module):
    """Like ``torch.nn.Dropout``: zeroes each element with probability `p`, and scales the others by 1 / (1 - p).

    The random numbers do not depend on the rate, so that all lanes of a stack can share them: each drops what it would
    drop alone.
    """

    p: Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        self.register_buffer("p", torch.tensor(float(p)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = torch.rand_like(x) >= self.p
        scale = torch.where(self.p < 1, 1 / (1 - self.p), 0.0).to(x.dtype)
        return torch.where(kept, x * scale, 0.0)


def with_tensor_rates(module: nn.Module) -> nn.Module:
    """`module` with each ``torch.nn.Dropout`` in it replaced by `Dropout`; its state dictionary stays the same."""
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Dropout and not layer.inplace:
                setattr(parent, name, Dropout(layer.p).train(layer.training))
    return module
