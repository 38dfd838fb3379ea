"""Tensor and sequence parallelism: every leaf's gradient is that of one process, and broken reductions show."""

import dataclasses
import functools
import zlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.models.common.carried import shares_rows
from fnmodels.models.common.family import field_of, parsed, traits_of
from fnmodels.models.common.spec import weight
from fnmodels.ops.attention.select import attention
from fnmodels.run_params import RunParams
from params import Rules, plan
from params.axes import SHIFTED
from tests.support.cases import (
    Case,
    attention_of,
    cases,
    causal,
    generic_params,
    is_ordered,
    positions_of,
    richest,
    segments,
    tokens_of,
)
from tests.support.naming import fewest
from tests.support.one_process import by_one_rank, even, weights_of
from tests.support.ranks_pool import Ranks, devices
from train import mtp_loss, next_token_loss
from train.comm import collectives
from train.losses import look_ahead
from train.parallel import Mesh
from train.parallel.tensor import api
from train.parallel.tensor.api import TensorParallel, tensor_axes, tensor_parallel
from train.parallel.tensor.cache import CacheShards, cache_shards
from train.parallel.tensor.leaf_roles import path_in_layer, sharded_dims
from train.remat import layer_fn
from train.run_options import Balance, Blocks, RunOptions

# Tied embedding, biases and normed heads; latents, a shared expert, a selection bias; sinks and biases everywhere.
LLAMA, DEEPSEEK, GPT_OSS = NAMES = ("qwen3_bias_sliding", "deepseek_v3", "gpt_oss")
LIMIT = 1e-5
MODES = pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp_sp"])


def variant(name: str) -> Any:
    """Each of `NAMES` shows what it can."""
    changes = {LLAMA: {"tie_word_embeddings": True}, DEEPSEEK: {"attention_bias": True}}.get(name, {})
    return dataclasses.replace(even(name), **changes)


def batch_of(config: Any) -> dict[str, Tensor]:
    """Packed rows with padding on both sides, and labels that do not count here and there."""
    segment_ids = segments((5, 4, -3), (12,), (-2, 7, 3))
    labels = tokens_of(config, *segment_ids.shape, seed=1)
    labels[(segment_ids == 0) | (torch.rand(labels.shape, generator=torch.Generator().manual_seed(2)) < 0.3)] = -100
    tokens = tokens_of(config, *segment_ids.shape)
    return {"tokens": tokens, "positions": positions_of(segment_ids), "segment_ids": segment_ids, "labels": labels}


def distributed(config: Any, *, sequence: bool, axes: dict[str, str] | None = None) -> tuple[TensorParallel, Any, Any]:
    """(what wraps the model, the plan, the params as DTensors that need gradients), over all ranks."""
    mesh = devices(Mesh(tp=dist.get_world_size()))
    rules = Rules(tensor_axes(config) if axes is None else axes)
    placements = plan(fnmodels.family_of(config).spec(config), rules, mesh)

    def shared(leaf: Tensor, sharding: Any) -> Tensor:
        made: Tensor = sharding.distribute(leaf[sharding.local_box()].clone()).requires_grad_()
        return made

    params = tree.map(shared, weights_of(config), placements)
    return tensor_parallel(config, placements, sequence=sequence), placements, params


def over(tensor: TensorParallel, function: Callable[..., Any]) -> Callable[..., Any]:
    """function(params, ...) on this rank's shards; the result also accepts a `layer_fn` (remat)."""

    def run(params: Any, *args: Any, layer_fn: Any = None, **more: Any) -> Any:
        options = RunOptions(Blocks(outer=layer_fn, tensor=tensor.layer_fn))
        return function(RunParams(tensor.outside(params), options), *args, **more)

    return run


def loss_of(config: Any, params: Any, **options: Any) -> Tensor:
    """With all that a loss can have beside the cross entropy."""
    terms: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-2, "kernel": "math", "length": 24}
    if traits_of(fnmodels.family_of(config)).routed:
        terms["balance"] = Balance(sequence=0.1, batch=0.2, z=0.05)
    total: Tensor = next_token_loss(params, batch_of(config), config=config, **terms | options)[0]
    return total


