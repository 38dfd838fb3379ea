"""Context parallelism: each method, on every mask, equals one process in attention and in every gradient of a model."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fnmodels
import train
from fnmodels import tree
from fnmodels.inputs.mask import Mask
from fnmodels.inputs.rules import BidirectionalWindow, Causal, Chunk, Everything, SameSpan, Window
from fnmodels.ops.attention.select import attention
from tests.support import cases
from tests.support.one_process import by_one_rank
from tests.support.ranks_pool import Ranks
from train.comm import collectives
from train.parallel.context import api as context
from train.parallel.context import ring
from train.parallel.context.keys import RanksKeys
from train.parallel.context.state import RanksBefore

METHODS = ("gather", "ulysses", "ring")
# (a variant of tests/variants, changes): as many heads as the largest mesh divides
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
LATENT = {"num_attention_heads": 4, "num_key_value_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_tied": ("llama_tied", HEADS),
    "gpt_oss": ("gpt_oss", HEADS),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "mtp": ("deepseek_v3", LATENT | {"num_nextn_predict_layers": 2}),
    "llama_dynamic": ("llama_dynamic", HEADS),
    "qwen3_next": ("qwen3_next", HEADS),
    "lfm2": ("lfm2_bias_untied", HEADS),
    "mamba2": ("mamba2", {}),
    "falcon_h1": ("falcon_h1", HEADS),  # attention and a recurrence in one layer
    "qwen3_5": ("qwen3_5", HEADS),  # with positions of time, height and width
    "deepseek_v32": ("deepseek_v32", LATENT),  # attention that chooses its keys
    "glm_moe_dsa": ("glm_moe_dsa", LATENT),  # in some layers as an earlier one did
}
LENGTH = 32  # two pieces for each of four ranks


def world_group() -> Any:
    return dist.group.WORLD


@functools.cache
def config_of(name: str) -> Any:
    variant, changes = MODELS[name]
    case = next(case for case in cases.cases() if case.name == variant)
    return type(case.config).from_hf(case.values | changes)


def loss_of(name: str) -> Any:
    return functools.partial(train.mtp_loss if name == "mtp" else train.next_token_loss, config=config_of(name))


@functools.cache
def batch_of(name: str) -> dict[str, Tensor]:
    """Documents of many lengths, padding at either end, one that began earlier; labels unevenly left out."""
    segments = cases.segments((-3, 13, 6, 9, -1), (5, 1, 20, 3, -3), (32,), (2, 2, 3, -25))
    batch = cases.batch_of(config_of(name), segments)
    positions, labels = batch.positions.clone(), batch.labels.clone()
    positions[2] += 5
    labels[:, 17:21] = -100
    labels[2, ::3] = -100
    if name == "qwen3_5":
        positions = torch.stack((positions, positions + positions % 3, positions + positions % 2), -1)
    made = {"tokens": batch.tokens, "positions": positions, "segment_ids": segments, "labels": labels}
    return train.losses.look_ahead(made, 2) if name == "mtp" else made


def length_of(batch: dict[str, Tensor]) -> int:
    return int(batch["positions"].max()) + 1


@functools.cache
def expected(name: str) -> tuple[float, int, dict[str, Tensor]]:
    """Loss, count and gradients of one process."""
    return by_one_rank(f"context-{name}", lambda: computed(name))


def computed(name: str) -> tuple[float, int, dict[str, Tensor]]:
    batch, weights = batch_of(name), cases.trainable(cases.generic_params(config_of(name)))
    total, count = loss_of(name)(weights, batch, kernel="math", length=length_of(batch))
    return total.item(), count.item(), tree.flatten(cases.gradients(total, weights))


def worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest |found - wanted| of a leaf in units of its |wanted|; leaves without gradient must have none."""
    assert found.keys() == wanted.keys()
    apart = {path: float((found[path] - leaf).norm() / leaf.norm()) for path, leaf in wanted.items() if leaf.any()}
    learning = [path for path in wanted if ".indexer." not in path]
    assert len(apart) > len(learning) * 0.9 and not any(found[path].any() for path in wanted.keys() - apart.keys())
    return max(apart.values())


