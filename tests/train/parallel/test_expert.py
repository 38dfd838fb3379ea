"""Expert parallelism: what leaves the layer, and every gradient, equals one process, however tokens are spread."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fnmodels
import train
from fnmodels import tree
from fnmodels.ops.moe.experts import loop_experts
from tests.support import cases
from tests.support.ranks_pool import Ranks
from tests.train.parallel.test_context import worst
from train.comm import collectives
from train.parallel.expert import expert_parallel

# As many experts as the largest mesh divides; the rest is in tests/variants.
MODELS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 8},
    "deepseek_v3": {"n_routed_experts": 8, "n_group": 2, "topk_group": 1},
    "llama4_text": {"num_local_experts": 8, "num_experts_per_tok": 2},
}


def world_group() -> Any:
    return dist.group.WORLD


@functools.cache
def config_of(name: str) -> Any:
    case = next(case for case in cases.cases() if case.name == name)
    return type(case.config).from_hf(case.values | MODELS[name])


@functools.cache
def batch_of(name: str) -> dict[str, Tensor]:
    """Four rows: packed documents with padding, one with half its labels left out, one of padding alone."""
    segments = cases.segments((-3, 10, 4, 6, -1), (5, 1, 15, 3), (24,), (-24,))
    batch = cases.batch_of(config_of(name), segments, seed=8)
    labels = batch.labels.clone()
    labels[2, ::2] = -100
    return {"tokens": batch.tokens, "positions": batch.positions, "segment_ids": segments, "labels": labels}


def is_expert(path: str) -> bool:
    return ".experts." in path


def how_of(name: str) -> dict[str, Any]:
    return {"config": config_of(name), "length": 24, "aux": True}


@functools.cache
def expected(name: str) -> tuple[float, Tensor, dict[str, Tensor]]:
    weights = cases.trainable(cases.generic_params(config_of(name)))
    total, _, aux = train.next_token_loss(weights, batch_of(name), **how_of(name), experts="loop")
    return total.item(), aux["counts"], tree.flatten(cases.gradients(total, weights))


def compared(name: str, inner: str = "auto") -> float:
    """How far the gradients on all ranks are from those of one process. The loss and counts are asserted."""
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), world_group()
    whole = tree.flatten(cases.generic_params(config_of(name)))
    weights = cases.trainable(
        tree.unflatten({path: t.chunk(ranks)[rank] if is_expert(path) else t for path, t in whole.items()})
    )
    rows = {key: t.chunk(ranks)[rank] for key, t in batch_of(name).items()}
    how = how_of(name) | {"experts": expert_parallel(group, inner=inner)}
    total, _, aux = train.next_token_loss(weights, rows, **how)
    grads = tree.flatten(cases.gradients(total, weights))
    for path, grad in grads.items():
        grads[path] = collectives.all_gather(grad, 0, group) if is_expert(path) else collectives.summed(grad, group)
    wanted_total, counts, wanted = expected(name)
    assert collectives.summed(total, group).item() == pytest.approx(wanted_total, rel=1e-5)
    assert torch.equal(collectives.summed(aux["counts"], group), counts)
    return worst(grads, wanted)


def test_every_gradient_equals_that_of_one_process(ranks: Ranks) -> None:
    """What goes in is weighted, and one expert is shared; for others see the table of compositions."""
    assert max(ranks(4)(compared, "llama4_text")) < 1e-5


def steps_on_a_cache(name: str) -> float:
    """Each rank decodes rows of its own with its experts; the last rank's rows end early."""
    rank, ranks, config = dist.get_rank(), dist.get_world_size(), config_of(name)
    whole = tree.flatten(cases.generic_params(config))
    weights = tree.unflatten({path: t.chunk(ranks)[rank] if is_expert(path) else t for path, t in whole.items()})
    tokens, segment_ids = cases.tokens_of(config, 2, 12, seed=rank), torch.ones(2, 12, dtype=torch.long)
    segment_ids[:, 9 if rank + 1 == ranks else 12 :] = 0
    wanted = fnmodels.forward(
        cases.generic_params(config),
        *fnmodels.prepare(config, tokens, segment_ids=segment_ids, length=12),
        config=config,
    )
    cache, found = fnmodels.init_cache(config, 2, 12), []
    for piece, ids in zip(tokens.split([7, 1, 1, 3], 1), segment_ids.split([7, 1, 1, 3], 1), strict=True):
        step = fnmodels.prepare_step(config, piece, cache, segment_ids=ids)
        logits, cache = fnmodels.decode_(weights, *step, cache, config=config, experts=expert_parallel(world_group()))
        found.append(logits)
    return float((torch.cat(found, 1) - wanted)[segment_ids > 0].abs().max())


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_steps_on_a_cache(ranks: Ranks, name: str) -> None:
    assert max(ranks(2)(steps_on_a_cache, name)) < 1e-4


