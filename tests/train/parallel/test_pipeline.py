"""Pipelines against one process: every gradient by path, for every schedule; and ways to be wrong that must show."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fnmodels
import train
from fnmodels import t5, tree
from fnmodels.models.common.family import LayerKind
from tests.support.cases import cases, generic_params, positions_of, segments, tokens_of
from tests.support.ranks_pool import Ranks
from tests.variants.t5 import TINY as T5
from train.gradients import added_to, gradient_sums
from train.loss import as_loss
from train.losses.moe_balance import balance_terms
from train.optim.base import with_paths
from train.parallel import padding
from train.parallel.pipeline import gradients as pp
from train.parallel.pipeline import runner, staged_loss
from train.parallel.pipeline.microbatch import microbatches
from train.parallel.pipeline.schedule import check_microbatches, pipeline
from train.parallel.pipeline.staged_loss import StagedLoss
from train.parallel.pipeline.tree_split import copies, entry_of, held, holders, share
from train.run_options import Balance

# A tied embedding; a dense first layer, shared experts and a selection bias; sinks, a router bias and two kinds.
FAMILIES = ("llama_tied", "deepseek_v3", "gpt_oss")
CLOSE = 1e-5  # of the largest entry of a leaf's gradient

Batch = dict[str, Tensor]


@functools.cache
def config_of(name: str, layers: int) -> Any:
    """A variant with as many layers, whose kinds begin anew where they end."""
    config = next(case.config for case in cases() if case.name == name)
    again = config.layer_kinds[1:] if name == "deepseek_v3" else config.layer_kinds  # whose first layer alone is dense
    longer = (*config.layer_kinds, *again * layers)[:layers]
    kinds = {field.name: longer for field in dataclasses.fields(config) if field.name == "layer_kinds" and field.init}
    return dataclasses.replace(config, num_hidden_layers=layers, **kinds)


def batch_of(config: Any, parts: int) -> Batch:
    """Two rows to a microbatch: packed, padded on either side, unevenly labeled; the second has no label, the third no
    token."""
    rows = [(5, 4, 3), (12,), (3, 9), (7, -5), (-12,), (-12,), (-2, 1, 9), (6, -2, 4)]
    segment_ids = segments(*[rows[i % len(rows)] for i in range(2 * parts)])
    tokens = tokens_of(config, *segment_ids.shape, seed=3)
    labels = torch.full_like(tokens, -100)
    same = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    labels[:, :-1] = torch.where(same, tokens[:, 1:], -100)
    labels[2:4] = -100
    return {"tokens": tokens, "positions": positions_of(segment_ids), "segment_ids": segment_ids, "labels": labels}


def optimizer_of(config: Any) -> train.Optimizer:
    """With an eps that keeps gradients of nearly 0 from becoming steps of full size."""
    return train.adamw(1e-2, eps=1e-3, spec=fnmodels.family_of(config).spec(config))


def expected(loss: Any, config: Any, parts: list[Batch], **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """The sums of one process, and its gradients by path."""
    params, optimizer = generic_params(config), optimizer_of(config)
    sums = gradient_sums(loss, optimizer, **options)(params, parts, divide=False)
    return sums, dict(zip(trained(params, optimizer), sums.grads, strict=True))


def trained(params: Any, optimizer: train.Optimizer) -> list[str]:
    return [
        path for path, on in tree.flatten(train.optim.trainable_mask(params, optimizer.traits.trainable)).items() if on
    ]


def differences(found: dict[str, Tensor], one: dict[str, Tensor]) -> dict[str, float]:
    """{path: largest difference in units of the leaf's largest gradient}."""
    largest = {path: grad.abs().max().clamp(min=1e-30) for path, grad in one.items()}
    return {path: float((grad - one[path]).abs().max() / largest[path]) for path, grad in found.items()}


# ------------------------------------------------------------------------------------------------ on the ranks


def loss_of(config: Any, balance: bool) -> Any:
    terms = Balance(sequence=0.3, z=0.1, scores="sigmoid") if balance else None
    return functools.partial(train.next_token_loss, config=config, kernel="math", balance=terms)


def scaled_terms(config: Any, params: Any, batch: Batch) -> tuple[Any, ...]:
    """A loss that multiplies the balance terms, as one with another count than the labels' does."""
    balance = Balance(sequence=0.3, z=0.1, scores="sigmoid")
    logp, _, valid, added, sums = train.losses.routed_logprobs(
        params, batch, config=config, kernel="math", balance=balance
    )
    return 0.01 * added - logp.sum(), valid.sum(), sums


def gradients(
    name: str,
    layers: int,
    schedule: str,
    balance: bool = False,
    scaled: bool = False,
    dropped: bool = False,
    edited: bool = False,
) -> dict[str, Any]:
    """This rank's differences to one process, what it counts, and the sums. dropped: stages carry no terms."""
    config, size = config_of(name, layers), dist.get_world_size()
    loss = functools.partial(scaled_terms, config) if scaled else loss_of(config, balance)
    if edited:
        names = ("embed", "layers.1.mlp", "layers.3.attention.z", "layers.*.output", "hidden")
        loss = functools.partial(loss, edits={edit: lambda value, name: value * 1.1 for edit in names})
    optimizer = optimizer_of(config)
    split = fnmodels.split(batch_of(config, 4), 4)
    pipe = pipeline(config, size, schedule)
    params = share(generic_params(config), config, pipe, dist.get_rank())
    before = tree.map(torch.clone, params)
    of = pp.gradient_sums(as_loss(loss).with_options(reports={"counts": balance}), optimizer, pipe)
    terms = lambda *given: tree.map(Tensor.detach, balance_terms(*given))  # noqa: E731
    with mock.patch.object(staged_loss, "balance_terms", terms) if dropped else contextlib.nullcontext():
        of(params, split)
        sums = of(params, split)  # again: nothing of the first step is left behind
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(params), tree.leaves(before), strict=True))
    one, grads = expected(loss, config, split, counts=balance)
    found = dict(zip(trained(params, optimizer), sums.grads, strict=True))
    assert all(grad.dtype == torch.float32 for grad in sums.grads)
    report: dict[str, Any] = {
        "off": differences(found, grads),
        "copies": sorted(copies(config, pipe, dist.get_rank())),
        "total": [float(sums.total), float(one.total)],
        "count": [int(sums.count), int(one.count)],
    }
    if balance:
        sparse = [i for i, kind in enumerate(fnmodels.family_of(config).kinds(config)) if LayerKind.parse(kind).routed]
        here = [k for k, i in enumerate(sparse) if str(i) in params["layers"]]
        report["counts"] = torch.equal(sums.aux["counts"], one.aux["counts"][here])
        report["terms"] = {n: [float(v), float(one.aux[n])] for n, v in sums.aux.items() if n != "counts"}
    return report