def summed(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their sums over all ranks, by one message for each dtype."""
    found = dict(grads)
    for dtype in {grad.dtype for grad in grads.values()}:
        of_it = {path: grad for path, grad in grads.items() if grad.dtype == dtype}
        joined = collectives.summed(torch.cat([grad.flatten() for grad in of_it.values()]), world_group())
        parts = joined.split([grad.numel() for grad in of_it.values()])
        found |= {path: part.view_as(of_it[path]) for path, part in zip(of_it, parts, strict=True)}
    return found


def compared(name: str, method: str, order: Any = None, inner: str = "auto", own_length: bool = False) -> Any:
    """How far loss, count and gradients on all ranks are from those of one process. own_length: that of the part."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    config, batch = config_of(name), batch_of(name)
    weights = cases.trainable(cases.generic_params(config))
    part = context.shard_batch(batch, rank, ranks, order=order, config=config)
    kernel = context.context_kernel(method, world_group(), inner=inner)  # type: ignore[arg-type]
    total, count = loss_of(name)(weights, part, kernel=kernel, length=None if own_length else length_of(batch))
    grads = summed(tree.flatten(cases.gradients(total, weights)))
    wanted_total, wanted_count, wanted = expected(name)
    valid = [collectives.summed(t, world_group()) for t in (total, count)]
    assert valid[1].item() == wanted_count
    assert own_length or valid[0].item() == pytest.approx(wanted_total, rel=1e-5)
    return {"worst": worst(grads, wanted), "count": count.item()}


# each third of them has all methods
WAYS = (
    ("gather", "mask", "math"),
    ("gather", "head_tail", "sdpa"),
    ("gather", "mask", "sparse"),
    ("ulysses", None, "auto"),
    ("ulysses", None, "sdpa"),
    ("ulysses", "mask", "math"),
    ("ring", "mask", "math"),
    ("ring", "head_tail", "math"),
    ("ring", None, "math"),
)


def by_methods(name: str, ways: list[int]) -> dict[str, float]:
    taken = [WAYS[number] for number in ways]
    return {
        f"{method} {order} {inner}": compared(name, method, order, inner)["worst"] for method, order, inner in taken
    }


# The first has all ways; the others have each third one in turn.
@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("llama_tied", range(len(WAYS))),
        ("gpt_oss", range(1, len(WAYS), 3)),
        ("deepseek_v3", range(0, len(WAYS), 3)),
        ("deepseek_v32", range(1, len(WAYS), 3)),
        ("glm_moe_dsa", range(2, len(WAYS), 3)),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_every_gradient_equals_that_of_one_process(ranks: Ranks, name: str, ways: range) -> None:
    """With four ranks; two, and what goes with it, are in the table of compositions."""
    for found in ranks(4)(by_methods, name, list(ways)):
        assert {way.partition(" ")[0] for way in found} == set(METHODS)
        assert max(found.values()) < 1e-5, found


IN_ORDER = (("gather", None, "math"), ("ulysses", "auto", "auto"), ("ring", "auto", "auto"))


def every_method_in_order(name: str) -> list[float]:
    return [compared(name, method, order, inner)["worst"] for method, order, inner in IN_ORDER]


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "mamba2", "falcon_h1", "qwen3_5"])
def test_layers_that_read_tokens_in_order_go_on_from_the_rank_before(ranks: Ranks, name: str) -> None:
    """Documents straddle every border, end on one, and leave ranks without a token."""
    for found in ranks(4)(every_method_in_order, name):
        assert max(found) < 1e-5, found


# {what is wrong: (the method of `RanksBefore`, a wrong one made of the right one)}
HANDED: dict[str, tuple[str, Callable[..., Any]]] = {
    "the segment of another document": ("_segment", lambda right: lambda self, ids: right(self, ids) + 1),
    "no state and no tail": ("state", lambda right: lambda self, maps, own: right(self, maps, own) * 0),
    "no gradient": ("state", lambda right: lambda self, maps, own: right(self, maps, own).detach()),
    "the state of one rank": ("state", lambda right: lambda self, maps, own: right(self, maps * 0, own)),
}