@pytest.mark.parametrize("inner", ["loop", "grouped", "dense"])
def test_with_each_way_to_compute_what_has_come(ranks: Ranks, inner: str) -> None:
    assert max(ranks(2)(compared, "gpt_oss", inner)) < 1e-5


EXPERTS, CHOSEN, WIDTH, INNER = 8, 3, 12, 5
# Tokens of each rank. With four ranks the first four count, so that some have none.
SPREADS = {"even": (6, 6, 6, 6), "uneven": (7, 1, 0, 12), "none": (0, 0, 0, 0), "one": (0, 1, 0, 0)}
CHOICES = ("random", "skewed", "distant")


def act(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def drawn_layer(dtype: torch.dtype) -> tuple[torch.Generator, dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    shapes = {"gate_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH), "down_proj": (WIDTH, INNER)}
    shapes |= {"gate_bias": (INNER,), "up_bias": (INNER,), "down_bias": (WIDTH,)}  # type: ignore[dict-item]
    return draw, {name: torch.randn(EXPERTS, *shape, generator=draw, dtype=dtype) for name, shape in shapes.items()}


def drawn_tokens(draw: torch.Generator, count: int, choice: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x with NaN at padding, weights, indices, valid."""
    x = torch.randn(count, WIDTH, generator=draw, dtype=dtype)
    weights = torch.rand(count, CHOSEN, generator=draw, dtype=dtype)
    scores = torch.rand(count, EXPERTS, generator=draw)
    if choice == "skewed":  # one expert has every token, and the last rank's none
        scores[:, 1] += 2
        scores[:, 4:] -= 2
    if choice == "distant":  # all go to the last ranks
        scores[:, 4:] += 2
    valid = torch.rand(count, generator=draw) > 0.3
    return x.where(valid[:, None], torch.nan), weights, scores.topk(CHOSEN).indices, valid


def layer_alone(inner: str, remat: bool) -> float:
    """The largest error of results and gradients, fp64, of one layer."""
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), world_group()
    dtype = torch.float64
    draw, layer = drawn_layer(dtype)
    mine = {name: leaf.chunk(ranks)[rank] for name, leaf in layer.items()}
    off = 0.0
    for spread in SPREADS.values():
        sizes = list(spread[:ranks])
        total = sum(sizes)
        for choice in CHOICES:
            for weighted in (False, True):
                tokens = drawn_tokens(draw, total, choice, dtype)
                gradient = torch.randn(total, WIDTH, generator=draw, dtype=dtype)

                def run(
                    experts: Any, layer: Any, tokens: Any, gradient: Tensor, weighted: bool = weighted
                ) -> list[Tensor]:
                    x, weights = (t.clone().requires_grad_() for t in tokens[:2])
                    names, leaves = list(layer), [t.clone().requires_grad_() for t in layer.values()]

                    def call(x: Tensor, weights: Tensor, *leaves: Tensor) -> Tensor:
                        tree = dict(zip(names, leaves, strict=True))
                        return experts(tree, x, weights, *tokens[2:], act=act, input_weighted=weighted)

                    inputs = (x, weights, *leaves)
                    y = checkpoint(call, *inputs, use_reentrant=False) if remat else call(*inputs)
                    how = {"allow_unused": True, "materialize_grads": True}
                    return [y.detach(), *torch.autograd.grad(y, inputs, gradient, **how)]

                one = run(loop_experts, layer, tokens, gradient)
                own = [t.split(sizes)[rank] for t in (*tokens, gradient)]
                found = run(expert_parallel(group, inner=inner), mine, own[:4], own[4])
                wanted = [*(t.split(sizes)[rank] for t in one[:3]), *(t.chunk(ranks)[rank] for t in one[3:])]
                for a, b in zip(found, wanted, strict=True):
                    assert a.shape == b.shape and not a.isnan().any()
                    off = max(off, float((a - b).abs().max()) if a.numel() else 0.0)
    return off


@pytest.mark.parametrize(("world", "inner", "remat"), [(4, "loop", False), (2, "loop", True), (2, "dense", False)])
def test_any_spread_of_tokens(ranks: Ranks, world: int, inner: str, remat: bool) -> None:
    """Uneven and empty ranks, experts without tokens, NaN at padding; one token for all ranks, and none."""
    assert max(ranks(world)(layer_alone, inner, remat)) < 1e-12


def grouped_alone() -> float:
    """F.grouped_mm on a rank to which nothing comes."""
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), world_group()
    draw, layer = drawn_layer(torch.float32)
    layer = {name: F.pad(t, (0, 3)) if name == "down_proj" else t for name, t in layer.items()}
    layer |= {name: F.pad(layer[name], (0, 0, 0, 3)) for name in ("gate_proj", "up_proj")}
    layer |= {name: F.pad(layer[name], (0, 3)) for name in ("gate_bias", "up_bias")}
    x, weights, indices, valid = drawn_tokens(draw, 5, "skewed", torch.float32)
    x = x.where(valid[:, None], 0)
    one = loop_experts(layer, x, weights, indices, valid, act=act)
    mine = {name: leaf.chunk(ranks)[rank].clone().requires_grad_() for name, leaf in layer.items()}
    y = expert_parallel(group, inner="grouped")(mine, x, weights, indices, valid, act=act)
    torch.autograd.grad(y.sum(), list(mine.values()))
    return float((y - one).detach().abs().max())


def test_grouped_products_where_nothing_comes(ranks: Ranks) -> None:
    assert max(ranks(4)(grouped_alone)) < 1e-4


def there_and_back() -> None:
    """M2: experts that return what they get, with weights that add up to 1."""
    draw, layer = drawn_layer(torch.float32)
    for count in (1, 5, 8):
        x, weights, indices, valid = drawn_tokens(draw, count, "skewed", torch.float32)
        experts = expert_parallel(world_group(), inner=lambda _, rows, *more, **how: rows)
        back = experts(layer, x, torch.full_like(weights, 1 / CHOSEN), indices, valid, act=act)
        torch.testing.assert_close(back, x.where(valid[:, None], 0))


def test_there_and_back_is_the_identity(ranks: Ranks) -> None:
    ranks(4)(there_and_back)


def curvature() -> float:
    """A Hessian's product through the messages, against that of one process."""
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), world_group()
    whole, batch = tree.flatten(cases.generic_params(config_of("gpt_oss"))), batch_of("gpt_oss")

    def product(weights: Any, batch: Any, experts: Any) -> dict[str, Tensor]:
        def loss(weights: Any) -> Tensor:
            how = {"config": config_of("gpt_oss"), "kernel": "math", "length": 24}
            return train.next_token_loss(weights, batch, experts=experts, **how)[0]

        moves = tree.map(torch.cos, weights)
        return tree.flatten(torch.func.jvp(torch.func.grad(loss), (weights,), (moves,))[1])

    mine = {path: t.chunk(ranks)[rank] if is_expert(path) else t for path, t in whole.items()}
    rows = {key: t.chunk(ranks)[rank] for key, t in batch.items()}
    found = product(tree.unflatten(mine), rows, expert_parallel(group, inner="dense"))
    for path, leaf in found.items():
        found[path] = collectives.all_gather(leaf, 0, group) if is_expert(path) else collectives.summed(leaf, group)
    return worst(found, product(tree.unflatten(whole), batch, "dense"))


def test_second_derivatives(ranks: Ranks) -> None:
    assert max(ranks(2)(curvature)) < 1e-4
