"""Mixtures of experts in every MoE family: padding, dispatch, implementations, dtypes, counts, balance and replay.

The functions by themselves are tested in tests/fnmodels/ops/test_moe.py and tests/train/losses/test_moe_balance.py.
"""

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fnmodels
import params as P
import train
from fnmodels import tree
from fnmodels.models.common import context
from fnmodels.models.common.family import field_of, traits_of
from fnmodels.models.common.spec import moe_leaves
from fnmodels.ops.moe.dispatch import combine, dispatch, virtual_padding
from fnmodels.ops.moe.experts import loop_experts
from fnmodels.ops.moe.router import RouterDtypes
from tests.support.cases import (
    Batch,
    Case,
    batch_of,
    cases,
    generic_params,
    gradients,
    is_ordered,
    is_routed,
    layer_inputs_of,
    layers_run,
    off,
    routing_of,
    segments,
    short,
    sparse_layers,
    stored_sparse_layers,
    structures,
    summed_loss,
    trainable,
    variants_of,
)

ROUTED = [case for case in cases() if is_routed(case.config)]
STRUCTURES = [case for case in structures() if case in ROUTED]
every_structure = pytest.mark.parametrize("case", STRUCTURES, ids=str)


def mixture(case: Case) -> tuple[str, frozenset[str]]:
    """The family, and the names of the parameters of its router and experts, which read nothing else of a layer."""
    layers, stored = fnmodels.family_of(case.config).spec(case.config)["layers"], stored_sparse_layers(case.config)
    return case.family, frozenset(path for i in stored for path in tree.flatten(layers[i]["mlp"]))


MIXTURES = [short(case) for case in {mixture(case): case for case in STRUCTURES}.values()]  # for slow tests
every_mixture = pytest.mark.parametrize("case", MIXTURES, ids=str)
# One of each set of names, of any family, where what is tried is common: dispatch, counts, replay in losses.
NAMED_ALIKE = {mixture(case)[1]: case for case in reversed(MIXTURES)}.values()
every_set_of_names = pytest.mark.parametrize("case", NAMED_ALIKE, ids=str)
MIXED = segments((-3, 5, 4), (12,), (7, 1, -4), (-12,))


@functools.cache
def fits(case: Case, experts: str) -> bool:
    """Whether an implementation supports the model's widths; `test_widths_that_grouped_refuses` runs the others."""
    layers = fnmodels.family_of(case.config).spec(case.config)["layers"]
    widths = {leaf.shape[-1] for path, leaf in tree.flatten(layers).items() if ".mlp.experts." in path}
    return experts != "grouped" or all(width % 4 == 0 for width in widths)  # rows of 16 bytes in fp32


def with_paths(cases: list[Case]) -> Any:
    """The mark that runs a test with every implementation on the first case of each `mixture`, with one on others."""
    pairs, seen = [], set()
    for index, case in enumerate(cases):
        able = [path for path in ("loop", "grouped", "dense") if path != "grouped" or fits(case, path)]
        pairs += [(case, path) for path in (able[index % len(able) :][:1] if mixture(case) in seen else able)]
        seen.add(mixture(case))
    return pytest.mark.parametrize(("case", "experts"), pairs, ids=[f"{case}-{path}" for case, path in pairs])


@pytest.mark.parametrize("case", [case for case in ROUTED if not fits(case, "grouped")], ids=str)
def test_widths_that_grouped_refuses(case: Case) -> None:
    with pytest.raises(ValueError, match='experts="loop" takes any width'):
        batch_of(case.config, segments((2,))).forward(generic_params(case.config), experts="grouped")


def test_there_are_families() -> None:
    assert {"mixtral", "qwen_moe"} <= {case.family for case in ROUTED}


def relative(a: Any, b: Any) -> float:
    """The largest |a - b| / |b| over the leaves; 0 for a leaf where both are rounding noise."""
    left, right = tree.leaves(a), tree.leaves(b)
    rounding = 1e-7 * max(float(y.norm()) for y in right)  # a key bias without position has no more
    pairs = [(x, y) for x, y in zip(left, right, strict=True) if max(float(x.norm()), float(y.norm())) > rounding]
    return max((float((x - y).norm()) / float(y.norm().clamp(min=rounding)) for x, y in pairs), default=0.0)