def gradients(loss: Tensor, params: Any) -> dict[str, Any]:
    """{path: gradient} of the trainable parameters; the others have these names."""
    frozen = ("selection_bias", "xielu_beta", "xielu_eps", "tid2eid", "token_map")
    parts = (".indexer.", ".attention.global.")
    leaves = tree.flatten(params).items()
    flat = {p: leaf for p, leaf in leaves if not p.endswith(frozen) and not any(part in p for part in parts)}
    return dict(zip(flat, torch.autograd.grad(loss, list(flat.values())), strict=True))


@functools.cache
def expected(config: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of one process."""
    return by_one_rank(f"tensor-{zlib.crc32(repr(config).encode())}", lambda: _expected(config))


def _expected(config: Any) -> tuple[Tensor, dict[str, Tensor]]:
    params = tree.map(lambda p: p.clone().requires_grad_(), weights_of(config))
    loss = loss_of(config, params, chunk=None)
    return loss.detach(), gradients(loss, params)


def differences(
    config: Any, sequence: bool, remat: str = "none", axes: dict[str, str] | None = None, **options: Any
) -> dict[str, float]:
    """{leaf: difference of its gradient, relative to its largest number}, and that of the loss.

    A gradient below a tenth of the largest of all is relative to that tenth: where attention is nearly uniform, those
    of queries and keys are small differences of large terms, and have their rounding.
    """
    tensor, placements, params = distributed(config, sequence=sequence, axes=axes)
    loss = over(tensor, functools.partial(loss_of, config))(params, layer_fn=layer_fn(remat, "none"), **options)
    whole_loss, whole = expected(config)
    sizes = {path: float(grad.abs().max()) for path, grad in whole.items()}
    largest = max(sizes.values())
    off = {"loss": float((loss - whole_loss).abs() / whole_loss)}
    spec = tree.flatten(fnmodels.family_of(config).spec(config))
    for path, grad in gradients(loss, params).items():
        sharding = tree.flatten(placements)[path]
        assert grad.placements == sharding.placements, path
        if path in spec and not spec[path].trainable:  # over shards of the sequence each has its own part
            continue
        difference = (grad.to_local() - whole[path][sharding.local_box()]).abs().max()
        off[path] = float(difference) / max(sizes[path], largest / 10)
    return off


def compare(name: str, sequence: bool, remat: str = "none", options: Any = None) -> dict[str, float]:
    return differences(variant(name), sequence, remat, **options or {})


def assert_equal(found: list[dict[str, float]]) -> None:
    for off in found:
        assert max(off.values()) < LIMIT, max(off.items(), key=lambda item: item[1])


@MODES
@pytest.mark.parametrize("name", NAMES)
def test_with_fused_kernels_recomputation_and_all_logits_at_once(ranks: Ranks, name: str, sequence: bool) -> None:
    assert_equal(ranks(2)(compare, name, sequence, "full", {"chunk": None, "kernel": "auto"}))


def compare_axes(name: str, axes: dict[str, str]) -> dict[str, float]:
    """Of the variant as it is."""
    return differences(next(case.config for case in cases() if case.name == name), False, axes=axes)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("llama_head_dim", ("mlp",)),  # 3 heads, 61 words
        ("gpt_oss", ("heads", "kv_heads")),
        ("deepseek_v3", ("mlp",)),
        ("gpt_oss", ("expert_mlp",)),
    ],
)
def test_what_the_rules_leave_out_is_computed_by_all(ranks: Ranks, name: str, axes: tuple[str, ...]) -> None:
    assert_equal(ranks(2)(compare_axes, name, dict.fromkeys(axes, "tp")))


TYPES = richest(lambda case: case.config.model_type)


def shareable(case: Case) -> bool:
    """Whether two ranks can share the heads of its recurrent layers; of other layers they must."""
    if not is_ordered(case):
        return True
    config = variant(case.name)
    spec = fnmodels.family_of(config).spec(config)
    try:
        sharded_dims(tree.flatten(spec), tree.flatten(plan(spec, Rules(tensor_axes(config)), {"tp": 2})))
    except ValueError:
        return False
    return True


def test_recurrent_layers_are_shared() -> None:
    assert {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2"} <= {
        case.config.model_type for case in TYPES if is_ordered(case) and shareable(case)
    }


def few_types() -> list[Case]:
    """Of each family, few model types with all kinds of layers and all weights, by path and axes, of its types.

    And those of one layer, which has no stages: tests of pipelines have the others.
    """
    families: dict[Any, dict[Case, set[str]]] = {}
    for case in TYPES:
        family, config = fnmodels.family_of(case.config), variant(case.name)
        leaves = tree.flatten(family.spec(config)).items()
        parts = {f"{path_in_layer(path) or path} {leaf.axes}" for path, leaf in leaves} | {*family.kinds(config)}
        families.setdefault((case.family, causal(case)), {})[case] = parts
    few = {case for parts in families.values() for case in fewest(parts)}
    return [case for case in TYPES if case in few or case.config.num_hidden_layers == 1]


def modes() -> list[tuple[Case, bool]]:
    """Each of `few_types` with or without sequence=True, in turn within its family; both for each `attention_of`.

    A step of models whose layers run several times is compared in test_hybrids: here torch adds the gradients of their
    passes as DTensors, for which it searches placements for minutes.
    """
    few = [case for case in few_types() if shareable(case) and not field_of(case.config, "passes")]
    families, both = defaultdict[str, list[Case]](list), {case.name for case in richest(attention_of)}
    for case in few:
        families[case.family].append(case)
    return [
        (case, bool(i))
        for number, of_family in enumerate(families.values())
        for n, case in enumerate(of_family, number)
        for i in range(1 if reads_whole_rows(case) else 2)
        if case.name in both or reads_whole_rows(case) or i == n % 2
    ]


def reads_whole_rows(case: Case) -> bool:
    """Whether its layers read tensors of full rows, or the token before each one, which sequence=True refuses."""
    family = fnmodels.family_of(case.config)
    shifts = any(SHIFTED in leaf.axes for leaf in tree.leaves(family.spec(case.config)))
    return shifts or shares_rows(family) or traits_of(family).reads_ids


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("mpnet", "of a mpnet read tensors of full rows .* use sequence=False"),
        ("rwkv7", "of a rwkv7 read the token before each one, .* use sequence=False"),
    ],
)
def test_layers_that_read_whole_rows_raise(name: str, sentence: str) -> None:
    config = variant(name)
    placements = plan(fnmodels.family_of(config).spec(config), Rules(tensor_axes(config)), {"tp": 2})
    with pytest.raises(ValueError, match=sentence):
        tensor_parallel(config, placements, sequence=True)


@pytest.mark.parametrize(("case", "sequence"), modes(), ids=str)
def test_every_family_runs_so(ranks: Ranks, case: Case, sequence: bool) -> None:
    assert_equal(ranks(2)(compare, case.name, sequence))


@MODES
def test_a_norm_of_heads_that_all_ranks_share(ranks: Ranks, sequence: bool) -> None:
    """One group of Mamba's heads: its keys are replicated, and its norm is over the heads of both ranks."""
    assert_equal(ranks(2)(compare, "mamba2_bias_untied", sequence))


def logits_and_taps(name: str, sequence: bool) -> list[float]:
    config = variant(name)
    tensor, _, params = distributed(config, sequence=sequence)
    batch = batch_of(config)
    rows = {key: batch[key] for key in ("positions", "segment_ids")}
    given = fnmodels.prepare(config, batch["tokens"], **rows, length=24)
    taps = ("layers.*.attention", "layers.*.middle", "layers.*.mlp")
    if traits_of(fnmodels.family_of(config)).routed:
        taps += ("layers.*.counts", "layers.*.router_logits", "layers.*.expert_indices")
    edits = {name: lambda value, name: value * 1.1 for name in ("embed", "layers.0.attention", "layers.*.output")}
    run = functools.partial(fnmodels.forward, config=config, kernel="math", taps=taps, edits=edits)
    logits, tapped = run(tensor.outside(params), *given, layer_fn=tensor.layer_fn)
    whole_logits, whole = run(generic_params(config), *given)
    assert tapped.keys() == whole.keys()
    pairs = [(logits, whole_logits), *((tapped[key], whole[key]) for key in whole)]
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
    return [float((a - b).abs().max()) for a, b in pairs]


@MODES
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_taps_come_out_whole(ranks: Ranks, name: str, sequence: bool) -> None:
    """With edits of what all ranks have."""
    for found in ranks(2)(logits_and_taps, name, sequence):
        assert max(found) < 1e-4, found


def steps_on_a_cache(name: str, filled: bool = False) -> float:
    """filled: the first tokens are those of one process, whose cache is then sharded."""
    config = variant(name)
    tensor, _, params = distributed(config, sequence=False)
    tokens, weights = tokens_of(config, 2, 12), weights_of(config)
    whole = fnmodels.forward(weights, *fnmodels.prepare(config, tokens, length=24), config=config)
    cache, found = fnmodels.init_cache(config, 2, 12, length=24, dtype=whole.dtype), []
    first, *pieces = tokens.split([7, 1, 1, 3], dim=1)
    options: dict[str, Any] = {"config": config, "kernel": "math"}
    if filled:
        logits, cache = fnmodels.decode(weights, *fnmodels.prepare_step(config, first, cache), cache, **options)
    cache = tensor.cache(cache)
    options["layer_fn"] = tensor.layer_fn
    outside = tensor.outside(params)
    if not filled:
        logits, cache = fnmodels.decode(outside, *fnmodels.prepare_step(config, first, cache), cache, **options)
    found = [logits]
    for piece in pieces:
        step = fnmodels.prepare_step(config, piece, cache)
        logits, cache = fnmodels.decode_(outside, *step, cache, **options)
        found.append(logits)
    return float((torch.cat(found, dim=1) - whole).abs().max())


# One of every layout of states and tails: separate and stacked convolutions, key heads and groups less than heads.
STATES = ("qwen3_next", "olmo_hybrid", "kimi_linear", "mamba2", "falcon_h1", "nemotron_h_moe", "lfm2_bias_untied")


@pytest.mark.parametrize("filled", [False, True], ids=["empty", "filled"])
@pytest.mark.parametrize("name", [*NAMES, *STATES])
def test_each_rank_caches_its_heads(ranks: Ranks, name: str, filled: bool) -> None:
    for found in ranks(2)(steps_on_a_cache, name, filled):
        assert found < 1e-4


@pytest.mark.parametrize("name", ["qwen3_next", GPT_OSS])
def test_ranks_with_one_key_head_for_several_cache_it(ranks: Ranks, name: str) -> None:
    for found in ranks(4)(steps_on_a_cache, name, True):
        assert found < 1e-4


def steps_on_other_channels(name: str) -> float:
    """A rank has as many channels of tails as it should, but the first."""

    def wrong(*given: Any) -> CacheShards:
        made = cache_shards(*given)
        first = {layer: torch.arange(len(index)) for layer, index in made.channels.items()}
        return dataclasses.replace(made, channels=first)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "cache_shards", wrong)
        return steps_on_a_cache(name, True)


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "lfm2_bias_untied"])
def test_tails_of_other_channels_are_seen(ranks: Ranks, name: str) -> None:
    assert max(ranks(2)(steps_on_other_channels, name)) > 1e-2