def check(reports: list[dict[str, Any]], config: Any) -> None:
    """Every trained path is somewhere, once but for copies, and equal; the last stage alone has the sums."""
    found = [path for report in reports for path in report["off"] if path.split(".")[0] not in report["copies"]]
    assert sorted(found) == sorted(trained(generic_params(config), optimizer_of(config)))
    worst = {path: off for report in reports for path, off in report["off"].items() if not off <= CLOSE}
    assert not worst
    assert sum(report["count"][0] != 0 for report in reports) == 1
    for name in ("total", "count"):
        assert sum(report[name][0] for report in reports) == pytest.approx(reports[0][name][1], rel=1e-5)


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble", "DualPipeV"])
def test_balance_terms_and_counts_stay_where_the_layers_are(ranks: Ranks, schedule: str) -> None:
    reports = ranks(2)(gradients, "deepseek_v3", 5, schedule, True)
    check(reports, config_of("deepseek_v3", 5))
    assert all(report["counts"] for report in reports)
    for name in ("sequence_balance", "router_z"):
        parts = [report["terms"].get(name, [0.0, 0.0]) for report in reports]
        assert sum(part[0] for part in parts) == pytest.approx(max(part[1] for part in parts), rel=1e-5)


def test_edits_are_made_by_the_stage_that_has_the_layer(ranks: Ranks) -> None:
    check(ranks(2)(gradients, "llama_tied", 4, "1F1B", False, False, False, True), config_of("llama_tied", 4))