def results(case: Case, batch: Batch, params: Any, **options: Any) -> tuple[Tensor, Tensor, Any, list[list[int]]]:
    """(logits at real tokens, loss, gradients, token counts of each MoE layer)."""
    leaves = trainable(params)
    logits, tapped = batch.forward(leaves, taps=("layers.*.counts",), **options)
    loss = summed_loss(logits, batch.labels)
    return logits[batch.valid].detach(), loss.detach(), gradients(loss, leaves), [c.tolist() for c in tapped.values()]


def chosen(case: Case) -> int:
    """k, the number of experts per token."""
    batch = batch_of(case.config, segments((2,)))
    return routing_of(generic_params(case.config), batch.prepared(), case.config, kernel="math").shape[-1]


@with_paths(MIXTURES)
def test_padding_reaches_no_expert(case: Case, experts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """M1: counts include real tokens only; NaN at padding changes no bit of logits, loss, counts or gradients."""
    params, batch = generic_params(case.config), batch_of(case.config, MIXED)
    want = results(case, batch, params, experts=experts)
    assert len(want[3]) == len(sparse_layers(case.config))
    assert all(sum(counts) == int(batch.valid.sum()) * chosen(case) for counts in want[3])
    moe = context.moe

    def poisoned(layer: Any, x: Any, route: Any, *, valid: Tensor, **options: Any) -> Any:
        x = tree.map(lambda t: torch.where(valid[..., None], t, torch.nan), x)
        y, aux = moe(layer, x, route, valid=valid, **options)
        return torch.where(valid[..., None], y, 0), aux

    monkeypatch.setattr(context, "moe", poisoned)
    got = results(case, batch, params, experts=experts)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]) and got[3] == want[3]
    assert off(got[2], want[2]) == 0


