"""Adafactor: second moments as a row and a column per matrix (arXiv 1804.04235)."""

import torch
from torch import Tensor

from fnmodels.tree import Tree

from .base import Number, Optimizer, Rate, check_numbers, is_unknown_or, remaker, weight_for, with_traits
from .per_leaf import LeafState, leafwise, zeros


def adafactor(
    lr: Rate = 1e-2,
    *,
    beta2_decay: Number = -0.8,
    eps: tuple[Number | None, Number] = (None, 1e-3),
    clip: Number = 1.0,
    weight_decay: Number = 0.0,
    spec: Tree | None = None,
) -> Optimizer:
    """Adafactor (arXiv 1804.04235), equal to torch.optim.Adafactor, whose `d` is `clip` here.

    Matrices and stacks of them (experts) are factored along their last two dimensions, vectors are not. Hyperparameters
    may be 0-d tensors, as in `adamw`.

    Args:
        lr: An upper bound, a float, a 0-d tensor or a function from the number of the update; the rate is
            min(lr, 1/sqrt(step)) x the parameter's root mean square.
        beta2_decay: The share of the new square at step n is n^beta2_decay; at most 0.
        eps: The least root mean square that a gradient is divided by (None: the dtype's machine epsilon), and the least
            root mean square of a parameter.
        clip: The largest root mean square of an update, before the rate.
        weight_decay: The decay per update is lr x this x the parameter.
        spec: `family.spec(config)`, which says what is trainable and decays; None: every floating leaf.

    Returns:
        The optimizer.

    Raises:
        ValueError: A hyperparameter is out of range.
    """
    if not is_unknown_or(beta2_decay, lambda x: x <= 0):
        raise ValueError(f"beta2_decay is {beta2_decay}; it must be at most 0.")
    if not is_unknown_or(clip, lambda x: x > 0):
        raise ValueError(f"clip is {clip}; it must be above 0.")
    least, of_param = eps
    check_numbers(**({} if least is None else {"eps[0]": least}), **{"eps[1]": of_param})

    def init(param: Tensor) -> LeafState:
        if param.ndim < 2:
            return {"variance": zeros(param)}
        *stack, rows, columns = param.shape
        return {"row": param.new_zeros(*stack, rows, 1), "column": param.new_zeros(*stack, 1, columns)}

    def rule(grad: Tensor, state: LeafState, param: Tensor, step: Tensor, rate: Number) -> tuple[Tensor, LeafState]:
        if not param.numel():  # means over nothing would be NaN
            return grad, state
        floor = torch.finfo(param.dtype).eps if least is None else least
        share = weight_for(step.to(grad.dtype) ** beta2_decay, grad)
        if "variance" in state:
            new = {"variance": state["variance"].lerp(grad.square(), share)}
            variance = new["variance"]
        else:
            means = {"row": grad.square().mean(-1, keepdim=True), "column": grad.square().mean(-2, keepdim=True)}
            new = {name: state[name].lerp(mean, share) for name, mean in means.items()}
            variance = new["row"] @ new["column"] / new["row"].mean(-2, keepdim=True).clamp(min=floor)
        change = grad * variance.clamp(min=floor * floor).rsqrt()
        change = change / (_rms(change) / clip).clamp(min=1.0)
        relative = torch.minimum(torch.as_tensor(rate, dtype=grad.dtype), step.to(grad.dtype).rsqrt())
        return -relative * _rms(param).clamp(min=of_param) * change, new

    rest = {"beta2_decay": beta2_decay, "eps": eps, "clip": clip, "spec": spec}
    again = remaker(adafactor, lr=lr, weight_decay=weight_decay, **rest)
    return with_traits(leafwise(init, rule, lr, weight_decay=weight_decay, spec=spec), remake=again)


def _rms(tensor: Tensor) -> Tensor:
    return tensor.square().mean().sqrt()