def own_loss(name: str) -> float:
    """A loss that somebody makes of whole logits and hidden states: the largest difference of a gradient."""
    config = variant(name)
    tensor, placements, params = distributed(config, sequence=False)
    batch = batch_of(config)
    given = fnmodels.prepare(
        config, batch["tokens"], positions=batch["positions"], segment_ids=batch["segment_ids"], length=24
    )

    def loss(params: Any, **more: Any) -> Tensor:
        run = functools.partial(fnmodels.forward, config=config, kernel="math", taps=("hidden",), **more)
        logits, tapped = run(params, *given)
        total: Tensor = logits.cos().sum() + tapped["hidden"].sin().sum()
        return total

    found = gradients(loss(tensor.outside(params), layer_fn=tensor.layer_fn), params)
    leaves = tree.map(lambda p: p.clone().requires_grad_(), generic_params(config))
    whole, where = gradients(loss(leaves), leaves), tree.flatten(placements)
    return max(
        float((grad.to_local() - whole[path][where[path].local_box()]).abs().max() / whole[path].abs().max())
        for path, grad in found.items()
    )


@pytest.mark.parametrize("name", [*NAMES, "phi"])  # its head has a bias
def test_a_loss_of_ones_own_has_the_same_gradients(ranks: Ranks, name: str) -> None:
    assert max(ranks(2)(own_loss, name)) < LIMIT