@every_mixture
def test_products_are_of_real_tokens_only(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """M1: the expert matmuls have one row per choice of a real token."""
    params, batch = generic_params(case.config), batch_of(case.config, MIXED)
    want = int(batch.valid.sum()) * chosen(case)
    identities = getattr(case.config, "zero_expert_num", 0)  # which have no products
    rows: list[int] = []

    def counted(experts: Any, *given: Any, act: Any, **how: Any) -> Tensor:
        before = len(rows)
        y = loop_experts(experts, *given, act=lambda *given: rows.append(len(given[0])) or act(*given), **how)
        assert sum(rows[before:]) == want if not identities else 0 < sum(rows[before:]) < want
        return y

    batch.forward(params, experts=counted)
    assert rows
    grouped, ends = F.grouped_mm, []
    monkeypatch.setattr(F, "grouped_mm", lambda x, w, *, offs: ends.append(int(offs[-1])) or grouped(x, w, offs=offs))
    if fits(case, "grouped"):
        ends.clear()
        batch.forward(params, experts="grouped")
        assert set(ends) == {want} if not identities else ends and max(ends) < want


@with_paths(MIXTURES)
def test_rows_of_padding_alone(case: Case, experts: str) -> None:
    """M1, P4: no counts, no gradient, no NaN."""
    batch = batch_of(case.config, segments((-4,), (-4,)))
    _, loss, grads, counts = results(case, batch, generic_params(case.config), experts=experts)
    assert loss == 0 and not any(g.any() for g in tree.leaves(grads))
    assert not any(any(c) for c in counts)


def naive_experts(
    experts: Any, x: Tensor, weights: Tensor, indices: Tensor, valid: Tensor, *, act: Any, input_weighted: bool = False
) -> Tensor:
    """The reference: a loop over experts and the tokens routed to each, without sorting."""
    y = torch.zeros_like(x)
    for e in range(len(experts["down_proj"])):
        part = {name: leaf[e] for name, leaf in experts.items()}
        tokens, slots = ((indices == e) & valid[:, None]).nonzero(as_tuple=True)
        share = weights[tokens, slots, None]
        given = x[tokens] * share if input_weighted else x[tokens]
        names = [name for name in ("gate", "up") if f"{name}_proj" in part]
        inner = act(*(F.linear(given, part[f"{name}_proj"], part.get(f"{name}_bias")) for name in names))
        out = F.linear(inner, part["down_proj"], part.get("down_bias"))
        y = y.index_add(0, tokens, (out if input_weighted else out * share).to(x.dtype))
    return y


def bound_of(case: Case) -> float:
    """Of differences of gradients in fp32; those of weights of streams are sums of terms that cancel.

    Those of layers that run several times are sums too.
    """
    return 1e-4 if field_of(case.config, "residual_streams") or field_of(case.config, "passes") else 1e-5


@with_paths(MIXTURES)
def test_every_path_is_the_naive_loop(case: Case, experts: str) -> None:
    """M3: logits and all gradients (experts, router, biases, shared experts) agree to a relative 1e-5."""
    params, batch = generic_params(case.config), batch_of(case.config, MIXED)
    want = results(case, batch, params, experts=naive_experts)
    got = results(case, batch, params, experts=experts)
    assert got[3] == want[3] and off(got[0], want[0]) < 1e-5
    assert relative(got[2], want[2]) < bound_of(case)
    learned = {path: g for path, g in tree.flatten(want[2]).items() if ".mlp." in path}
    assert all(g.any() for path, g in learned.items() if not path.endswith(("selection_bias", "tid2eid", "token_map")))


@every_set_of_names
def test_dispatch_in_ranks_that_do_not_divide_the_tokens(case: Case) -> None:
    """M2: dispatch and combine are inverse for the model's routing, also if each rank sends its own tokens."""
    params, batch = generic_params(case.config), batch_of(case.config, MIXED)
    want, seen = results(case, batch, params, experts="loop"), []

    def parallel(
        experts: Any, x: Tensor, weights: Tensor, indices: Tensor, valid: Tensor, *, ranks: int, **how: Any
    ) -> Tensor:
        rows, sent = dispatch(x, indices, valid, len(experts["down_proj"]))
        back = combine(rows, sent, torch.full_like(weights, 1 / indices.shape[1]))
        seen.append(off(back[valid], x[valid]) < 1e-6 and not back[~valid].any())
        pad, ranges = virtual_padding(len(x), ranks)
        assert (len(x) + pad) % ranks == 0
        parts = [[t[lo:hi] for t in (x, weights, indices, valid)] for lo, hi in ranges]
        return torch.cat([loop_experts(experts, *part, **how) for part in parts])

    for ranks in (5, 50):  # fewer than the 48 tokens, and more
        got = results(case, batch, params, experts=functools.partial(parallel, ranks=ranks))
        assert seen and all(seen)
        assert off(got[0], want[0]) < 1e-5 and relative(got[2], want[2]) < bound_of(case)
        assert got[3] == want[3]


@every_structure
def test_nothing_is_cast_before_the_choice(case: Case) -> None:
    """M4: router logits that bf16 would round together are chosen from as in fp64; weights have the declared dtype."""
    flat = tree.flatten(generic_params(case.config))
    params = tree.unflatten({p: t * (not p.endswith("selection_bias")) for p, t in flat.items()})
    moe, routes = context.moe, []

    def watched(layer: Any, x: Tensor, route: Any, **options: Any) -> Any:
        routes.append((route, len(layer["router"])))
        return moe(layer, x, route, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "moe", watched)
        batch_of(case.config, segments((4,))).forward(tree.map(lambda p: p.to(torch.bfloat16), params))
    assert len(routes) == len(sparse_layers(case.config))
    generator = torch.Generator().manual_seed(0)
    for route, experts in routes:
        if route.keywords.get("hashed") is not None:
            continue
        order = torch.stack([torch.randperm(experts, generator=generator) for _ in range(50)])
        close = 1.0 + 1.6e-4 * 1.4**order  # all sums of two differ, by which groups are chosen
        assert (close.bfloat16() == 1).any(-1).all()
        indices = route(close)[1]
        assert torch.equal(indices, route(close.double())[1])
        assert len({tuple(sorted(row)) for row in indices.tolist()}) > 1, "all experts look alike"


def declared_routing(
    layer: Any, x: Tensor, route: Any, indices: Tensor, dtypes: RouterDtypes
) -> tuple[Tensor, Tensor, Tensor]:
    """The reference: (router weight, logits, weights of the chosen experts) in the declared dtypes."""
    kinds, how = {"model": x.dtype, "wide": torch.promote_types(x.dtype, torch.float32)}, route.keywords
    wide = [layer[name].to(kinds[dtypes.projection]) for name in ("router", "router_bias") if name in layer]
    logits = F.linear(x.to(kinds[dtypes.projection]), *wide)
    name, scores = route.func.__name__, logits.to(kinds[dtypes.score])
    scores = (scores / cap).tanh() * cap if (cap := how.get("softcap", 0.0)) else scores
    if name == "sqrt_softplus_top_k":
        weights = F.softplus(scores).sqrt().gather(-1, indices)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * how["scale"]
        return layer["router"].to(kinds[dtypes.param]), logits, weights.to(kinds[dtypes.output])
    scores = scores if name == "top_k_softmax" else scores.softmax(-1) if "softmax" in name else scores.sigmoid()
    if name == "sparse_mixer":
        weights = route(logits.to(kinds[dtypes.score]), indices)[0].to(kinds[dtypes.output])
        return layer["router"].to(kinds[dtypes.param]), logits, weights
    weights = scores.gather(-1, indices)
    weights = weights.softmax(-1) if name == "top_k_softmax" else weights
    if how.get("renormalize", False):
        total = weights.sum(-1, keepdim=True) + (how.get("norm_eps", 1e-20) if name.endswith("sigmoid_top_k") else 0)
        weights = weights / total.clamp(min=how.get("norm_min", 0.0))
    scale = how.get("scale", 1.0)
    weights = (weights * (scale[indices] if isinstance(scale, Tensor) else scale)).to(kinds[dtypes.output])
    return layer["router"].to(kinds[dtypes.param]), logits, weights


@every_structure
def test_routers_keep_to_the_declared_dtypes(case: Case) -> None:
    """M4: in a bf16 model the router weight, logits and weights of the chosen experts agree bit for bit."""
    family, seen = fnmodels.family_of(case.config), []
    declared = traits_of(family).router
    published = getattr(variants_of(case.family), "ROUTER", declared)
    assert published == declared, f"ROUTER in tests/variants/{case.family}.py is {published}."
    moe = context.moe

    def watched(layer: Any, x: Any, route: Any, **options: Any) -> Any:
        y, aux = moe(layer, x, route, **options)
        read = x[0] if isinstance(x, tuple) else x
        want = declared_routing(layer, read, route, aux["expert_indices"], declared)
        seen.append(((layer["router"], aux["router_logits"], aux["expert_weights"]), want))
        return y, aux

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "moe", watched)
        batch_of(case.config, segments((4,), (4,))).forward(generic_params(case.config, torch.bfloat16))
    assert len(seen) == len(sparse_layers(case.config))
    for got, want in seen:
        for name, x, y in zip(("param", "logits", "weights"), got, want, strict=True):
            assert x.dtype == y.dtype and torch.equal(x, y), f"{name}: {x.dtype}, declared {y.dtype}"