def test_a_term_that_a_stage_does_not_carry_shows(ranks: Ranks) -> None:
    for report in ranks(2)(gradients, "deepseek_v3", 4, "1F1B", True, False, True)[:1]:
        assert report["off"]["layers.1.mlp.router"] > 100 * CLOSE


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_loss_may_scale_the_terms_of_all_stages(ranks: Ranks, schedule: str) -> None:
    check(ranks(2)(gradients, "deepseek_v3", 5, schedule, False, True), config_of("deepseek_v3", 5))


def lengths(name: str, schedule: str) -> list[float]:
    """Lists of unequal rows and lengths, one after the other, added up; against all of their parts in one process.

    Of lengths that there are no more nothing is kept: torch's schedules hold what they receive in.
    """
    schedules, make = list[weakref.ref[Any]](), runner._schedule

    def watched(*given: Any) -> Any:
        made = make(*given)
        schedules.append(weakref.ref(made))
        return made

    config, rank = config_of(name, 4), dist.get_rank()
    loss, optimizer = loss_of(config, False), optimizer_of(config)
    pipe = pipeline(config, 2, schedule)
    whole = batch_of(config, 4)
    first = [tree.map(lambda t, i=i: t[2 * i : 2 * i + 1 + i % 2, : 11 - i], whole) for i in range(4)]
    second = fnmodels.split(whole, 4)
    params = share(generic_params(config), config, pipe, rank)
    of, without = pp.gradient_sums(loss, optimizer, pipe), pp.loss_sums(loss, pipe)
    with mock.patch.object(runner, "_schedule", watched):
        sums = added_to(of(params, first, divide=False), of(params, second, divide=False))
        for parts in (first, second, second):
            without(params, parts)
    kept = [schedule() is not None for schedule in schedules]
    assert kept == [False, True, False, True], kept
    of_rows = lambda params, batch: states_of(config, params, batch)[:, 0]  # noqa: E731
    with pytest.raises(ValueError, match="of 1 rows was padded to 2"):  # on both ranks, one of which alone has the rows
        pp.outputs(of_rows, pipe)(params, first)
    _, grads = expected(loss, config, [*first, *second])
    found = dict(zip(trained(params, optimizer), sums.grads, strict=True))
    return [max(differences(found, grads).values()), int(sums.count)]


def test_lists_of_unequal_lengths_and_sums_of_several_calls(ranks: Ranks) -> None:
    for name, schedule in (("llama_tied", "1F1B"), ("gpt_oss", "InterleavedZeroBubble")):
        reports = ranks(2)(lengths, name, schedule)
        assert max(off for off, _ in reports) < CLOSE
        assert sum(count > 0 for _, count in reports) == 1


def evaluated(name: str, schedule: str) -> list[float]:
    """Sum and count without gradients, between two steps of the same pipeline."""
    config, rank = config_of(name, 4), dist.get_rank()
    loss, optimizer = loss_of(config, False), optimizer_of(config)
    pipe = pipeline(config, 2, schedule)
    params, parts = share(generic_params(config), config, pipe, rank), fnmodels.split(batch_of(config, 4), 4)
    of, without = pp.gradient_sums(loss, optimizer, pipe), pp.loss_sums(loss, pipe)
    before = of(params, parts)
    without(params, parts)
    without(params, parts[:1])  # of another number, which the training schedule may refuse
    total, count, _ = without(params, parts[:1])
    after = of(params, parts)
    assert all(torch.equal(a, b) for a, b in zip(before.grads, after.grads, strict=True))
    assert not total.requires_grad
    one, number = loss(generic_params(config), parts[0])
    return [float(total), float(count), float(one), float(number)]


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_evaluation(ranks: Ranks, schedule: str) -> None:
    reports = ranks(2)(evaluated, "deepseek_v3", schedule)
    assert sum(total for total, *_ in reports) == pytest.approx(reports[0][2])
    assert sum(count for _, count, *_ in reports) == reports[0][3] > 0


