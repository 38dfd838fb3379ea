"""Lion: the sign of an interpolated momentum (arXiv 2302.06675)."""

from torch import Tensor

from fnmodels.tree import Tree

from .base import Number, Optimizer, Rate, check_betas, remaker, weight_for, with_traits
from .per_leaf import LeafState, leafwise, zeros


def lion(
    lr: Rate, *, betas: tuple[Number, Number] = (0.9, 0.99), weight_decay: Number = 0.0, spec: Tree | None = None
) -> Optimizer:
    """Lion (arXiv 2302.06675): the sign of an interpolation of gradient and momentum; one moment per parameter, in its
    dtype. Hyperparameters may be 0-d tensors, as in `adamw`.

    Args:
        lr: A float or 0-d tensor, or a function from the number of the update; the paper's rule of thumb is a tenth of
            AdamW's rate and ten times its decay.
        betas: The momentum's share in the update, and in the next momentum.
        weight_decay: The decay per update is lr x this x the parameter.
        spec: `family.spec(config)`, which says what is trainable and decays; None: every floating leaf.

    Returns:
        The optimizer.

    Raises:
        ValueError: A hyperparameter is out of range.
    """
    beta_update, beta_momentum = check_betas(betas)

    def rule(grad: Tensor, state: LeafState, _: Tensor, __: Tensor, rate: Number) -> tuple[Tensor, LeafState]:
        of_update, of_momentum = (weight_for(1 - beta, grad) for beta in (beta_update, beta_momentum))
        momentum = state["momentum"]
        return -rate * momentum.lerp(grad, of_update).sign(), {"momentum": momentum.lerp(grad, of_momentum)}

    pure = leafwise(lambda p: {"momentum": zeros(p)}, rule, lr, weight_decay=weight_decay, spec=spec)
    again = remaker(lion, lr=lr, betas=betas, weight_decay=weight_decay, spec=spec)
    return with_traits(pure, elementwise=True, remake=again)