def test_a_router_may_stay_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """`RouterDtypes(param="wide")` and `moe_leaves(wide_router=True)` need each other; one alone is detected."""
    case = next(case for case in ROUTED if case.name == "glm4_moe")
    family = fnmodels.family_of(case.config)
    declared = dataclasses.replace(family.ROUTER, param="wide")
    monkeypatch.setattr(variants_of(case.family), "ROUTER", declared)
    monkeypatch.setattr(family, "ROUTER", declared)
    monkeypatch.setattr(family, "TRAITS", dataclasses.replace(family.TRAITS, router=declared))
    try:
        with pytest.raises(AssertionError, match=r"^param: torch\.bfloat16, declared torch\.float32"):
            test_routers_keep_to_the_declared_dtypes(case)
        monkeypatch.setattr(
            "fnmodels.models.common.moe.moe_leaves",
            lambda *sizes, **flags: moe_leaves(*sizes, **flags | {"wide_router": True}),
        )
        generic_params.cache_clear()
        test_routers_keep_to_the_declared_dtypes(case)
        assert P.init(case.config, 0, dtype=torch.bfloat16)["layers"][-1]["mlp"]["router"].dtype == torch.float32
    finally:
        generic_params.cache_clear()


@every_set_of_names
def test_counts_are_of_the_batch(case: Case) -> None:
    """M5: counts, and the selection bias if any, are the same in eval, under remat and over microbatches."""
    params, batch = generic_params(case.config), batch_of(case.config, MIXED)
    given = batch.batch()
    spec = fnmodels.family_of(case.config).spec(case.config)
    loss = functools.partial(train.next_token_loss, config=case.config, length=24, kernel="math")
    with torch.no_grad():
        want = loss(params, given, aux=True)[2]["counts"]
    paths = [path for path in tree.flatten(params) if path.endswith("selection_bias")]
    stored = enumerate(stored_sparse_layers(case.config))
    moved = want[[row for row, i in stored if f"layers.{i}.mlp.selection_bias" in paths]]
    optimizer = train.sgd(1e-3, spec=spec, weight_decay=0.1)
    for options in ({}, {"accumulate": 3}, {"remat": "full"}, {"accumulate": 2, "remat": "every:2"}):
        rate = {"balance_rate": 0.1} if paths else {}
        run = train.make_step(loss if paths else functools.partial(loss, aux=True), optimizer, **rate, **options)
        state, metrics = run(train.init_state(params, optimizer), given)
        assert torch.equal(metrics["aux"]["counts"], want)
        after = tree.flatten(state.params)
        for path, counts in zip(paths, moved, strict=True):
            assert torch.equal(after[path], train.losses.update_bias(tree.flatten(params)[path], counts, 0.1)), path