# Where queries choose among the keys of all ranks.
CHOSEN: dict[str, tuple[str, Callable[..., Any]]] = {
    "index keys of the first rank alone": ("gather", lambda right: lambda self, k: right(self, _of_the_first(k, self))),
    "keys of no other rank": ("mask", lambda right: lambda self, mask: _without_others(right(self, mask), self)),
}


def _of_the_first(k: Tensor, ranks: RanksKeys) -> Tensor:
    return k * (ranks.group.rank() == 0)


def _without_others(mask: Mask, ranks: RanksKeys) -> Mask:
    """The keys of other ranks are of no document."""
    share = mask.kv_segments.shape[1] // ranks.group.size()
    other = torch.arange(mask.kv_segments.shape[1]) // share != ranks.group.rank()
    return dataclasses.replace(mask, kv_segments=mask.kv_segments.masked_fill(other, -1))


def with_a_mistake(name: str, what: str) -> float:
    where, (attribute, wrong) = (RanksKeys, CHOSEN[what]) if what in CHOSEN else (RanksBefore, HANDED[what])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, attribute, wrong(getattr(where, attribute)))
        config, batch = config_of(name), batch_of(name)
        weights = cases.trainable(cases.generic_params(config))
        part = context.shard_batch(batch, dist.get_rank(), dist.get_world_size(), order="auto", config=config)
        total, _ = loss_of(name)(weights, part, kernel=context.context_kernel("gather", world_group()))
        grads = tree.flatten(cases.gradients(total, weights))
    return worst(summed(grads), expected(name)[2])


@pytest.mark.parametrize(
    ("name", "what"),
    [
        *(("qwen3_next", what) for what in HANDED),
        *(("lfm2", what) for what in [*HANDED][:3]),
        ("mamba2", "no gradient"),
        *(("glm_moe_dsa", what) for what in CHOSEN),
    ],
)
def test_mistakes_in_what_is_handed_on_are_seen(ranks: Ranks, name: str, what: str) -> None:
    assert min(ranks(4)(with_a_mistake, name, what)) > 1e-2


def test_ranks_have_uneven_numbers_of_labels(ranks: Ranks) -> None:
    counts = [found["count"] for found in ranks(4)(compared, "llama_tied", "gather")]
    assert len(set(counts)) > 2


def test_heads_for_further_tokens(ranks: Ranks) -> None:
    """What they look ahead to is another tensor of the batch, which is permuted and cut with the rest."""
    assert max(found["worst"] for found in ranks(2)(compared, "mtp", "ring", "head_tail")) < 1e-5


def test_scalings_with_a_length_need_that_of_the_whole(ranks: Ranks) -> None:
    assert ranks(2)(compared, "llama_dynamic", "gather")[0]["worst"] < 1e-5
    assert max(found["worst"] for found in ranks(2)(compared, "llama_dynamic", "gather", None, "auto", True)) > 1e-3


RULES: dict[str, Any] = {
    "causal": Causal(),
    "window": Causal() & Window(5),
    "window_1": Causal() & Window(1),
    "chunk": Causal() & Chunk(6),
    "everything": Everything(),
    "near": BidirectionalWindow(3),
    "spans": Causal() | SameSpan(),
}
# heads of queries and of keys, widths of keys and of values, softcap, sinks
SHAPES = {"grouped": (8, 4, 6, 6, None, False), "latent": (4, 4, 10, 6, None, False), "capped": (8, 4, 6, 6, 1.5, True)}


