"""The engine as a guest: a foreign loop drives it in a process group that somebody else has made, over fsdp x pp."""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fnmodels
import params as P
import train
from fnmodels import tree
from tests.support.cases import generic_params
from tests.support.ranks_pool import Ranks, devices
from tests.train.parallel.test_pipeline import batch_of, trained
from tests.train.parallel.test_stages import even
from train.comm.dtensor import local_tree
from train.engine import Engine
from train.parallel import Mesh, Strategy, data_parallel
from train.parallel.pipeline.stages import stage_plan
from train.parallel.placement import rules_of, shardings


def surroundings() -> list[Any]:
    """What a guest leaves as it was."""
    return [
        dist.group.WORLD,
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.initial_seed(),
        torch.random.get_rng_state().sum().item(),
        warnings.filters[:],
        dict(os.environ),
    ]


def rollouts(config: Any) -> list[list[dict[str, Tensor]]]:
    """Lists of microbatches, cut by the loop; those of the second are of unequal length."""
    parts = fnmodels.split(batch_of(config, 4), 4)
    more = fnmodels.split(batch_of(config, 8), 8)[4:]
    shorter = [tree.map(lambda t, i=i: t[:, : 12 - i], part) for i, part in enumerate(more)]
    return [[tree.map(lambda t: torch.cat((t, t)), part) for part in parts], shorter]