def further_tokens(sequence: bool) -> float:
    """The same of a loss with heads that predict further tokens, whose blocks are wrapped as the others."""
    config = dataclasses.replace(variant(DEEPSEEK), num_nextn_predict_layers=2)
    tensor, placements, params = distributed(config, sequence=sequence)
    batch, whole = (
        look_ahead(batch_of(config), 2),
        tree.map(lambda p: p.clone().requires_grad_(), generic_params(config)),
    )
    loss = functools.partial(mtp_loss, batch=batch, config=config, length=24, kernel="math", balance=Balance(0.1))
    found, where = gradients(over(tensor, loss)(params)[0], params), tree.flatten(placements)
    return max(
        float((found[path].to_local() - grad[where[path].local_box()]).abs().max() / grad.abs().max())
        for path, grad in gradients(loss(whole)[0], whole).items()
    )


@MODES
def test_heads_for_further_tokens(ranks: Ranks, sequence: bool) -> None:
    assert max(ranks(2)(further_tokens, sequence)) < LIMIT


def curvature(name: str, sequence: bool, chunk: int | None) -> dict[str, float]:
    """Of torch.func's jvp of the gradient, forward over reverse: {leaf: relative difference}."""
    config = variant(name)
    tensor, placements, _ = distributed(config, sequence=sequence)
    point = tree.flatten(generic_params(config))
    seeds = {path: torch.Generator().manual_seed(n) for n, path in enumerate(point)}
    moves = {path: torch.randn(p.shape, generator=seeds[path]) for path, p in point.items()}
    where = tree.flatten(placements)

    def part(flat: dict[str, Tensor]) -> dict[str, Tensor]:
        return {path: value[where[path].local_box()].clone() for path, value in flat.items()}

    def product(loss: Callable[[Any], Tensor], point: dict[str, Tensor], moves: dict[str, Tensor]) -> Any:
        return torch.func.jvp(torch.func.grad(lambda flat: loss(tree.unflatten(flat))), (point,), (moves,))[1]

    loss = functools.partial(loss_of, config, chunk=chunk)
    found, whole = product(over(tensor, loss), part(point), part(moves)), product(loss, point, moves)
    return {
        path: float((found[path] - part(whole)[path]).abs().max() / whole[path].abs().max().clamp(min=1e-3))
        for path in point
    }


