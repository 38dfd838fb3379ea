"""Expert parallelism: each rank holds some experts of every layer, and all-to-alls carry tokens there and back.

    experts = expert_parallel(mesh["ep"].get_group())        # once
    total, count = next_token_loss(params, rows_of_this_rank, config=config, experts=experts)

Rank r of n holds the r-th of n equal shards of the experts' parameters along dimension 0, and all other parameters in
full. Each rank has its own tokens, any number of them (GShard, arXiv 2006.16668). Losses are sums: the gradient of an
expert is complete on its rank, made of all ranks' tokens; gradients of other parameters, and counts of tokens, are to
be summed over the ranks.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from fnmodels.ops.cpu.dispatch import combine_cpu
from fnmodels.ops.invariant.rows import rows_are_invariant
from fnmodels.ops.moe.choice import choose_experts
from fnmodels.ops.moe.dispatch import combine
from fnmodels.ops.moe.experts import sorted_rows, sorted_rows_cpu
from fnmodels.options import Experts
from train.comm import collectives


def expert_parallel(group: ProcessGroup, *, inner: str | Experts = "auto") -> Experts:
    """An `experts=` for `fnmodels.forward` with experts sharded evenly, in order, over the ranks of `group`.

    inner: how a rank computes its own experts, see `fnmodels.ops.moe.experts`. Every rank must call it for every layer,
    with or without tokens. The host reads the number of received rows, so it runs in eager mode and not under vmap.
    """
    ranks = group.size()

    def run(
        experts: Mapping[str, Tensor],
        x: Tensor,
        weights: Tensor,
        indices: Tensor,
        valid: Tensor,
        *,
        act: Any,
        input_weighted: bool = False,
    ) -> Tensor:
        here, how = experts["down_proj"].shape[0], "invariant" if inner == "auto" and rows_are_invariant() else inner
        given = x, weights, indices, valid, ranks * here, input_weighted
        rows, counts, weights, joined = (_sorted_invariantly if how == "invariant" else _sorted)(*given)
        counts = counts.view(ranks, here)
        coming = collectives.all_to_all(counts, group, split=0, join=0)  # [ranks, experts here]
        sent, received = counts.sum(1).tolist(), coming.sum(1).tolist()
        got = collectives.exchange(rows[: sum(sent)], sent, received, group)  # padding rows come last and are not sent
        ids = torch.arange(here, device=x.device).repeat(ranks)
        expert = ids.repeat_interleave(coming.flatten(), output_size=len(got))[:, None]
        local = choose_experts(how, got, *experts.values())
        ones, real = got.new_ones(len(got), 1), torch.ones(len(got), dtype=torch.bool, device=x.device)
        back = collectives.exchange(local(experts, got, ones, expert, real, act=act), received, sent, group)
        if not len(x):
            # There is nothing to combine, but backward runs the collectives too, so this rank must take part: its
            # weights need a gradient, and remat recomputes only up to the last saved tensor, which must therefore come
            # after the exchange.
            return (back * weights.sum()).to(x.dtype)
        return joined(back)

    run.invariant = inner in ("auto", "invariant")  # type: ignore[attr-defined]
    return run


# (rows by expert, rows of each expert, weights of the experts' outputs, what makes [T, D] of the experts' rows)
Sorted = tuple[Tensor, Tensor, Tensor, Callable[[Tensor], Tensor]]


def _sorted(x: Tensor, weights: Tensor, indices: Tensor, valid: Tensor, experts: int, input_weighted: bool) -> Sorted:
    rows, dispatched, weights = sorted_rows(x, weights, indices, valid, experts, input_weighted)

    def joined(back: Tensor) -> Tensor:
        padding = len(rows) - len(back)
        return combine(F.pad(back, (0, 0, 0, padding)) if padding else back, dispatched, weights)

    return rows, dispatched.counts, weights, joined


def _sorted_invariantly(
    x: Tensor, weights: Tensor, indices: Tensor, valid: Tensor, experts: int, input_weighted: bool
) -> Sorted:
    """As `invariant_experts` sorts and adds up: the bits are those of one process."""
    rows, dispatched, weights = sorted_rows_cpu(x, weights, indices, valid, experts, input_weighted)
    return rows, dispatched.counts, weights, lambda back: combine_cpu(back, dispatched, weights)