def with_policy_data(batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """With what a policy loss reads."""
    given = []
    for batch in batches:
        place = torch.arange(batch["tokens"].numel()).view_as(batch["tokens"])
        given.append(batch | {"old_logp": -4.0 - 0.3 * place.sin(), "advantages": (1.7 * place).cos()})
    return given


def judged(scores: tuple[Tensor, ...], batch: Any) -> tuple[Any, ...]:
    """A clipped policy gradient. Its count is no whole number, as a sum of weights."""
    logp, entropy, valid = scores
    more: dict[str, Any] = {"entropy": entropy, "entropy_bonus": 0.1}
    total, count, metrics = train.policy_loss(logp, batch["old_logp"], batch["advantages"], valid, **more)
    return total, 1.3 * count, metrics


def policy(config: Any) -> Any:
    """A policy gradient as a function of (params, batch)."""
    return lambda params, batch: judged(train.token_logprobs(params, batch, config=config, kernel="math"), batch)


def routed(config: Any) -> Any:
    """As `policy`, with what the routers did."""
    balance = train.Balance(sequence=0.3, z=0.1)

    def loss(params: Any, batch: Any) -> tuple[Any, ...]:
        *scores, added, sums = train.losses.routed_logprobs(
            params, batch, config=config, kernel="math", balance=balance
        )
        total, count, metrics = judged(tuple(scores), batch)
        return total + added, count, metrics | sums

    return loss


def renamed(loss: Any) -> Any:
    """The loss twice over, with other names for its metrics but the first."""

    def run(*args: Any) -> tuple[Any, ...]:
        total, count, metrics = loss(*args)
        first = next(iter(metrics))
        return 2 * total, count, {name if name == first else f"other_{name}": x for name, x in metrics.items()}

    return run


def added_up(engine: Engine) -> dict[str, Tensor]:
    """{path: gradient} of what trains, summed since the last update."""
    assert engine._sums is not None
    return dict(zip(trained(engine.params, engine.optimizer), engine._sums.grads, strict=True))


def driven(name: str, text: str, strategy: dict[str, Any], clip: float | None) -> dict[str, float]:
    """{what: how far from an engine in one process}, relative to the largest number of each."""
    config, mesh, how = even(name), Mesh.parse(text), Strategy(**strategy)
    spec, whole = fnmodels.family_of(config).spec(config), generic_params(config)
    optimizer = train.sgd(0.5, spec=spec)
    plan = stage_plan(P.plan(spec, rules_of(mesh, config), devices(mesh)), config, devices(mesh), how)
    flat = tree.flatten(whole)
    made = iter([where.distribute(flat[path][where.local_box()].clone()) for path, where in tree.flatten(plan).items()])
    given = tree.map(lambda _: next(made), plan)
    sparse = name == "deepseek_v3"
    loss = routed(config) if sparse else policy(config)
    logprobs = functools.partial(train.token_logprobs, config=config, kernel="math")
    before = surroundings()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ours = Engine(config, given, optimizer, clip=clip, mesh=mesh, strategy=how)
    assert ["is used as it is" in str(w.message) for w in warned if w.category is UserWarning] == [True]
    theirs, shards = Engine(config, whole, optimizer, clip=clip), tree.flatten(shardings(given))
    found: dict[str, float] = {}
    both = [loss] * 2  # one of the lists has a loss with other metrics, all but one
    if sparse:
        plain = functools.partial(train.next_token_loss, config=config, kernel="math", aux=True)
        both[0], sizes = plain, [1, 6]
    else:
        both[1], sizes = renamed(loss), [3, 3]
    for _ in range(2):
        for batches, of, size in zip(map(with_policy_data, rollouts(config)), both, sizes, strict=True):
            added, expected = ours.forward_backward(batches, of), theirs.forward_backward(batches, of)
            assert added["aux"].keys() == expected["aux"].keys() and len(expected["aux"]) == size
            for key, value in tree.flatten(expected).items():
                far = (tree.flatten(added)[key].double() - value).abs().max() / value.abs().max()
                found[key] = max(float(far), found.get(key, 0.0))
        one = added_up(theirs)
        for path, grad in added_up(ours).items():
            far = (grad - one[path][shards[path].local_box()]).abs().max() / one[path].abs().max().clamp(min=1e-30)
            found[f"gradient of {path}"] = float(far)
        measured, metrics = ours.optim_step(), theirs.optim_step()
        assert measured["aux"].keys() == metrics["aux"].keys() and len(metrics["aux"]) == (6 if sparse else 5)
        for key in ("loss", "count", "grad_norm", *metrics["aux"]):
            value, one_value = (of["aux"].get(key, of.get(key)).double() for of in (measured, metrics))
            found[f"{key} of a step"] = float((value - one_value).abs().max() / one_value.abs().max())
    after = tree.flatten(theirs.params)
    for path, leaf in tree.flatten(local_tree(ours.params)).items():
        found[path] = float((leaf - after[path][shards[path].local_box()]).abs().max() / after[path].abs().max())
    batches = rollouts(config)[1]
    with mock.patch("train.engine.make_forward_only", wraps=train.make_forward_only) as made_once:
        inferred = [*ours.infer(batches[:2], logprobs), *ours.infer(batches[2:], logprobs)]
        assert ours.infer([], logprobs) == []
    assert made_once.call_count == 1
    for results, expected in zip(inferred, theirs.infer(batches, logprobs), strict=True):
        for key, one, other in zip(("logp", "entropy", "valid"), results, expected, strict=True):
            assert one.shape == other.shape
            far = (one.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1e-30)
            found[key] = max(float(far), found.get(key, 0.0))
    handed, wanted = dict(ours.export()), dict(theirs.export())
    assert handed.keys() == wanted.keys() and all(handed[n].shape == t.shape for n, t in wanted.items())
    found["export"] = max(float((handed[n] - t).abs().max() / t.abs().max()) for n, t in wanted.items())
    assert surroundings() == before
    return found


def own(text: str) -> dict[str, float]:
    """Each process has documents that no other has: how far its engine is from one with all of them."""
    config, mesh, how = even("llama_tied"), Mesh.parse(text), Strategy(rows="own")
    plan = P.plan(fnmodels.family_of(config).spec(config), rules_of(mesh, config), devices(mesh))
    plan = stage_plan(plan, config, devices(mesh), how) if mesh.pp > 1 else plan
    whole, optimizer = generic_params(config), train.sgd(0.5)
    leaves = tree.flatten(whole)
    made = iter(
        [place.distribute(leaves[path][place.local_box()].clone()) for path, place in tree.flatten(plan).items()]
    )
    given = tree.map(lambda _: next(made), plan)
    scores = train.logprob_loss(of_rows, config=config, temperature="temperature", kernel="math")
    loss = functools.partial(train.next_token_loss, config=config, kernel="math")
    logprobs = functools.partial(train.token_logprobs, config=config, kernel="math")
    parts = [
        tree.map(lambda t, i=i: t[: 1 + i % 2, : 12 - 2 * i], p)
        for i, p in enumerate(fnmodels.split(batch_of(config, 4), 4))
    ]
    row = devices(mesh).get_local_rank("fsdp")
    mine = parts[2 * row : 2 * row + 2]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = Engine(config, given, optimizer, mesh=mesh, strategy=how)
    theirs = Engine(config, whole, optimizer)
    found = {"count": float(ours.forward_backward(mine, loss)["count"] - theirs.forward_backward(parts, loss)["count"])}
    shards, one = tree.flatten(shardings(ours.params)), added_up(theirs)
    for path, grad in added_up(ours).items():
        found[path] = float((grad - one[path][shards[path].local_box()]).abs().max() / one[path].abs().max())
    found["norm"] = abs(float(ours.optim_step()["grad_norm"] / theirs.optim_step()["grad_norm"]) - 1)
    for (logp, *_), (expected, *_) in zip(ours.infer(mine, logprobs), theirs.infer(mine, logprobs), strict=True):
        found["logp"] = float((logp - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    warm = [with_row_data(part, i) for i, part in enumerate(parts)]
    totals = [ours.forward_backward(warm[2 * row :][:2], scores), theirs.forward_backward(warm, scores)]
    found["total"] = abs(float(totals[0]["total"] / totals[1]["total"]) - 1)
    odd = {name: t.index_fill(1, torch.tensor([3]), 64) if name == "tokens" else t for name, t in mine[0].items()}
    last = row == mesh.fsdp - 1
    for wrong, said in (
        (mine[: 2 - last], "Process 0 gives 2 microbatches and process"),
        ([] if last else mine, "The list of microbatches is empty"),
        ([odd] if last else mine[:1], "The tokens go from .* to 64"),
        ([without(mine[0], "positions")] if last else mine[:1], "has no positions; its keys"),
        ([mine[0] | {"labels": mine[0]["labels"][:, 1:]}] if last else mine[:1], "labels is .* beside tokens"),
        ([mine[0] | {"labels": mine[0]["labels"].tolist()}] if last else mine[:1], "labels.0.0. is of type int"),
        ([mine[0] | {"labels": mine[0]["labels"].float()}] if last else mine[:1], "of the same kinds|must be int64"),
        ([mine[0] | {"more": mine[0]["labels"]}] if last else mine[:1], "must have the same entries"),
        (
            [mine[0] | {"temperature": 0.7}] if last else mine[:1],
            "Process .: The batch's 'temperature' is of type float",
        ),
        ([mine[0] | {"more": jagged_pair()}] if last else mine[:1], "Process .: The batch's 'more' is a nested"),
        (
            [mine[0] | {"more": torch.eye(2).to_sparse()}] if last else mine[:1],
            "Process .: The batch's 'more' has the layout torch.sparse_coo",
        ),
        (
            [mine[0] | {"gain": torch.ones(3)}] if last else mine[:1],
            r"gain is \[3\] beside tokens .* or be a number per row",
        ),
        (parts[dist.get_rank() :][:1], f"Processes 0 and {1 if mesh.cp > 1 else 2} share rows"),
    ):
        with pytest.raises(ValueError, match=said):
            ours.forward_backward(wrong, loss)
    with pytest.raises(ValueError, match="has no tokens; its keys"):
        ours.infer([without(mine[0], "tokens")] if last else mine[:1], logprobs)
    if mesh.pp > 1:

        def picky(params: Any, batch: Any) -> Any:
            unread(last, batch)
            return loss(params, batch)

        with pytest.raises(ValueError, match=f"Process {dist.get_world_size() // 2 - 1}: KeyError: 'advantages'"):
            ours.forward_backward(mine[:1], picky)
    return found


def jagged_pair() -> Tensor:
    return torch.nested.nested_tensor([torch.zeros(3), torch.zeros(5)], layout=torch.jagged)


def with_row_data(batch: dict[str, Tensor], start: int = 0) -> dict[str, Tensor]:
    """With a number per token, and one per row: its temperature."""
    place = torch.arange(batch["tokens"].numel()).view_as(batch["tokens"]) + start
    return batch | {
        "gain": 1 + 0.3 * place.double().sin(),
        "temperature": 0.6 + 0.1 * torch.arange(len(place)) + 0.07 * start,
    }


def placed_params(config: Any, mesh: Mesh, whole: Any) -> Any:
    """This rank's shards of full params."""
    plan = P.plan(fnmodels.family_of(config).spec(config), rules_of(mesh, config), devices(mesh))
    plan = stage_plan(plan, config, devices(mesh), Strategy()) if mesh.pp > 1 else plan
    flat = tree.flatten(whole)
    made = iter([where.distribute(flat[path][where.local_box()].clone()) for path, where in tree.flatten(plan).items()])
    return tree.map(lambda _: next(made), plan)


def in_calls(text: str, folder: str) -> dict[str, Any]:
    """Rates, divisors and state from outside, in fp64: how far from an engine in one process, and where losses lie."""
    config, mesh = even("llama_tied"), Mesh.parse(text)
    whole = tree.map(Tensor.double, generic_params(config))
    loss = functools.partial(train.next_token_loss, config=config, kernel="math")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours = Engine(config, placed_params(config, mesh, whole), train.adamw(0.1), mesh=mesh)
        theirs = Engine(config, whole, train.adamw(0.1))
    batch = batch_of(config, 4)
    parts = [tree.map(lambda t, i=i: t[2 * i : 2 * i + 2], batch) for i in range(2)]
    found: dict[str, Any] = {"losses": []}
    for step, values in enumerate(({"lr": 0.003, "betas": (0.5, 0.7)}, {"divide_by": 3.0, "lr": 0.002}, {})):
        if step == 2:
            ours.optimizer = theirs.optimizer = train.adamw(0.001)
            leaves = [leaf for leaf in tree.leaves(local_tree(ours.state)) if leaf.numel()]
            ours.offload()
            found["offloaded"] = sum(leaf.untyped_storage().nbytes() for leaf in leaves)
            ours.onload()
        metrics = []
        for engine in (ours, theirs):
            engine.forward_backward(parts, loss)
            metrics.append(engine.optim_step(**values))
        for key in ("loss", "grad_norm", "lr"):
            found[f"{key} {step}"] = abs(float(metrics[0][key] / metrics[1][key]) - 1)
        found["losses"] += [float(metrics[0]["loss"]), float(metrics[0]["grad_norm"])]
        if step == 1:
            ours.save(folder)
    after, shards = tree.flatten(theirs.params), tree.flatten(shardings(ours.params))
    local = tree.flatten(local_tree(ours.params))
    for path, leaf in local.items():
        found[path] = float((leaf - after[path][shards[path].local_box()]).abs().max())
    kept = {path: leaf.clone() for path, leaf in local.items()}
    ours.load(folder)
    ours.forward_backward(parts, loss)
    ours.optim_step()
    again = tree.flatten(local_tree(ours.params))
    found["resumed"] = max(float((again[path] - leaf).abs().max()) for path, leaf in kept.items())
    score = functools.partial(train.token_logprobs, config=config, kernel="math")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = Engine(config, ours.params, None, mesh=mesh)
    for (logp, *_), (expected, *_) in zip(reference.infer(parts, score), ours.infer(parts, score), strict=True):
        found["reference"] = float((logp - expected).abs().max())
    with pytest.raises(RuntimeError, match="has no optimizer"):
        reference.forward_backward(parts, loss)
    at = data_parallel(devices(mesh))
    found["data"] = [at.rank, at.size, dist.get_world_size(at.group), at.is_source]
    if mesh.pp > 1:
        with pytest.raises(ValueError, match="over pp each stage has its own layers alone"):
            Engine(config, ours.params, train.chain(train.optim.clip_norm(0.1), train.adamw(0.1)), mesh=mesh)
    return found


def refusals(text: str) -> dict[str, list[str]]:
    """The sentences of updates whose arguments fit together in no way, and whether a right update follows them."""
    config, mesh = even("llama_tied"), Mesh.parse(text)
    loss = functools.partial(train.next_token_loss, config=config, kernel="math")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = Engine(config, placed_params(config, mesh, generic_params(config)), train.adamw(0.1), mesh=mesh)
    said: dict[str, list[str]] = {}
    with pytest.raises(RuntimeError, match="no gradients yet"):  # on all alike: the kind is that of one process
        engine.optim_step()
    batches = [batch_of(config, 4)] * mesh.pp
    engine.forward_backward(batches, loss)
    second = dist.get_rank() == 1
    calls: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("divide_by", {"divide_by": 2}, {"divide_by": torch.tensor(3.0)}),
        ("unset", {}, {"divide_by": 2}),
        ("lr", {"lr": 0.001}, {"lr": 0.002}),
        ("betas", {"betas": (0.5, 0.7)}, {"betas": (0.5, 0.8)}),
        ("refused", {}, {"lr": -1.0}),
        ("unknown", {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1}),
    ]
    for name, one, other in calls:
        with pytest.raises(ValueError) as found:
            engine.optim_step(**other if second else one)
        said[name] = [str(found.value)]
    assert engine.optim_step(divide_by=torch.tensor(2.0) if second else 2, lr=0.001)["finite"]
    engine.forward_backward(batches, loss)
    if second:
        engine.zero_grad()
    with pytest.raises(ValueError, match="Process 1: NoGradientsError: optim_step comes after forward_backward"):
        engine.optim_step()
    sparse = {"more": torch.eye(2).to_sparse()} if second else {}
    with pytest.raises(ValueError, match="Process 1: The batch's 'more' has the layout"):
        engine.forward_backward([batch | sparse for batch in batches], loss)
    return said


def whole_gradients(text: str, strategy: dict[str, Any]) -> dict[str, float]:
    """Rows of an odd length: how far full gradients, and local ones, are from those of an engine in one process."""
    config, mesh = even("llama_tied"), Mesh.parse(text)
    whole, optimizer = tree.map(Tensor.double, generic_params(config)), train.adamw(0.1)
    loss = functools.partial(train.next_token_loss, config=config, kernel="math")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        how = Strategy(**strategy)
        ours = Engine(config, placed_params(config, mesh, whole), optimizer, mesh=mesh, strategy=how)
    theirs = Engine(config, whole, optimizer)
    with pytest.raises(RuntimeError, match="gradients come after forward_backward"):
        ours.gradients()
    batch = tree.map(lambda t: t[:, :11], batch_of(config, 4))
    for engine in (ours, theirs):
        engine.forward_backward([batch] * mesh.pp, loss)
    one, local = tree.flatten(theirs.gradients()), tree.flatten(ours.gradients())
    full, shards = tree.flatten(ours.gradients(full=True)), tree.flatten(shardings(ours.params))
    assert full.keys() == one.keys() and local.keys() == shards.keys()
    pieces = {path: local_tree(leaf) - one[path][shards[path].local_box()] for path, leaf in local.items()}
    far = {path: float((full[path] - grad).abs().max() / grad.abs().max()) for path, grad in one.items()}
    return far | {f"local {path}": float(piece.abs().max()) for path, piece in pieces.items()}


def without(batch: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {other: tensor for other, tensor in batch.items() if other != name}


def unread(here: bool, batch: Any) -> None:
    if here:
        batch["advantages"]


@pytest.mark.parametrize("mesh", ["fsdp=2,cp=2", "pp=2,fsdp=2"])
def test_processes_may_have_rows_of_their_own(ranks: Ranks, mesh: str) -> None:
    for found in ranks(4)(own, mesh):
        assert not {what: far for what, far in found.items() if not abs(far) < 1e-5}


@pytest.mark.parametrize(
    ("name", "mesh", "strategy", "clip"),
    [
        ("llama_tied", "pp=2,fsdp=2", {}, None),
        ("deepseek_v3", "pp=2,fsdp=2", {"schedule": "Interleaved1F1B"}, 0.1),
    ],
)
def test_it_is_that_of_one_process(
    ranks: Ranks, name: str, mesh: str, strategy: dict[str, Any], clip: float | None
) -> None:
    found = ranks(4)(driven, name, mesh, strategy, clip)
    assert {path for far in found for path in far} >= set(tree.flatten(generic_params(even(name))))
    assert not {what: far for one in found for what, far in one.items() if not far < 1e-5}


@pytest.mark.parametrize(
    ("mesh", "strategy"), [("fsdp=2", {}), ("pp=2", {}), ("cp=2", {"sequence": True}), ("tp=2", {"sequence": True})]
)
def test_gradients_are_sharded_or_full(ranks: Ranks, mesh: str, strategy: dict[str, Any]) -> None:
    for found in ranks(2)(whole_gradients, mesh, strategy):
        assert found and not {what: far for what, far in found.items() if not far < 1e-12}


@pytest.mark.parametrize(("mesh", "data"), [("fsdp=2", [2, 2, True, True]), ("pp=2", [1, 1, True, False])])
def test_rates_divisors_and_state_come_from_outside(ranks: Ranks, mesh: str, data: list[Any], tmp_path: Path) -> None:
    found = ranks(2)(in_calls, mesh, str(tmp_path))
    rows, size, first, second = data
    assert [one.pop("data") for one in found] == [[0, rows, size, first], [rows - 1, rows, size, second]]
    losses = [one.pop("losses") for one in found]
    assert losses[0] == losses[1]  # to the last bit of fp64, on the ranks that do not compute the loss too
    assert not {what: far for one in found for what, far in one.items() if not far < 1e-12}


@pytest.mark.parametrize("mesh", ["fsdp=2", "pp=2"])
def test_an_update_is_refused_on_all_ranks_in_one_sentence(ranks: Ranks, mesh: str) -> None:
    one, other = ranks(2)(refusals, mesh)
    assert one == other
    assert [sentence.split(";")[0] for (sentence,) in one.values()] == [
        "divide_by is 2.0 on process 0 and 3.0 on process 1",
        "divide_by is None on process 0 and 2.0 on process 1",
        "lr is 0.001 on process 0 and 0.002 on process 1",
        "betas is [0.5, 0.7] on process 0 and [0.5, 0.8] on process 1",
        "Process 1: lr is -1.0",
        "Process 0: adamw has no momentum",
    ]


def of_rows(logp: Tensor, entropy: Tensor, batch: Any) -> tuple[Any, ...]:
    """A sum over rows of a square of their mean, which no rank can compute from some of the positions."""
    valid = (batch["labels"] != -100).to(logp)
    each = ((logp + 0.1 * entropy) * valid * batch["gain"]).sum(1) / valid.sum(1).clamp(min=1)
    rows = valid.any(1)
    return each.square()[rows].sum(), rows.sum(), {"rows": each.detach().sum()}


def scored(name: str, text: str, strategy: dict[str, Any]) -> dict[str, float]:
    """A loss of log-probabilities of full rows: how far from an engine in one process, by sum, gradient and output."""
    config, mesh = even(name), Mesh.parse(text)
    whole = tree.map(Tensor.double, generic_params(config))
    spec = fnmodels.family_of(config).spec(config)
    loss = train.logprob_loss(of_rows, config=config, temperature="temperature", kernel="math")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given, how = placed_params(config, mesh, whole), Strategy(**strategy)
        ours = Engine(config, given, train.sgd(0.01, spec=spec), mesh=mesh, strategy=how)
        theirs = Engine(config, whole, train.sgd(0.01, spec=spec))
    batch, rows = batch_of(config, 4), 3 if mesh.rows == 1 else 2  # a pipeline pads those of the second to 3
    shorter = {name: tensor[rows:, : 12 - 2 * mesh.pp] for name, tensor in batch.items()}
    parts = [with_row_data({name: tensor[:rows] for name, tensor in batch.items()}), with_row_data(shorter, 5)]
    found: dict[str, float] = {}
    for _ in range(2):
        added, expected = ours.forward_backward(parts, loss), theirs.forward_backward(parts, loss)
        for (path, value), wanted in zip(tree.flatten(added).items(), tree.leaves(expected), strict=True):
            assert value.shape == wanted.shape, (path, value.shape, wanted.shape)
            found[path] = float((value - wanted).abs().max() / wanted.abs().max())
        one, shards = added_up(theirs), tree.flatten(shardings(ours.params))
        for path, grad in added_up(ours).items():
            far = (grad - one[path][shards[path].local_box()]).abs().max() / one[path].abs().max().clamp(min=1e-30)
            found[f"gradient of {path}"] = float(far)
        found["loss"] = abs(float(ours.optim_step()["loss"] / theirs.optim_step()["loss"]) - 1)
    return found


@pytest.mark.parametrize(
    ("name", "mesh", "strategy"),
    [
        ("llama_tied", "fsdp=2,tp=2", {"sequence": True}),
        ("llama_tied", "fsdp=2,cp=2", {}),
        ("llama_tied", "pp=2,cp=2", {}),
        ("deepseek_v3", "ep=2", {}),
    ],
)
def test_a_loss_of_log_probabilities_runs_on_every_mesh(
    ranks: Ranks, name: str, mesh: str, strategy: dict[str, Any]
) -> None:
    for found in ranks(Mesh.parse(mesh).world)(scored, name, mesh, strategy):
        assert not {what: far for what, far in found.items() if not far < 1e-10}


def data_ranks(text: str) -> list[Any]:
    at = data_parallel(devices(Mesh.parse(text)))
    return [at.rank, at.size, dist.get_process_group_ranks(at.group), at.is_source]


def test_every_rank_knows_which_rows_are_its_own(ranks: Ranks) -> None:
    found = ranks(4)(data_ranks, "pp=2,fsdp=2")
    assert found == [[0, 2, [0, 1], True], [1, 2, [0, 1], True], [0, 2, [2, 3], False], [1, 2, [2, 3], False]]
    assert ranks(4)(data_ranks, "dp=2,fsdp=2") == [[i, 4, [0, 1, 2, 3], True] for i in range(4)]
    assert ranks(4)(data_ranks, "cp=2,tp=2") == [[0, 1, [i], i == 0] for i in range(4)]
