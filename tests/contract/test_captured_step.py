"""Steps of decoding as a CUDA graph have the bits of `decode_`. All but one are skipped without a device."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
import train
from fnmodels import tree
from tests.contract.test_cache import FAMILIES, SLIDING, STRUCTURES, empty
from tests.support.cases import Case, batch_of, generic_params, off, segments

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
every_structure = pytest.mark.parametrize("case", STRUCTURES, ids=str)
ROWS = segments((14,), (8, -6))


def moved(values: Any) -> Any:
    return tree.map(lambda t: t.cuda() if isinstance(t, Tensor) else t, values)


def prompted(case: Case, params: Any, batch: Any, dtype: torch.dtype) -> Any:
    """A cache with the first six tokens of the batch's rows."""
    cache = moved(empty(batch, dtype=dtype))
    given = fnmodels.prepare_step(
        case.config, batch.tokens[:, :6].cuda(), cache, segment_ids=batch.segment_ids[:, :6].cuda()
    )
    return fnmodels.decode_(params, *given, cache, config=case.config)[1]


def compare(case: Case, dtype: torch.dtype, experts: str) -> None:
    batch = batch_of(case.config, ROWS)
    params = moved(tree.map(lambda t: t.to(dtype) if t.is_floating_point() else t, generic_params(case.config)))
    step = fnmodels.captured_step(case.config, experts=experts)
    one, other = (prompted(case, params, batch, dtype) for _ in range(2))
    for t in range(6, 14):
        tokens, ids = batch.tokens[:, t : t + 1].cuda(), batch.segment_ids[:, t : t + 1].cuda()
        made = fnmodels.prepare_step(case.config, tokens, other, segment_ids=ids)
        wanted, other = fnmodels.decode_(params, *made, other, config=case.config, experts=experts)
        given = one
        got, one = step(params, tokens, given, segment_ids=ids)
        valid = ids[:, 0] > 0
        assert torch.equal(got[valid], wanted[valid]), f"step {t}: {off(got[valid], wanted[valid]):.1e}"
        with pytest.raises(RuntimeError, match="used up"):
            given.layers
    assert off(one.slots, other.slots) == 0 if one.slots else True


@on_cuda
@every_structure
def test_every_structure(case: Case) -> None:
    """Rows that end, slots that fill up, rings that turn over and states: no bit differs."""
    compare(case, torch.float32, "dense")


@on_cuda
@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_every_family_in_bf16(case: Case) -> None:
    compare(case, torch.bfloat16, "dense")


@on_cuda
def test_two_caches_in_turn_and_one_that_was_rewound() -> None:
    """No cache is written by a step of another; a cache may leave the graph and come back."""
    case = SLIDING
    config, batch, params = case.config, batch_of(case.config, ROWS), moved(generic_params(case.config))
    step = fnmodels.captured_step(config)
    tokens = batch.tokens.cuda()

    def both(caches: list[Any], run: Any) -> list[Tensor]:
        found = []
        for t in range(6, 12):
            for i, cache in enumerate(caches):
                logits, caches[i] = run(tokens[:, t - i : t - i + 1], cache)
                found.append(logits)
        return found

    def plain(now: Tensor, cache: Any) -> Any:
        return fnmodels.decode_(params, *fnmodels.prepare_step(config, now, cache), cache, config=config)

    calls = itertools.count(1)

    def mixed(now: Tensor, cache: Any) -> Any:
        return plain(now, cache) if next(calls) % 3 == 0 else step(params, now, cache)

    wanted, graphs, either = (
        both([prompted(case, params, batch, torch.float32) for _ in range(2)], run)
        for run in (plain, lambda now, cache: step(params, now, cache), mixed)
    )
    assert all(map(torch.equal, graphs, wanted)) and all(map(torch.equal, either, wanted))


@on_cuda
def test_parameters_written_in_place_and_others() -> None:
    case = FAMILIES[0]
    config, batch, params = case.config, batch_of(case.config, ROWS), moved(generic_params(case.config))
    step, tokens = fnmodels.captured_step(config), batch.tokens[:, 6:7].cuda()
    cache = prompted(case, params, batch, torch.float32)
    _, cache = step(params, tokens, cache)
    tree.map(lambda leaf: leaf.mul_(1.5), params)
    for weights in (params, tree.map(lambda leaf: leaf + 0.1, params)):
        other = tree.map(lambda t: t.clone() if isinstance(t, Tensor) else t, cache)
        wanted, _ = fnmodels.decode_(weights, *fnmodels.prepare_step(config, tokens, other), other, config=config)
        got, cache = step(weights, tokens, cache)
        assert torch.equal(got, wanted)


@on_cuda
def test_generation_by_graphs_is_generation() -> None:
    """Requests that come and go. Steps without graphs leave out idle slots, so that products are rounded otherwise."""
    case = SLIDING
    params = moved(generic_params(case.config))
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [3, 3], [2, 9, 4, 7]]
    wanted, got = (
        train.generate(params, case.config, prompts, max_new=[9, 12, 3, 7, 5], slots=3, seeds=1, compile=how)
        for how in ("none", "graph")
    )
    assert got.tokens == wanted.tokens
    assert off(got.logp, wanted.logp) < 1e-4


def test_tensors_on_a_cpu_are_refused() -> None:
    config = FAMILIES[0].config
    cache = fnmodels.init_cache(config, 1, 4)
    with pytest.raises(ValueError, match=r"CUDA graph, and the tokens are on cpu"):
        fnmodels.captured_step(config)(generic_params(config), torch.zeros(1, 1, dtype=torch.int64), cache)