def stepped(name: str, schedule: str) -> float:
    """Updates with the sums of a pipeline against `make_step`: norm and clipping count a tied embedding once."""
    config, rank = config_of(name, 4), dist.get_rank()
    loss, optimizer = loss_of(config, False), optimizer_of(config)
    pipe = pipeline(config, 2, schedule)
    batch = batch_of(config, 4)
    state = train.init_state(share(generic_params(config), config, pipe, rank), optimizer)
    of = pp.gradient_sums(loss, optimizer, pipe)
    one, step = train.init_state(generic_params(config), optimizer), train.make_step(loss, optimizer, clip=0.1)
    again = copies(config, pipe, rank)
    for _ in range(3):
        sums = of(state.params, fnmodels.split(batch, 4))
        paths = trained(state.params, optimizer)
        own = [g for path, g in zip(paths, sums.grads, strict=True) if path.split(".")[0] not in again]
        square = train.optim.global_norm(own).square()
        for value in (square, sums.total, sums.count):
            dist.all_reduce(value)
        scale = (0.1 / (square.sqrt() / sums.count + 1e-6)).clamp(max=1) / sums.count
        grads = dict(zip(paths, (grad * scale for grad in sums.grads), strict=True))
        found = with_paths(lambda path, _, grads=grads: grads.get(path), state.params)
        updates, opt_state = optimizer.update(found, state.opt_state, state.params)
        state = train.State(state.step + 1, train.apply_updates(state.params, updates), opt_state)
        one, metrics = step(one, batch)
        assert float(metrics["grad_norm"]) == pytest.approx(float(square.sqrt() / sums.count), rel=1e-5)
    whole = tree.flatten(one.params)
    return max(float((p - whole[path]).abs().max()) for path, p in tree.flatten(state.params).items())


@pytest.mark.parametrize("schedule", ["1F1B", "DualPipeV"])
def test_three_updates(ranks: Ranks, schedule: str) -> None:
    assert max(ranks(2)(stepped, "llama_tied", schedule)) < 1e-5


def narrow(name: str) -> list[Any]:
    """Parameters in bf16: hidden states travel in it, or in fp32 in Mamba 2; gradients add up in fp32."""
    config, rank = config_of(name, 4), dist.get_rank()
    loss, optimizer = loss_of(config, False), optimizer_of(config)
    params = tree.map(Tensor.bfloat16, generic_params(config))
    split = fnmodels.split(batch_of(config, 4), 4)
    one = gradient_sums(loss, optimizer)(params, split, divide=False)
    grads = dict(zip(trained(params, optimizer), one.grads, strict=True))
    worst = []
    for schedule in ("1F1B", "ZBVZeroBubble"):
        pipe = pipeline(config, 2, schedule)
        mine = share(params, config, pipe, rank)
        sums = pp.gradient_sums(loss, optimizer, pipe)(mine, split)
        assert all(grad.dtype == torch.float32 for grad in sums.grads)
        found = dict(zip(trained(mine, optimizer), sums.grads, strict=True))
        worst.append(max(off for path, off in differences(found, grads).items() if path != "embed_tokens"))
    return worst


@pytest.mark.parametrize("name", ["llama_tied", "mamba2", "gemma4_text_e"])
def test_gradients_of_bf16_parameters_add_up_in_fp32(ranks: Ranks, name: str) -> None:
    # Were they added up in bf16, they would be off by some 1e-3.
    assert max(max(worst) for worst in ranks(2)(narrow, name)) < CLOSE


def refused() -> list[str]:
    """What is said, on every rank, before anything is sent: if one of them waited, this would not end."""
    config = config_of("llama_tied", 4)
    loss, optimizer, batch = loss_of(config, False), optimizer_of(config), batch_of(config, 4)
    said = []

    def ask(schedule: str, parts: list[Batch]) -> None:
        pipe = pipeline(config, 2, schedule)
        params = share(generic_params(config), config, pipe, dist.get_rank())
        with mock.patch.object(runner, "_schedule", side_effect=AssertionError), pytest.raises(ValueError) as error:
            pp.gradient_sums(loss, optimizer, pipe)(params, parts)
        said.append(str(error.value))

    ask("1F1B", [batch])
    ask("Interleaved1F1B", fnmodels.split(tree.map(lambda t: t.repeat(5, *[1] * (t.ndim - 1)), batch), 5))
    ask("GPipe", [batch | {"tokens": batch["tokens"] + 10**6}])
    ask("GPipe", [batch | {"labels": batch["labels"] + 10**6}])
    ask("GPipe", [{name: t for name, t in batch.items() if name != "positions"}])
    with pytest.raises(ValueError) as error:
        pp.gradient_sums(loss, optimizer, pipeline(config, 3))
    return [*said, str(error.value)]