def attention_alone(method: str, inner: str) -> float:
    """The largest error of results and gradients, fp64, over all rules and shapes, with tokens in a random order."""
    rank, world = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(0)
    segments = cases.segments((-3, 13, 6, 9, -1), (5, 1, 20, 3, -3), (-32,))
    rows, length = segments.shape
    order = torch.stack([torch.randperm(length, generator=draw) for _ in range(rows)])
    spans = torch.arange(length).expand(rows, -1) // 4 % 3
    here = slice(rank * length // world, (rank + 1) * length // world)
    kernel: Any = context.context_kernel(method, world_group(), inner=inner)  # type: ignore[arg-type]
    off = 0.0
    for rule in RULES.values():
        given = (cases.positions_of(segments), segments)
        whole = fnmodels.permute(Mask(*given, *given, spans, spans, rule), order)
        mine = whole.select(here, here)
        for heads, groups, width, value_width, softcap, with_sinks in SHAPES.values():
            if softcap is not None and inner == "sdpa":
                continue

            def drawn(*shape: int) -> Tensor:
                return torch.randn(shape, generator=draw, dtype=torch.float64)

            q, k = drawn(rows, length, heads, width), drawn(rows, length, groups, width)
            v, grad_output = drawn(rows, length, groups, value_width), drawn(rows, length, heads, value_width)
            sinks = (drawn(heads),) if with_sinks else ()
            how = {"scale": 0.4, "softcap": softcap}

            def run(tensors: Any, mask: Mask, kernel: Any, grad_output: Tensor, how: Any = how) -> list[Tensor]:
                leaves = [t.clone().requires_grad_() for t in tensors]
                sink = leaves[3] if len(leaves) > 3 else None
                out = attention(*leaves[:3], mask, kernel=kernel, sinks=sink, **how)
                return [out.detach(), *torch.autograd.grad(out, leaves, grad_output)]

            found = run([*(t[:, here] for t in (q, k, v)), *sinks], mine, kernel, grad_output[:, here])
            wanted = run([q, k, v, *sinks], whole, "math", grad_output)
            found[4:] = [collectives.summed(grad, world_group()) for grad in found[4:]]
            wanted[:4] = [t[:, here] for t in wanted[:4]]
            off = max(off, *(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)))
            assert (found[0][2] == 0).all()
    return off


@pytest.mark.parametrize(
    ("method", "inner"),
    [("gather", "math"), ("gather", "sdpa"), ("ulysses", "math"), ("ulysses", "auto"), ("ring", "math")],
)
def test_attention_on_every_mask_that_is_data(ranks: Ranks, method: str, inner: str) -> None:
    assert max(ranks(4)(attention_alone, method, inner)) < 1e-12


def few_queries_at_a_time() -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "QUERIES", 3)  # of the eight that a rank has
        return attention_alone("ring", "math")


def test_a_ring_that_holds_few_scores_at_a_time(ranks: Ranks) -> None:
    assert max(ranks(4)(few_queries_at_a_time)) < 1e-12


def in_half_precision(method: str) -> float:
    """The gradient of a value that all queries see alike: of one in full, and of the others what bf16 would drop."""
    rank, world = dist.get_rank(), dist.get_world_size()
    positions, ones = torch.arange(world)[None], torch.ones(1, world, dtype=torch.long)
    whole = Mask(positions, ones, positions, ones, None, None, Everything())
    q = k = torch.zeros(1, world, 4, 8, dtype=torch.bfloat16)
    grad_output = torch.full((1, world, 4, 8), 0.012, dtype=torch.bfloat16)
    grad_output[:, 0] = world

    def gradient(here: slice, kernel: Any) -> Tensor:
        v = torch.ones(1, world, 4, 8, dtype=torch.bfloat16)[:, here].requires_grad_()
        out = attention(q[:, here], k[:, here], v, whole.select(here, here), kernel=kernel, scale=1.0)
        return torch.autograd.grad(out, v, grad_output[:, here])[0]

    here = slice(rank, rank + 1)
    found = gradient(here, context.context_kernel(method, world_group(), inner="math"))  # type: ignore[arg-type]
    return float((found - gradient(slice(None), "math")[:, here]).abs().max())