@pytest.mark.parametrize(
    ("name", "sequence", "chunk"), [(LLAMA, True, 7), (DEEPSEEK, False, None), (GPT_OSS, True, 40)]
)
def test_products_with_the_hessian(ranks: Ranks, name: str, sequence: bool, chunk: int | None) -> None:
    for off in ranks(2)(curvature, name, sequence, chunk):
        assert max(off.values()) < 10 * LIMIT, max(off.items(), key=lambda item: item[1])


def traffic(name: str, sequence: bool, rows: int) -> dict[str, list[int]]:
    """How many numbers each collective of one loss with gradients sends from here, and what attention sees."""
    config = variant(name)
    tensor, _, params = distributed(config, sequence=sequence)
    seen: dict[str, list[int]] = {"gather": [], "scatter": [], "sum": [], "heads": [], "columns": []}

    def watched(kind: str, function: Callable[..., Any], place: int) -> Callable[..., Any]:
        return lambda *args, **more: (seen[kind].append(args[place].numel()), function(*args, **more))[1]

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Any, **more: Any) -> Tensor:
        seen["heads"] += [*q.shape[1:3], k.shape[2]]
        return attention(q, k, v, mask, kernel="math", **more)

    def wrapped(block: Any) -> Any:
        inner = tensor.layer_fn(block)

        def run(layer: Any, x: Tensor, *args: Any, **more: Any) -> Any:
            x, aux = inner(layer, x, *args, **more)
            seen["columns"].append(x.shape[1])
            return x, aux

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_GATHER", watched("gather", collectives._GATHER, 1))
        patch.setattr(collectives, "_SCATTER", watched("scatter", collectives._SCATTER, 1))
        patch.setattr(dist, "all_reduce", watched("sum", dist.all_reduce, 0))
        loss = loss_of(config, tensor.outside(params), layer_fn=wrapped, kernel=kernel, chunk=rows, z_loss=0.0)
        gradients(loss, params)
    return seen