@every_mixture
def test_uniform_scores_balance_to_one(case: Case) -> None:
    """M6: per layer and from logits; a uniform router has loss 1, any other a different one."""
    batch, params = batch_of(case.config, MIXED), generic_params(case.config)
    given = batch.batch()
    mute = {p: torch.zeros_like(t) if ".mlp.router" in p else t for p, t in tree.flatten(params).items()}
    balance = train.Balance(sequence=1.0, batch=1.0)
    values = []
    for weights in (tree.unflatten(mute), params):
        found = train.next_token_loss(weights, given, config=case.config, length=24, balance=balance, aux=True)
        total, count, aux = found
        values.append([float(aux[name] / count) for name in ("sequence_balance", "batch_balance")])
        plain = train.next_token_loss(weights, given, config=case.config, length=24)
        assert off(total, plain[0] + aux["sequence_balance"] + aux["batch_balance"]) < 1e-5
    assert values[0] == pytest.approx([1.0, 1.0], abs=1e-5)
    assert all(abs(value - 1) > 1e-3 for value in values[1])


@pytest.mark.parametrize(("case", "kernel"), list(zip(MIXTURES, itertools.cycle(("math", "auto")))), ids=str)
def test_replay_is_bit_equal(case: Case, kernel: str) -> None:
    """R4: a forward that gets its own routing has the same bits in logits and gradients; other routing changes them."""
    params, batch = generic_params(case.config), batch_of(case.config, MIXED)
    inputs, masks, freqs_cis = batch.prepared()
    routing = routing_of(params, (inputs, masks, freqs_cis), case.config, kernel=kernel)
    assert routing.shape[:3] == (*MIXED.shape, len(sparse_layers(case.config)))

    def run(routing: Tensor | None) -> tuple[Tensor, Any]:
        leaves = trainable(params)
        replayed = {**inputs} if routing is None else {**inputs, "routing": routing}
        logits = fnmodels.forward(leaves, replayed, masks, freqs_cis, config=case.config, kernel=kernel)
        return logits, gradients(summed_loss(logits, batch.labels), leaves)

    free, replayed = run(None), run(torch.where(batch.valid[..., None, None], routing, -1))
    assert torch.equal(free[0], replayed[0]) and off(free[1], replayed[1]) == 0
    family = fnmodels.family_of(case.config)
    layers = layers_run(case.config, params["layers"])
    sizes = [len(layers[i]["mlp"]["router"]) for i in sparse_layers(case.config)]
    other = run((routing + 1) % torch.tensor(sizes)[:, None])[0]
    assert not torch.equal(free[0][batch.valid], other[batch.valid])
    x = family.embed(params, inputs, config=case.config)
    whole = fnmodels.run_layers(
        params,
        x,
        masks,
        freqs_cis,
        0,
        len(family.kinds(case.config)),
        config=case.config,
        routing=routing,
        **layer_inputs_of(case.config, params, inputs),
        kernel=kernel,
    )
    assert torch.equal(family.unembed(params, whole, config=case.config), free[0])


@every_mixture
def test_routing_travels_with_the_tokens(case: Case) -> None:
    """R4, B5: routing is one more per-token tensor with the batch in dimension 0."""
    params, batch = generic_params(case.config), batch_of(case.config, MIXED)
    inputs, masks, freqs_cis = batch.prepared()
    routing = routing_of(params, (inputs, masks, freqs_cis), case.config, kernel="math").flip(-2).flip(1)
    prepared = ({**inputs, "routing": routing}, masks, freqs_cis)  # a choice that no router would make
    run = functools.partial(fnmodels.forward, config=case.config, kernel="math")
    want = run(params, *prepared)
    order = torch.randperm(MIXED.shape[1], generator=torch.Generator().manual_seed(0))
    if not is_ordered(case):  # else `permute` refuses it
        moved = run(params, *fnmodels.permute(prepared, order))
        assert off(moved[batch.valid[:, order]], want[:, order][batch.valid[:, order]]) < 1e-5
    parts = torch.cat([run(params, *part) for part in fnmodels.split(prepared, 2)])
    assert off(parts[batch.valid], want[batch.valid]) < 1e-5