@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_keys_are_summed_in_fp32(ranks: Ranks, method: str) -> None:
    assert ranks(4)(in_half_precision, method) == [0.0] * 4


def sent(remat: bool) -> dict[str, int]:
    """How many messages a forward and backward takes: of masks once for each, of keys in every layer."""
    config, batch = config_of("gpt_oss"), batch_of("gpt_oss")
    part = context.shard_batch(batch, dist.get_rank(), dist.get_world_size())
    weights, seen = cases.trainable(cases.generic_params(config)), {"masks": 0, "keys": 0}
    layer_fn = (lambda block: functools.partial(checkpoint, block, use_reentrant=False)) if remat else None
    kernel = context.context_kernel("gather", world_group())
    gather = collectives.all_gather

    def counted(x: Tensor, *how: Any, **more: Any) -> Tensor:
        seen["keys" if x.is_floating_point() else "masks"] += 1
        return gather(x, *how, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "all_gather", counted)
        for _ in range(2):  # two batches through one kernel
            total, _ = train.next_token_loss(weights, part, config=config, kernel=kernel, layer_fn=layer_fn)
            cases.gradients(total, weights)
    return seen


def test_masks_are_sent_once_for_each_batch_and_kind(ranks: Ranks) -> None:
    assert ranks(2)(sent, False) == [{"masks": 4, "keys": 4}] * 2
    assert ranks(2)(sent, True) == [{"masks": 4, "keys": 8}] * 2


def curvature() -> float:
    """A Hessian's product through gathered keys, against that of one process."""
    config, batch = config_of("llama_tied"), batch_of("llama_tied")
    part = context.shard_batch(batch, dist.get_rank(), dist.get_world_size(), order="head_tail")
    weights = cases.generic_params(config)
    moves = tree.map(torch.cos, weights)

    def product(batch: Any, kernel: Any) -> Any:
        def loss(weights: Any) -> Tensor:
            return train.next_token_loss(weights, batch, config=config, kernel=kernel)[0]

        return tree.flatten(torch.func.jvp(torch.func.grad(loss), (weights,), (moves,))[1])

    found = product(part, context.context_kernel("gather", world_group(), inner="math"))
    found = {path: collectives.summed(leaf, world_group()) for path, leaf in found.items()}
    return worst(found, product(batch, "math"))


def test_second_derivatives_through_gathered_keys(ranks: Ranks) -> None:
    assert max(ranks(2)(curvature)) < 1e-4