def test_refusals_come_before_any_communication(ranks: Ranks) -> None:
    ours, theirs = ranks(2)(refused)
    assert ours == theirs
    patterns = (
        "1F1B needs at least as many microbatches as stages, 2, not 1",
        "takes 5 microbatches in 2 rounds, which do not divide them: a multiple of 2 does",
        "The tokens go from 10",
        "labels.* is .*, but the vocabulary has",
        "The batch has no positions",
        "The pipeline has 3 ranks, but its process group 2",
    )
    for pattern, sentence in zip(patterns, ours, strict=True):
        assert re.search(pattern, sentence), sentence


# ------------------------------------------------------------------------------------------------ without ranks


def test_layers_of_stages() -> None:
    config = config_of("llama_tied", 7)
    even = pipeline(config, 3)
    assert even.layers == ((0, 3), (3, 5), (5, 7)) and even.ranks == (0, 1, 2) and even.size == 3
    looped = pipeline(config, 2, "LoopedBFS", virtual=3)
    assert looped.ranks == (0, 1, 0, 1, 0, 1) and looped.stages(1) == (1, 3, 5)
    assert pipeline(config, 2, "DualPipeV").ranks == (0, 1, 1, 0)
    assert pipeline(config, 2, split=[1, 6]).layers == ((0, 1), (1, 7))


def states_of(config: Any, params: Any, batch: Batch, **how: Any) -> Tensor:
    """The final hidden states, as a function of one's own makes them."""
    given = {name: batch[name] for name in ("positions", "segment_ids")}
    prepared = fnmodels.prepare(config, batch["tokens"], **given)
    found: Tensor = fnmodels.hidden(params, *prepared, config=config, kernel="math", **how)
    return found


