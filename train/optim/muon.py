"""Muon: momentum, orthogonalized, for hidden matrices (Keller Jordan et al., 2024; arXiv 2502.16982)."""

import math

import torch
from torch import Tensor

from fnmodels.tree import Tree

from .base import Number, Optimizer, Rate, check_below_1, check_numbers, remaker, weight_for, with_traits
from .per_leaf import LeafState, leafwise, zeros

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, chosen for the largest derivative at 0


def muon(
    lr: Rate,
    *,
    momentum: Number = 0.95,
    nesterov: bool = True,
    weight_decay: Number = 0.1,
    steps: int = 5,
    eps: Number = 1e-7,
    match_adamw: bool = False,
    spec: Tree | None = None,
) -> Optimizer:
    """Muon, equal to torch.optim.Muon on matrices; stacks [E, out, in] (experts) are orthogonalized matrix by matrix.

    For hidden matrices only: embeddings, heads, norms and biases need another optimizer (`partition`). Over a mesh that
    shards matrices, each is gathered in bf16 by every process that has a shard of it.

    Args:
        lr: A float or 0-d tensor, or a function from the number of the update to one; `momentum`, `weight_decay` and
            `eps` may be 0-d tensors too.
        momentum: The decay of the gradient's running sum per update.
        nesterov: Whether the gradient is read one momentum step ahead.
        weight_decay: The decay per update is lr x this x the parameter.
        steps: Iterations of Newton-Schulz, in bf16.
        eps: The least norm that a matrix is divided by.
        match_adamw: Whether the rate is scaled by 0.2 sqrt(max(out, in)), so that AdamW's rates fit (arXiv 2502.16982);
            otherwise by sqrt(max(1, out / in)).
        spec: `family.spec(config)`, which says what is trainable and decays; None: every floating leaf.

    Returns:
        The optimizer.

    Raises:
        ValueError: A hyperparameter is out of range, or, by its functions, a parameter is a vector.
    """
    check_numbers(eps=eps)
    check_below_1(momentum=momentum)  # at 1 neither the momentum nor the direction would contain the gradient
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps is {steps!r}; it must be a whole number, at least 1.")

    def init(param: Tensor) -> LeafState:
        if param.ndim < 2:
            raise ValueError(
                f"Muon updates matrices; one parameter has the shape {list(param.shape)}. Give it to another optimizer "
                'by train.partition, e.g. partition({"layers.*_proj": muon(...), "*": adamw(...)}).'
            )
        return {"momentum": zeros(param)}

    def rule(grad: Tensor, state: LeafState, param: Tensor, _: Tensor, rate: Number) -> tuple[Tensor, LeafState]:
        moment = state["momentum"].lerp(grad, weight_for(1 - momentum, grad))
        direction = grad.lerp(moment, weight_for(momentum, grad)) if nesterov else moment
        return direction.to(torch.bfloat16), {"momentum": moment}

    def scaled(direction: Tensor) -> Tensor:
        if not direction.numel():
            return direction
        rows, columns = direction.shape[-2:]
        scale = 0.2 * math.sqrt(max(rows, columns)) if match_adamw else math.sqrt(max(1.0, rows / columns))
        return scale * orthogonalize(direction, steps=steps, eps=eps).float()

    rest = {"nesterov": nesterov, "steps": steps, "eps": eps, "match_adamw": match_adamw, "spec": spec}
    again = remaker(muon, lr=lr, momentum=momentum, weight_decay=weight_decay, **rest)
    return with_traits(leafwise(init, rule, lr, weight_decay=weight_decay, spec=spec, of_matrix=scaled), remake=again)


def orthogonalize(matrix: Tensor, *, steps: int = 5, eps: Number = 1e-7) -> Tensor:
    """Approximates the (semi-)orthogonal matrices nearest to `matrix` [..., out, in]: singular values about 0.7..1.2.

    Newton-Schulz iteration in bf16, which is accurate enough, with the smaller dimension first to keep products small.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.reshape(-1, *matrix.shape[-2:]).to(torch.bfloat16)
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        # baddbmm rounds the sum once, which in bf16 saves a digit
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrix.shape)
