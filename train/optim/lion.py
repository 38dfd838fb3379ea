"""Lion: the sign of an interpolated momentum (arXiv 2302.06675)."""

from torch import Tensor

from fnmodels.tree import Tree

from .base import Optimizer, Rate, check_betas, remaker, with_traits
from .per_leaf import LeafState, leafwise, zeros


def lion(
    lr: Rate, *, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0, spec: Tree | None = None
) -> Optimizer:
    """betas: the momentum's share in the update, and in the next momentum. lr, spec: as in `adamw`; the paper's rule of
    thumb is a tenth of its rate and ten times its decay. One moment per parameter, in its dtype."""
    beta_update, beta_momentum = check_betas(betas)

    def rule(grad: Tensor, state: LeafState, _: Tensor, __: Tensor, rate: float | Tensor) -> tuple[Tensor, LeafState]:
        momentum = state["momentum"]
        return -rate * momentum.lerp(grad, 1 - beta_update).sign(), {"momentum": momentum.lerp(grad, 1 - beta_momentum)}

    pure = leafwise(lambda p: {"momentum": zeros(p)}, rule, lr, weight_decay=weight_decay, spec=spec)
    again = remaker(lion, lr=lr, betas=betas, weight_decay=weight_decay, spec=spec)
    return with_traits(pure, elementwise=True, remake=again)