def recorded_of(config: Any, function: Any) -> None:
    microbatches(as_loss(function), pipeline(config, 2, "GPipe"), generic_params(config), [batch_of(config, 1)])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda c: pipeline(c, 2, "GPipes"), "'GPipes'; it must be one of GPipe, 1F1B"),
        (lambda c: pipeline(c, 0), "one rank or more, not 0"),
        (lambda c: pipeline(c, 5), "5 ranks with 1 stage.* more than the model's 4 layers"),
        (lambda c: pipeline(c, 2, "Interleaved1F1B", virtual=3), "6 stages, more than the model's 4"),
        (lambda c: pipeline(c, 2, virtual=2), "1F1B has 1 stages per rank"),
        (lambda c: pipeline(c, 2, split=[4, 0]), "of at least 1, which add up to the model's 4"),
        (lambda c: pipeline(c, 2, split=[2, 1]), r"split is \[2, 1\]; it must be 2 numbers"),
        (lambda c: share({"layers": {"0": {}}}, c, pipeline(c, 2), 0), "need layer 1"),
        (lambda c: check_microbatches(pipeline(c, 2, "DualPipeV"), 3), "stages, 4, not 3"),
        (lambda c: train.mtp_loss({}, batch_of(c, 1), config=c), "llama has none"),
        (lambda c: recorded_of(c, lambda params, batch: None), "must run the model by fnmodels.hidden"),
        (
            lambda c: recorded_of(c, lambda params, batch: states_of(config_of("llama_tied", 5), params, batch)),
            "another",
        ),
        (lambda c: recorded_of(c, lambda *of: states_of(c, *of, taps=("layers.1.output",))), "cannot read the tap"),
        (
            lambda c: padding.padded({"tokens": torch.zeros(2, 3), "weights": torch.zeros(2, 4)}, 4),
            r"weights is \[2, 4\] beside tokens \[2, 3\]",
        ),
    ],
)
def test_what_does_not_fit_raises(make: Callable[[Any], Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make(config_of("llama_tied", 4))


DEEP = [case for case in cases() if case.config.num_hidden_layers > 1]


@pytest.mark.parametrize("case", DEEP, ids=str)
def test_shares_of_every_family_are_the_whole(case: Any) -> None:
    """Each leaf is on one rank, a tied embedding and a looped layer on two; stage after stage makes the bits of all."""
    config, params = case.config, generic_params(case.config)
    pipe = pipeline(config, 2, "GPipe")
    shares = [share(params, config, pipe, rank) for rank in range(2)]
    paths = [(rank, path) for rank in range(2) for path in tree.flatten(shares[rank])]
    once = [path for rank, path in paths if entry_of(path, copies(config, pipe, rank)) is None]
    assert sorted(once) == sorted(tree.flatten(params))
    batch = batch_of(config, 1)
    given = {name: batch[name] for name in ("positions", "segment_ids")}
    prepared = fnmodels.prepare(config, batch["tokens"], **given, length=24)
    logits_of = lambda params, _: fnmodels.forward(params, *prepared, config=config, kernel="math")  # noqa: E731
    loss, result = as_loss(logits_of), lambda logits: (logits, None, {})
    (part,) = microbatches(loss, pipe, shares[0], [batch])
    staged = StagedLoss(loss, pipe, result=result)
    sent, _, _ = staged.run(0, shares[0], {}, part)
    found, _, _ = staged.run(1, shares[1], sent, part)
    assert torch.equal(found["total"], fnmodels.forward(params, *prepared, config=config, kernel="math"))


def test_what_several_stages_read_is_on_each() -> None:
    biased = next(case.config for case in cases() if case.name == "mpnet")
    assert holders(biased, pipeline(biased, 2)) == {"embed_tokens": (0, 1), "relative_bias": (0, 1)}
    both = t5.Config.from_hf(T5 | {"num_decoder_layers": 2})
    pipe = pipeline(both, 4)
    assert pipe.layers == ((0, 1), (1, 2), (2, 3), (3, 4))
    assert holders(both, pipe) == {
        "decoder.relative_bias": (2, 3),
        "embed_tokens": (0, 2, 3),
        "encoder.relative_bias": (0, 1),
    }
    assert held(both, 2, 3) >= {"encoder.norm"} and copies(both, pipe, 3) == {"decoder.relative_bias", "embed_tokens"}


def test_padding_to_a_bucket() -> None:
    ids, labels = torch.tensor([[1, 1]]), torch.tensor([[4, -100]])
    batch = {"tokens": ids + 2, "segment_ids": ids, "labels": labels, "routing": torch.ones(1, 2, 1, 3)}
    longer = padding.padded(batch, 4)
    assert longer["tokens"].tolist() == [[3, 3, 0, 0]] and longer["segment_ids"].tolist() == [[1, 1, 0, 0]]
    assert longer["labels"].tolist() == [[4, -100, -100, -100]] and longer["routing"].shape == (1, 4, 1, 3)
    assert padding.padded(batch, 2) is batch
    config = dataclasses.replace(config_of("llama_tied", 2), vocab_size=64)
    assert [padding.clear_length(length, 4, config) for length in (57, 61, 64)] == [60, 68, 68]  # no [B, V] is cut
    cut = functools.partial(padding.unpadded, larger=(2, 4), size=(1, 3))
    assert cut(torch.ones(2, 4, 5)).shape == (1, 3, 5) and cut(torch.ones(3, 4)).shape == (3, 4)
    for shape in ((2, 5), (2,)):
        with pytest.raises(ValueError, match="1 rows was padded to 2"):
            cut(torch.ones(shape))
        assert padding.unpadded(torch.ones(shape), larger=(2, 4), size=(2, 3)).shape == shape
    more = padding.padded(batch, 2, 2)
    assert more["labels"].tolist() == [[4, -100], [-100, -100]] and more["routing"][:, 0, 0, 0].tolist() == [1, 0]
