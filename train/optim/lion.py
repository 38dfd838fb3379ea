"""Lion: the sign of an interpolated momentum (arXiv 2302.06675)."""

from __future__ import annotations

from torch import Tensor

from fnmodels.tree import Tree

from .base import Optimizer, Rate, check_betas
from .per_leaf import State, leafwise, zeros


def lion(
    lr: Rate, *, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0, spec: Tree | None = None
) -> Optimizer:
    """betas: the momentum's share in the step and in what is kept. lr, spec: as in `adamw`; a tenth of its rate and
    ten times its decay are the paper's rule of thumb. One moment per parameter, in its dtype."""
    now, kept = check_betas(betas)

    def rule(grad: Tensor, state: State, _: Tensor, __: Tensor, rate: float | Tensor) -> tuple[Tensor, State]:
        momentum = state["momentum"]
        return -rate * momentum.lerp(grad, 1 - now).sign(), {"momentum": momentum.lerp(grad, 1 - kept)}

    return leafwise(lambda p: {"momentum": zeros(p)}, rule, lr, weight_decay=weight_decay, spec=spec, elementwise=True)
