"""Linear probes: multinomial logistic regression on activations (arXiv 1610.01644)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Probe = dict[str, Tensor]


def fit_probe(x: Tensor, labels: Tensor, *, classes: int, decay: float = 1e-3, steps: int = 100) -> Probe:
    """Fits a linear probe by L-BFGS: the mean cross entropy plus decay/2 * |weight|^2.

    Args:
        x: Activations [rows, D], such as a tap at its tokens; the fit is in their dtype, fp32 at least.
        labels: The class of each row, int64 [rows].
        classes: The number of classes.
        decay: The strength of the penalty.
        steps: Iterations at most.

    Returns:
        weight [classes, D] and bias [classes].
    """
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    weight = torch.zeros(classes, x.shape[1], dtype=x.dtype, device=x.device, requires_grad=True)
    bias = torch.zeros(classes, dtype=x.dtype, device=x.device, requires_grad=True)
    search: dict[str, Any] = {"line_search_fn": "strong_wolfe", "tolerance_grad": 1e-9, "tolerance_change": 1e-12}
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=steps, **search)

    def loss() -> float:
        optimizer.zero_grad()
        value = F.cross_entropy(F.linear(x, weight, bias), labels) + decay / 2 * weight.square().sum()
        torch.autograd.backward(value, inputs=[weight, bias])
        return float(value.detach())

    with torch.enable_grad():
        optimizer.step(loss)
    return {"weight": weight.detach(), "bias": bias.detach()}


def probe_logits(probe: Probe, x: Tensor) -> Tensor:
    """The logits of a linear probe.

    Args:
        probe: The result of `fit_probe`.
        x: Activations [..., D].

    Returns:
        [..., classes].
    """
    return F.linear(x.to(probe["weight"].dtype), probe["weight"], probe["bias"])
