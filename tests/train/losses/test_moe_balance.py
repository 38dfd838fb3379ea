"""Balance of experts: losses with known values, and the bias that moves once per step and is trained by nothing."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

import fnmodels
import train
from fnmodels import tree
from fnmodels.models.common.spec import moe_leaves
from fnmodels.ops.mlp import glu
from fnmodels.ops.moe.layer import moe
from fnmodels.ops.moe.router import sigmoid_top_k
from tests.support.cases import (
    batch_of,
    cases,
    generic,
    generic_params,
    is_routed,
    off,
    segments,
    sparse_layers,
    trainable,
)
from train.engine import Engine
from train.losses.moe_balance import moved_biases
from train.optim.base import with_paths

E, K, D = 6, 2, 8
SCORES = ("softmax", "sigmoid")
VALID = torch.tensor([[True] * 6, [False, True, True, True, False, False], [False] * 6])


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def choices(logits: Tensor) -> Tensor:
    return logits.topk(K, dim=-1).indices


# ------------------------------------------------------------------------------------------------ losses


@pytest.mark.parametrize("scores", SCORES)
def test_uniform_and_collapsed_routing_have_known_values(scores: str) -> None:
    """M6: 1 where everything is even, E / k where k experts get everything, 0 in a row of padding."""
    valid = torch.tensor([[True] * 6, [False] * 6])
    even = torch.arange(6 * K).view(1, 6, K).expand(2, 6, K) % E
    uniform = train.losses.balance_loss(torch.zeros(2, 6, E), even, valid, scores=scores)
    assert torch.allclose(uniform, torch.tensor([1.0, 0.0]))
    logits = torch.full((2, 6, E), -40.0)
    logits[..., :K] = 40.0
    collapsed = train.losses.balance_loss(logits, choices(logits), valid, scores=scores)
    assert torch.allclose(collapsed, torch.tensor([E / K, 0.0]))
    z = train.losses.router_z_loss(torch.full((2, 6, E), 1.5), valid)
    assert torch.allclose(z, torch.stack(((torch.tensor(float(E)).log() + 1.5) ** 2, torch.tensor(0.0))))


@pytest.mark.parametrize("scores", SCORES)
def test_losses_are_the_sums_of_their_definition(scores: str) -> None:
    logits = noise(3, 6, E)
    indices = choices(logits)
    poisoned = torch.where(VALID[..., None], logits, torch.nan)
    strange = torch.where(VALID[..., None], indices, -3)
    got = train.losses.balance_loss(poisoned, strange, VALID, scores=scores)
    z = train.losses.router_z_loss(poisoned, VALID)
    for b in range(3):
        tokens = [t for t in range(6) if VALID[b, t]]
        total = torch.zeros((), dtype=torch.float64)
        for e in range(E):
            f = sum(int(e in indices[b, t]) for t in tokens) / max(1, len(tokens) * K)
            s = [logits[b, t].softmax(-1) if scores == "softmax" else logits[b, t].sigmoid() for t in tokens]
            total += E * f * sum(x[e] / x.sum() for x in s) / max(1, len(tokens))
        assert torch.allclose(got[b], total)
        squares = [logits[b, t].exp().sum().log() ** 2 for t in tokens]
        assert torch.allclose(z[b], sum(squares, torch.zeros((), dtype=torch.float64)) / max(1, len(tokens)))


def test_the_gradient_moves_scores_from_the_used_to_the_unused() -> None:
    """With finite gradients at padding of NaN, and through transforms."""
    logits = noise(1, 12, E)
    logits[..., 0] += 3
    indices, valid = choices(logits), torch.ones(1, 12, dtype=torch.bool)
    grad_output = grad(lambda x: train.losses.balance_loss(x, indices, valid).sum())(logits)
    assert (grad_output[..., 0] > 0).all()
    assert torch.allclose(grad_output.sum(-1), torch.zeros(1, 12, dtype=torch.float64))
    forward = jvp(lambda x: train.losses.balance_loss(x, indices, valid).sum(), (logits,), (grad_output,))[1]
    assert torch.allclose(forward, grad_output.square().sum())
    bad = torch.where(VALID[..., None], noise(3, 6, E), torch.nan)
    for loss in (
        *(lambda x, s=s: train.losses.balance_loss(x, choices(noise(3, 6, E)), VALID, scores=s).sum() for s in SCORES),
        lambda x: train.losses.router_z_loss(x, VALID).sum(),
    ):
        gradient = grad(loss)(bad)
        assert gradient[VALID].isfinite().all() and gradient[VALID].any() and not gradient[~VALID].any()
    each = vmap(lambda *row: train.losses.balance_loss(*(t[None] for t in row))[0])(
        logits[0][:, None], indices[0][:, None], valid[0][:, None]
    )
    assert each.shape == (12,)


@pytest.mark.parametrize("bad", [{"sequence": -1.0}, {"z": -1e-3}, {"scores": "tanh"}])
def test_coefficients_that_cannot_be(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(bad))} is"):
        train.Balance(**bad)


ROUTED = next(case for case in cases() if case.name == "qwen3_moe")
ROWS = segments((9, -3), (4, 8), (12,), (-2, 5, 5))


def given(seed: int = 0) -> dict[str, Tensor]:
    batch = batch_of(ROUTED.config, ROWS, seed=seed)
    return {n: getattr(batch, n) for n in ("tokens", "positions", "segment_ids", "labels")}


def test_the_loss_has_what_balance_adds() -> None:
    """The mean over layers and labelled tokens of each term; its sums come back, without coefficients."""
    params, batch = generic_params(ROUTED.config), given()
    plain, count = train.next_token_loss(params, batch, config=ROUTED.config)
    balance = train.Balance(sequence=0.1, batch=0.03, z=0.01)
    total, again, aux = train.next_token_loss(params, batch, config=ROUTED.config, balance=balance, aux=True)
    assert torch.equal(count, again)
    prepared = fnmodels.prepare(
        ROUTED.config, *(batch[n] for n in ("tokens",)), positions=batch["positions"], segment_ids=ROWS
    )
    _, taps = fnmodels.forward(
        params, *prepared, config=ROUTED.config, taps=("layers.*.router_logits", "layers.*.expert_indices")
    )
    valid, labelled = ROWS > 0, (batch["labels"] != -100).sum(1)
    sequence, flat, z = 0.0, 0.0, 0.0
    layers = sparse_layers(ROUTED.config)
    for i in layers:
        logits, indices = (taps[f"layers.{i}.{name}"] for name in ("router_logits", "expert_indices"))
        sequence += (train.losses.balance_loss(logits, indices, valid) * labelled).sum() / len(layers)
        flat += (
            train.losses.balance_loss(*(t.flatten(0, 1)[None] for t in (logits, indices, valid)))[0]
            * labelled.sum()
            / len(layers)
        )
        z += (train.losses.router_z_loss(logits, valid) * labelled).sum() / len(layers)
    assert off(aux["sequence_balance"], sequence) < 1e-5 and off(aux["router_z"], z) < 1e-5
    assert off(aux["batch_balance"], flat) < 1e-5
    assert off(total, plain + 0.1 * sequence + 0.03 * flat + 0.01 * z) < 1e-5
    assert int(aux["counts"].sum()) == len(layers) * int(valid.sum()) * ROUTED.config.num_experts_per_tok
    bare = train.next_token_loss(params, batch, config=ROUTED.config, balance=balance)
    assert len(bare) == 2 and torch.equal(bare[0], total)
    only = train.next_token_loss(params, batch, config=ROUTED.config, aux=True)
    assert torch.equal(only[0], plain) and only[2].keys() == {"counts"}
    padded = {**batch, "segment_ids": batch["segment_ids"].where(valid, -1)}  # what is not above 0 is padding
    other, _, sums = train.next_token_loss(params, padded, config=ROUTED.config, balance=balance, aux=True)
    assert torch.equal(other, total) and torch.equal(sums["counts"], aux["counts"])
    # a label of weight 0 is none for the routers' terms too
    fewer = {**batch, "labels": batch["labels"].index_fill(1, torch.tensor([2, 7]), -100)}
    weighed = {**batch, "weights": torch.ones(ROWS.shape).index_fill(1, torch.tensor([2, 7]), 0)}
    run = functools.partial(train.next_token_loss, params, config=ROUTED.config, balance=balance, aux=True)
    assert off(run(weighed), run(fewer)) < 1e-6


def test_aux_of_a_model_without_experts_raises() -> None:
    dense = next(case for case in cases() if not is_routed(case.config) and case.name == "llama")
    with pytest.raises(ValueError, match="llama has none"):
        train.next_token_loss(generic_params(dense.config), given(), config=dense.config, aux=True)


def test_rows_in_parts_have_the_sums_of_the_whole() -> None:
    """P5, M5: uneven parts, one of them without a label; the terms of rows do not depend on the split."""
    balance = train.Balance(sequence=0.1, z=0.01)
    params = trainable(generic_params(ROUTED.config, torch.float64))
    batch = given()
    batch["labels"][0] = -100
    run = functools.partial(train.next_token_loss, params, config=ROUTED.config, balance=balance, aux=True)
    whole = run(batch)
    parts = [run({n: t[lo:hi] for n, t in batch.items()}) for lo, hi in ((0, 1), (1, 2), (2, 4))]
    summed = tree.map(lambda *x: torch.stack(x).sum(0), *parts)
    assert off(summed, whole) < 1e-12
    flat = tree.leaves(params)
    grads = [
        torch.autograd.grad(loss, flat, allow_unused=True, materialize_grads=True) for loss in (whole[0], summed[0])
    ]
    assert off(list(grads[0]), list(grads[1])) < 1e-10


# ------------------------------------------------------------------------------------------------ the bias


def test_the_bias_goes_towards_the_mean() -> None:
    bias, counts = torch.tensor([0.5, -0.5, 0.0, 0.1, 0.2]), torch.tensor([3, 10, 6, 7, 6])
    moved = train.losses.update_bias(bias, counts, 0.01)
    assert torch.allclose(moved, torch.tensor([0.51, -0.51, 0.01, 0.09, 0.21])) and bias[0] == 0.5
    for even in (torch.full((5,), 7), torch.zeros(5, dtype=torch.int64)):
        assert torch.equal(train.losses.update_bias(bias, even, 0.01), bias)
    assert train.losses.update_bias(bias.double(), counts, torch.tensor(0.01)).dtype == torch.float64


def test_the_biases_of_heads_move_where_they_are_counted() -> None:
    params = {
        "layers": [{"w": torch.ones(2)}, {"mlp": {"selection_bias": torch.zeros(2)}}],
        "mtp": [{"block": {"mlp": {"selection_bias": torch.zeros(2)}}}],
    }
    counts = torch.tensor([[1, 3], [3, 1]])
    here, there = (f"{where}.mlp.selection_bias" for where in ("layers.1", "mtp.0.block"))
    up, down = torch.tensor([0.5, -0.5]), torch.tensor([-0.5, 0.5])
    no, yes = torch.tensor(False), torch.tensor(True)
    both, alone = (moved_biases(params, some, 0.5, no) for some in (counts, counts[:1]))
    assert torch.equal(both[here], up) and torch.equal(both[there], down)
    assert torch.equal(alone.pop(here), up) and not alone
    assert not moved_biases(params, counts[:1], 0.5, yes)[here].any()
    with pytest.raises(ValueError, match="there are 1 of them, and the loss returns counts of 3"):
        moved_biases(params, counts[[0, 0, 0]], 0.5, no)


SPEC = {"layers": [{"mlp": moe_leaves(D, E, 12, std=0.5, selection_bias=True)} for _ in range(2)]}


def model(name: str = "") -> Any:
    return tree.unflatten({p: generic(f"{name}{p}", torch.empty(leaf.shape)) for p, leaf in tree.flatten(SPEC).items()})


def toy_loss(params: Any, batch: Any, *, layer_fn: Any = None, aux: bool = False) -> tuple[Any, ...]:
    """Two sparse layers with a selection bias, and squares for a loss."""

    def block(layer: Any, x: Tensor, valid: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        route = functools.partial(sigmoid_top_k, k=K, bias=layer["mlp"]["selection_bias"], renormalize=True)
        y, found = moe(layer["mlp"], x, route, valid=valid, act=functools.partial(glu, activation="silu"))
        return x + y, found

    options = train.loss.run_options(params)
    x, counts, layer_fn = batch["x"], [], layer_fn or options.layer_fn
    for layer in params["layers"]:
        x, found = (layer_fn(block) if layer_fn else block)(layer, x, batch["valid"])
        counts.append(found["counts"])
    total, count = (x - batch["y"]).square().mean(-1)[batch["valid"]].sum(), batch["valid"].sum()
    return (total, count, {"counts": torch.stack(counts)}) if aux or options.reports.counts else (total, count)


def toy_batch(seed: int = 0) -> dict[str, Tensor]:
    valid = torch.arange(6)[None] < torch.tensor([[6], [2], [5], [1]])
    return {"x": noise(4, 6, D, seed=seed).float(), "y": noise(4, 6, D, seed=seed + 9).float(), "valid": valid}


def biases(params: Any) -> Tensor:
    return torch.stack([layer["mlp"]["selection_bias"] for layer in params["layers"]])


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": functools.partial(train.adamw, 1e-2, weight_decay=0.5),
    "sgd": functools.partial(train.sgd, 1e-2, weight_decay=0.5, momentum=0.9),
    "muon": functools.partial(train.muon, 1e-2, weight_decay=0.5),
}


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 3}, {"remat": "full"}, {"accumulate": 2, "remat": "selective"}], ids=str
)
def test_the_bias_moves_once_per_step(name: str, inplace: bool, options: dict[str, Any]) -> None:
    """M5: by the counts of the whole batch, whatever the parts and the remat. Nothing trains it, nothing decays it."""
    optimizer = OPTIMIZERS[name](spec=SPEC)
    step = train.make_step(toy_loss, optimizer, balance_rate=0.01, inplace=inplace, **options)
    params = model()
    state = train.init_state(params, optimizer)
    assert not any("selection_bias" in path for path in tree.flatten(state.opt_state))
    for seed in range(3):
        before = tree.map(torch.clone, state.params)
        with torch.no_grad():
            counts = toy_loss(before, toy_batch(seed), aux=True)[2]["counts"]
        state, metrics = step(state, toy_batch(seed))
        assert torch.equal(metrics["aux"]["counts"], counts)
        want = torch.stack([train.losses.update_bias(b, c, 0.01) for b, c in zip(biases(before), counts, strict=True)])
        assert torch.equal(biases(state.params), want) and not torch.equal(want, biases(before))
    assert torch.equal(biases(params), biases(model()))  # the caller's own are not written


def test_the_bias_keeps_its_moves_beside_fp32_copies_of_bf16_weights() -> None:
    optimizer = train.optim.with_master(train.adamw(1e-2, spec=SPEC))
    step = train.make_step(toy_loss, optimizer, balance_rate=0.01)
    params = with_paths(lambda path, p: p if path.endswith("selection_bias") else p.bfloat16(), model())
    batch = {name: t.bfloat16() if t.is_floating_point() else t for name, t in toy_batch().items()}
    state, want = train.init_state(params, optimizer), biases(params)
    for _ in range(3):
        state, metrics = step(state, batch)
        counts = metrics["aux"]["counts"]
        want = torch.stack([train.losses.update_bias(b, c, 0.01) for b, c in zip(want, counts, strict=True)])
        assert torch.equal(biases(state.params), want)


def test_without_a_rate_the_bias_stays() -> None:
    optimizer = train.adamw(1e-2, weight_decay=0.5, spec=SPEC)
    state, metrics = train.make_step(toy_loss, optimizer)(train.init_state(model(), optimizer), toy_batch())
    assert torch.equal(biases(state.params), biases(model())) and "aux" not in metrics


def test_a_step_that_is_skipped_moves_no_bias() -> None:
    optimizer = train.adamw(1e-2, spec=SPEC)
    batch = toy_batch()
    batch["y"][0, 0, 0] = torch.inf
    state, metrics = train.make_step(toy_loss, optimizer, balance_rate=0.01)(
        train.init_state(model(), optimizer), batch
    )
    assert not metrics["finite"] and torch.equal(biases(state.params), biases(model()))


def test_the_engine_moves_it_too() -> None:
    optimizer = train.adamw(1e-2, spec=SPEC)
    engine = Engine(None, model(), optimizer, balance_rate=0.01)
    batch = toy_batch()
    for rows in (slice(0, 1), slice(1, 4)):
        engine.forward_backward([{n: t[rows] for n, t in batch.items()}], toy_loss)
    engine.optim_step()
    state, _ = train.make_step(toy_loss, optimizer, balance_rate=0.01)(train.init_state(model(), optimizer), batch)
    assert torch.equal(biases(engine.params), biases(state.params))


def test_what_moves_no_bias_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bias is torch\.bfloat16, in which moves of 0\.001 are lost"):
        train.losses.update_bias(torch.ones(E, dtype=torch.bfloat16), torch.arange(E), 1e-3)
    optimizer = train.adamw(1e-2, spec=SPEC)
    step = train.make_step(lambda params, batch: toy_loss(dict(params), batch), optimizer, balance_rate=0.01)
    with pytest.raises(ValueError, match="there are 2 of them, and the loss returns counts of 0"):
        step(train.init_state(model(), optimizer), toy_batch())
    dense = generic_params(ROUTED.config)
    spec = fnmodels.family_of(ROUTED.config).spec(ROUTED.config)
    optimizer = train.adamw(1e-2, spec=spec)
    step = train.make_step(functools.partial(train.next_token_loss, config=ROUTED.config), optimizer, balance_rate=0.01)
    state = train.init_state(dense, optimizer)
    for _ in range(2):  # before anything is written, so the State stays usable
        with pytest.raises(ValueError, match="there are 0 of them, and the loss returns counts of 2"):
            step(state, given())
    assert off(state.params, dense) == 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_without_a_spec_is_refused(name: str) -> None:
    """It would let the bias decay in silence."""
    optimizer = OPTIMIZERS[name]()
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.selection_bias has no gradient.*spec="):
        train.init_state(model(), optimizer)


def test_remat_counts_a_token_once() -> None:
    """A checkpointed layer runs twice, and is counted in the pass whose result is used."""
    with torch.enable_grad():
        params = trainable(model())
        remat = lambda block: functools.partial(checkpoint, block, use_reentrant=False)  # noqa: E731
        total, _, aux = toy_loss(params, toy_batch(), layer_fn=remat, aux=True)
        total.backward()
    assert int(aux["counts"].sum()) == 2 * K * int(toy_batch()["valid"].sum())
