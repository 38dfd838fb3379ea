"""Experts whose outputs are changed one by one, against a loop over tokens and their experts."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.ops.mlp import glu
from fnmodels.ops.moe.each_output import with_each_output
from fnmodels.ops.moe.experts import dense_experts, loop_experts
from fnmodels.ops.norm import rms_norm_scaled_input

E, D, INNER, TOKENS, K = 5, 6, 4, 7, 3


def inputs() -> tuple[dict[str, Tensor], list[Any], Tensor]:
    """(stacks of experts, [x, weights, indices, valid], the weight of a norm); the last token is padding, and NaN."""
    make = torch.Generator().manual_seed(0)
    of = functools.partial(torch.randn, dtype=torch.float64, generator=make)
    stacks = {"gate_proj": of(E, INNER, D), "up_proj": of(E, INNER, D), "down_proj": of(E, D, INNER)}
    indices = torch.stack([torch.randperm(E, generator=make)[:K] for _ in range(TOKENS)])
    x, valid = of(TOKENS, D), torch.arange(TOKENS) < TOKENS - 1
    x[-1] = torch.nan
    return stacks, [x, of(TOKENS, K).abs(), indices, valid], of(D)


def by_token(stacks: dict[str, Tensor], given: list[Any], scale: Tensor, input_weighted: bool) -> Tensor:
    """[TOKENS, D], by the formula."""
    rows = []
    for token, shares, experts, real in zip(*given, strict=True):
        total = torch.zeros(D, dtype=torch.float64)
        for share, expert in zip(shares, experts.tolist(), strict=True):
            read = token * share if input_weighted else token
            inner = F.silu(stacks["gate_proj"][expert] @ read) * (stacks["up_proj"][expert] @ read)
            y = stacks["down_proj"][expert] @ inner * (1 + scale)
            y = y / (y.square().mean() + 1e-2).sqrt()
            total = total + (y if input_weighted else y * share)
        rows.append(total if real else torch.zeros_like(total))
    return torch.stack(rows)


@pytest.mark.parametrize("input_weighted", [False, True])
@pytest.mark.parametrize("experts", [loop_experts, dense_experts])
def test_with_each_output_finishes_every_output_before_its_weight(experts: Any, input_weighted: bool) -> None:
    stacks, given, scale = inputs()
    leaves = [t.requires_grad_() for t in (*stacks.values(), given[1], scale)]

    def finish(y: Tensor) -> Tensor:
        return rms_norm_scaled_input(y, scale, eps=1e-2)

    act = functools.partial(glu, activation="silu")
    got = with_each_output(experts, finish)(stacks, *given, act=act, input_weighted=input_weighted)
    want = by_token(stacks, given, scale, input_weighted)
    torch.testing.assert_close(got, want)
    upstream = torch.linspace(1, 2, got.numel(), dtype=torch.float64).reshape(got.shape)
    pairs = (torch.autograd.grad((y[:-1] * upstream[:-1]).sum(), leaves) for y in (got, want))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other)
    plain = experts(stacks, *given, act=act, input_weighted=input_weighted)
    assert (finish(plain)[:-1] - want[:-1]).abs().max() > 1e-2, "the norm of the sum is another function"
