"""Experts that return their input, by which a router spends less on easy tokens (LongCat-Flash, arXiv 2509.01322)."""

from collections.abc import Mapping

from torch import Tensor

from fnmodels.ops.dtypes import upcast
from fnmodels.options import Experts

from .experts_loop import Act


def with_identities(experts: Experts, count: int) -> Experts:
    """`experts` for a router whose experts from `count` on return their input, and have no parameters.

    They take no part in the dispatch of tokens: each chosen pair of token and expert is a row of its own there.
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
        real = (indices < count) & valid[:, None]
        rows, ids = x.repeat_interleave(k, 0), indices.where(real, 0).reshape(-1, 1)
        y = experts(stacks, rows, weights.reshape(-1, 1), ids, real.flatten(), act=act, input_weighted=input_weighted)
        identity = weights.where((indices >= count) & valid[:, None], 0).sum(-1, keepdim=True)
        return (upcast(y).unflatten(0, (tokens, k)).sum(1) + identity * x).to(x.dtype)

    return run