def refusals() -> None:
    """Sentences, on all ranks alike and before any message."""
    kernels = {method: context.context_kernel(method, world_group()) for method in METHODS}  # type: ignore[arg-type]
    positions = torch.arange(4)[None]
    ones = torch.ones_like(positions)
    mask = Mask(positions, ones, positions, ones, None, None, Causal())

    def run(method: str, heads: int = 4, groups: int = 2, mask: Any = mask, tokens: int = 4) -> Tensor:
        q, k = torch.randn(1, tokens, heads, 8).requires_grad_(), torch.randn(1, tokens, groups, 8)
        return attention(q, k, k, mask, kernel=kernels[method], scale=1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(dist, "all_to_all_single")
        patch.delattr(collectives, "all_gather")
        with pytest.raises(ValueError, match="6 of queries and 3 of keys do not divide by cp = 2"):
            run("ulysses", 6, 3)
        with pytest.raises(ValueError, match="this one is a Tensor"):
            run("ring", mask=mask.dense())
        with pytest.raises(ValueError, match="The mask is of 4 queries and 4 keys, and this rank has 3 and 3"):
            run("gather", tokens=3)
        with pytest.raises(ValueError, match='inner="blocks" must know where documents lie'):
            context.context_kernel("gather", world_group(), inner="blocks")
        with pytest.raises(ValueError, match='inner is "sdpa", but method="ring"'):
            context.context_kernel("ring", world_group(), inner="sdpa")
        with pytest.raises(ValueError, match="method is 'rings'"):
            context.context_kernel("rings", world_group())  # type: ignore[arg-type]
    out = run("ring")
    (grad,) = torch.autograd.grad(out.sum(), _leaf(out), create_graph=True)
    with pytest.raises(NotImplementedError, match='method="ring" has first derivatives only'):
        grad.sum().backward()


def _leaf(out: Tensor) -> Tensor:
    node: Any = out.grad_fn
    while not hasattr(node, "variable"):
        node = next(parent for parent, _ in node.next_functions if parent is not None)
    return node.variable


def test_what_cannot_be_done_is_said(ranks: Ranks) -> None:
    ranks(2)(refusals)


def shares(order: Callable[..., Any] | Any, ranks: int, **more: Any) -> list[dict[str, Tensor]]:
    batch = batch_of("llama_tied")
    return [context.shard_batch(batch, rank, ranks, order=order, **more) for rank in range(ranks)]


@pytest.mark.parametrize("order", ["mask", "head_tail", None])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shares_are_the_batch_in_one_order(order: Any, ranks: int) -> None:
    batch, parts = batch_of("llama_tied"), shares(order, ranks, config=config_of("llama_tied"))
    joined = {name: torch.cat([part[name] for part in parts], 1) for name in batch}
    assert all(tensor.shape[1] == LENGTH // ranks for part in parts for tensor in part.values())
    rows = [sorted(zip(*(t[row].tolist() for t in joined.values()), strict=True)) for row in range(4)]
    assert rows == [sorted(zip(*(t[row].tolist() for t in batch.values()), strict=True)) for row in range(4)]


def test_the_masks_own_order_loads_ranks_evenly() -> None:
    """Documents of one token before one of many: the two ends of a row are not a fair pair."""
    segments = torch.cat((torch.arange(1, 17), torch.full((16,), 17)))[None]
    positions = cases.positions_of(segments)
    batch = {"tokens": segments, "positions": positions, "segment_ids": segments, "labels": segments}
    config = config_of("llama_tied")
    loads = {}
    for order in ("mask", "head_tail"):
        parts = [context.shard_batch(batch, rank, 2, order=order, config=config) for rank in range(2)]  # type: ignore[arg-type]
        loads[order] = [int((part["positions"] + 1).sum()) for part in parts]
    assert max(loads["mask"]) / sum(loads["mask"]) < 0.55 < max(loads["head_tail"]) / sum(loads["head_tail"])


def test_batches_that_do_not_divide_are_refused() -> None:
    batch = batch_of("llama_tied")
    with pytest.raises(ValueError, match="Rows of 32 tokens do not divide by cp = 3: pad them"):
        context.shard_batch(batch, 0, 3)
    with pytest.raises(ValueError, match="rank is 2 of 2"):
        context.shard_batch(batch, 2, 2)
    with pytest.raises(ValueError, match=r"weights is \[5\]; a batch of rows of 32 tokens holds \[B, 32\]"):
        context.shard_batch({**batch, "weights": torch.ones(5)}, 0, 2)
    of_rows = torch.arange(4)
    assert context.shard_batch({**batch, "weights": of_rows}, 1, 2)["weights"] is of_rows
    with pytest.raises(ValueError, match="order is 'tail'"):
        context.shard_batch(batch, 0, 2, order="tail", config=config_of("llama_tied"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass config= too"):
        context.shard_batch(batch, 0, 2, order="mask")


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_other_orders_of_layers_that_read_tokens_in_order_are_refused(name: str) -> None:
    batch, config = batch_of(name), config_of(name)
    for order in ("mask", "head_tail", torch.arange(LENGTH)):
        with pytest.raises(ValueError, match=r'read tokens in their order, .* leave order at "auto", or None'):
            context.shard_batch(batch, 0, 2, order=order, config=config)  # type: ignore[arg-type]
    parts = [context.shard_batch(batch, rank, 2, order="auto", config=config)["tokens"] for rank in range(2)]
    assert torch.equal(torch.cat(parts, 1), batch["tokens"])