@every_set_of_names
def test_losses_replay_what_the_batch_holds(case: Case) -> None:
    """R4 in training: own routing gives the same bits, other routing another loss; splits and orders keep it."""
    params, batch = generic_params(case.config), batch_of(case.config, MIXED)
    given = batch.batch()
    routing = routing_of(params, batch.prepared(), case.config, kernel="math")
    options: dict[str, Any] = {"config": case.config, "kernel": "math", "length": 24}

    def run(function: Any, given: Any, **more: Any) -> tuple[Tensor, Any]:
        leaves = trainable(params)
        value = function(leaves, given, **options, **more)[0]
        return value.detach(), gradients(value.sum(), leaves)

    layers = layers_run(case.config, params["layers"])
    sizes = torch.tensor([len(layers[i]["mlp"]["router"]) for i in sparse_layers(case.config)])
    other = {**given, "routing": (routing + 1) % sizes[:, None]}
    called: list[Any] = []

    def watched(*given: Any, **how: Any) -> Tensor:
        called.append(given)
        return loop_experts(*given, **how)

    for function in (train.next_token_loss, train.token_logprobs):
        free, own, another = (run(function, replayed) for replayed in (given, {**given, "routing": routing}, other))
        assert torch.equal(own[0], free[0]) and off(own[1], free[1]) == 0
        assert not torch.equal(another[0], free[0])
        called.clear()
        assert relative(run(function, other, experts=watched)[1], another[1]) < bound_of(case)
        assert len(called) == len(sizes)
    routers = {path: g for path, g in tree.flatten(run(train.next_token_loss, other)[1]).items() if "router" in path}
    assert routers and all(g.any() for g in routers.values())
    whole = run(train.next_token_loss, other)[0]
    order = torch.randperm(MIXED.shape[1], generator=torch.Generator().manual_seed(0))
    if not is_ordered(case):
        assert off(run(train.next_token_loss, fnmodels.permute(other, order))[0], whole) < 1e-5
    parts = [run(train.next_token_loss, part)[0] for part in fnmodels.split(other, 2)]
    assert off(torch.stack(parts).sum(), whole) < 1e-5
    with pytest.raises(ValueError, match="routing must be int64"):
        train.token_logprobs(params, {**given, "routing": routing[:, 1:]}, **options)


@every_mixture
def test_what_does_not_fit_is_refused(case: Case) -> None:
    params, batch = generic_params(case.config), batch_of(case.config, MIXED)
    inputs, masks, freqs_cis = batch.prepared()
    run = functools.partial(fnmodels.forward, config=case.config)
    for bare in (batch.tokens, {"tokens": batch.tokens, "positions": batch.positions}):
        with pytest.raises(ValueError, match="which must know what is padding: pass the inputs"):
            run(params, bare, masks, freqs_cis)
    routing, k = routing_of(params, (inputs, masks, freqs_cis), case.config), case.config.num_experts_per_tok
    for wrong in (routing[:, :, 0], routing.int(), routing[:, 1:], routing[..., 1:], routing[..., [0, *range(k)]]):
        with pytest.raises(ValueError, match="routing must be int64"):
            run(params, {**inputs, "routing": wrong}, masks, freqs_cis)
    dense = {
        kind: mask if isinstance(mask, fnmodels.inputs.Segments | dict) else mask.dense()
        for kind, mask in masks.items()
    }
    x = fnmodels.family_of(case.config).embed(params, inputs, config=case.config)
    last = sparse_layers(case.config)[-1]
    more = {"valid": inputs["valid"], **layer_inputs_of(case.config, params, inputs)}
    replayed = fnmodels.run_layers(params, x, dense, freqs_cis, 0, last + 1, config=case.config, **more)
    del more["valid"]
    want = fnmodels.run_layers(params, x, masks, freqs_cis, 0, last + 1, config=case.config, **more)
    assert off(replayed[batch.valid], want[batch.valid]) < 1e-5
    if not is_ordered(case) and not any(isinstance(mask, dict) for mask in dense.values()):  # which say it
        with pytest.raises(ValueError, match="the masks do not say it"):
            fnmodels.run_layers(params, x, dense, freqs_cis, 0, last + 1, config=case.config)
    with pytest.raises(ValueError, match="experts is 'fast'"):
        run(params, inputs, masks, freqs_cis, experts="fast")