def test_what_is_sent_and_what_each_rank_computes(ranks: Ranks) -> None:
    config, size = variant(LLAMA), 36 * variant(LLAMA).hidden_size
    layers, chunk = config.num_hidden_layers, 12
    shared = 2 * config.head_dim * (1 + config.num_key_value_heads * (1 + config.hidden_size))
    for seen in ranks(4)(traffic, LLAMA, False, chunk):
        # the embedding, two sums for each layer and direction, and of the head's input
        assert seen["sum"].count(size) == 4 * layers + 2
        # of each layer one message more, for the leaves that all hold: norms of heads, and here keys and values
        assert seen["sum"].count(shared) == layers and len(seen["sum"]) == 5 * layers + 3
        # of each token three numbers, and never the logits
        assert seen["gather"] == [3 * chunk] * (36 // chunk) and not seen["scatter"]
        assert seen["heads"] == [12, 1, 1] * layers  # the KV heads are fewer than the ranks
        assert seen["columns"] == [12] * layers
    for seen in ranks(4)(traffic, LLAMA, True, chunk):
        assert seen["columns"] == [3] * layers
        assert seen["sum"].count(size) == 1  # the embedding, which is cut after it
        assert seen["scatter"] == [size] * (4 * layers + 1)
        assert seen["heads"] == [12, 1, 1] * layers


@pytest.mark.parametrize(
    ("name", "axes", "sequence", "words"),
    [
        (LLAMA, {"embed": "tp"}, False, r"embed_tokens: tensor parallelism shards heads, .* the plan has embed"),
        (LLAMA, {"kv_heads": "tp"}, False, "The rules shard kv_heads over 'tp' and not heads"),
        (LLAMA, {"heads": "tp", "kv_heads": "tp", "mlp": "tp"}, True, "sequence=True needs 'vocab' sharded"),
        (GPT_OSS, {"expert": "tp"}, False, "shards heads, .* but the plan has expert"),
        ("stablelm_norms", {"heads": "tp"}, False, "q_norms.0: lists with a leaf for each head are not sharded"),
        (LLAMA, {"mlp": "fsdp"}, False, "has no dimension 'tp'; it has fsdp"),
        (LLAMA, {"mlp": "tp"}, False, "made from sizes alone"),
    ],
)
def test_unsupported_placements_raise(name: str, axes: dict[str, str], sequence: bool, words: str) -> None:
    config = variant(name)
    sizes = {"fsdp": 2} if "fsdp" in axes.values() else {"tp": 2}
    placements = plan(fnmodels.family_of(config).spec(config), Rules(axes), sizes)
    with pytest.raises(ValueError, match=words):
        tensor_parallel(config, placements, sequence=sequence)


def test_groups_of_heads_that_would_be_split_raise() -> None:
    config = next(case.config for case in cases() if case.name == "mamba2")
    placements = plan(fnmodels.family_of(config).spec(config), Rules({"linear_heads": "tp"}), {"tp": 4})
    with pytest.raises(ValueError, match=r"attention\.norm normalizes groups of heads, .* 1 or a multiple of 4"):
        tensor_parallel(config, placements)


def test_kv_heads_that_would_be_split_raise() -> None:
    config = dataclasses.replace(variant(LLAMA), num_attention_heads=6, num_key_value_heads=3, head_dim=8)
    placements = plan(fnmodels.family_of(config).spec(config), Rules({"heads": "tp"}), {"tp": 2})
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.k_proj: of 3 KV heads each of 2 processes would need"):
        tensor_parallel(config, placements)


def test_an_unknown_axis_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    config = variant(LLAMA)
    family = fnmodels.family_of(config)
    spec = family.spec(config)
    spec["layers"][0]["attention"]["gate"] = weight((4, 4), ("gates", "head_dim"))
    monkeypatch.setattr(family, "spec", lambda _: spec)
    with pytest.raises(
        ValueError, match=r"layers\.0\.attention\.gate has the axis 'gates', and tensor parallelism does"
    ):
        tensor_parallel(config, plan(spec, Rules({"mlp": "tp"}), {"tp": 2}))


def refusals() -> None:
    config = variant(LLAMA)
    tensor, _, params = distributed(config, sequence=True)
    batch = {key: value[:, :9] for key, value in batch_of(config).items()}
    with pytest.raises(ValueError, match="sequence=True shards rows of 9 tokens among 2 processes"):
        next_token_loss(tensor.outside(params), batch, config=config, layer_fn=tensor.layer_fn)
    with pytest.raises(TypeError, match="apply other wrappers after it"):
        tensor.layer_fn(lambda *args: args)
    plain, _, params = distributed(config, sequence=False)
    batch = batch_of(config) | {"tokens": torch.full((3, 12), 64)}
    with pytest.raises(ValueError, match="token ids go from 64 to 64, but the model knows those from 0 to 63"):
        next_token_loss(plain.outside(params), batch, config=config, layer_fn=plain.layer_fn)
    wrong = batch_of(config) | {"labels": torch.full((3, 12), 64)}
    with pytest.raises(ValueError, match=r"labels\[0, 0\] is 64, but the vocabulary has 64 entries, 0 to 63"):
        next_token_loss(plain.outside(params), wrong, config=config, layer_fn=plain.layer_fn)
    part = plain.outside(params)["embed_tokens"].part  # of labels that nothing could check, as in compiled code
    at = part.totals(torch.zeros(1, 4, part.rows), torch.tensor([[0, 63, 64, -5]]))[1]
    assert at.isnan().tolist() == [[False, False, True, True]]
    params["layers"][0]["attention"]["gate"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"the leaf 'attention\.gate', which is not in the plan"):
        next_token_loss(plain.outside(params), batch_of(config), config=config, layer_fn=plain.layer_fn)


def low_precision() -> None:
    config = variant("olmoe")
    tensor, _, params = distributed(config, sequence=False)
    low = tree.map(lambda p: p.detach().to_local().bfloat16(), params)
    with pytest.raises(NotImplementedError, match="This norm over all heads or neurons is taken in low precision"):
        next_token_loss(tensor.outside(low), batch_of(config), config=config, layer_fn=tensor.layer_fn)


def test_batches_and_params_that_do_not_fit_raise(ranks: Ranks) -> None:
    ranks(2)(refusals)
    ranks(2)(low_precision)


def replay(name: str, sequence: bool) -> float:
    """With experts that the batch chooses: the largest difference of a gradient."""
    config = variant(name)
    tensor, placements, params = distributed(config, sequence=sequence)
    batch, where = batch_of(config), tree.flatten(placements)
    layers = sum(kind.routed for kind in parsed(fnmodels.family_of(config).kinds(config)))
    scores = torch.rand(3, 12, layers, 6, generator=torch.Generator().manual_seed(3))
    batch["routing"] = scores.topk(config.num_experts_per_tok, dim=-1).indices
    how: dict[str, Any] = {"config": config, "length": 24, "kernel": "math"}
    found = gradients(over(tensor, next_token_loss)(params, batch, **how)[0], params)
    leaves = tree.map(lambda p: p.clone().requires_grad_(), generic_params(config))
    return max(
        float((found[path].to_local() - whole[where[path].local_box()]).abs().max() / whole.abs().max())
        for path, whole in gradients(next_token_loss(leaves, batch, **how)[0], leaves).items()
    )


@MODES
def test_replayed_routing_is_cut_as_the_tokens_are(ranks: Ranks, sequence: bool) -> None:
    assert max(ranks(2)(replay, GPT_OSS, sequence)) < LIMIT
