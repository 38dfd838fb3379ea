"""Experts whose outputs are changed one by one before a token's are weighted and summed (Muse Spark's norm of them)."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fnmodels.options import Experts

from .experts_loop import Act


def with_each_output(experts: Experts, finish: Callable[[Tensor], Tensor]) -> Experts:
    """`experts` with `finish` [rows, D] -> [rows, D] between an expert's output for a token and its weight.

    finish: acts on each row alone; a row of zeros has finite gradients. Each chosen pair of token and expert is a row
    of its own in the dispatch of tokens, so that a sum over processes, too, comes before `finish`.
    """

    def run(
        stacks: Mapping[str, Tensor],
        x: Tensor,
        weights: Tensor,
        indices: Tensor,
        valid: Tensor,
        *,
        act: Act,
        input_weighted: bool = False,
    ) -> Tensor:
        tokens, k = indices.shape
        rows, ids, real = x.repeat_interleave(k, 0), indices.reshape(-1, 1), valid.repeat_interleave(k, 0)
        before, after = torch.ones_like(weights), weights.where(valid[:, None], 0)
        if input_weighted:
            before, after = after, before
        y = experts(stacks, rows, before.reshape(-1, 1), ids, real, act=act, input_weighted=input_weighted)
        return (finish(y).unflatten(0, (tokens, k)) * after[..., None]).sum(1).to(x.dtype)

    return run
