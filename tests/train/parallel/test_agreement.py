"""What one rank cannot use of a batch all ranks refuse, in one sentence and before anything is sent.

Every entry of the batch of every loss is spoiled in the rows of one rank alone, and all ranks must do the same: refuse
it with the same words, or take a step. A rank that raised alone would leave the others waiting, which fails the test.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
import params as P
import train
from fnmodels import bert, tree
from fnmodels.models.common.family import parsed
from tests.support import encoder_losses
from tests.support.cases import generic_params
from tests.support.encoder_losses import SETTINGS, SIZES
from tests.support.one_process import batch as decoder_batch
from tests.support.one_process import config_of, even, loss_of
from tests.support.ranks_pool import Ranks, devices
from train.comm import collectives
from train.engine import Engine
from train.optim.base import with_paths
from train.parallel import Mesh, Strategy
from train.parallel import step as step_over
from train.parallel.pipeline.stages import stage_plan
from train.parallel.placement import rules_of

Batch = dict[str, Tensor]
ONE = 900_000_000  # a number that no model knows


def headed(head: str, loss: Callable[..., Any], values: Callable[[Batch], Batch], **sizes: Any) -> Any:
    """(config, loss, batch) of a BERT with this head on the documents of `encoder_losses.setting`."""
    config = bert.Config(vocab_size=64, max_position_embeddings=16, head=head, **SIZES, **sizes)
    batch = joined(encoder_losses.setting("classification")[2])
    return config, functools.partial(loss, config=config), batch | values(batch)


def joined(halves: list[Batch]) -> Batch:
    return {name: torch.cat([half[name] for half in halves]) for name in halves[0]}


def of_decoder(name: str, **more: Any) -> Any:
    config = config_of(name)
    batch = decoder_batch() | {entry: make(config) for entry, make in more.items()}
    return config, loss_of(name), batch


def replayed(config: Any) -> Tensor:
    """The first experts for every token of every layer."""
    sparse = sum(kind.routed for kind in parsed(fnmodels.family_of(config).kinds(config)))
    return torch.arange(config.num_experts_per_tok).expand(8, 16, sparse, -1).contiguous()


def learned_positions() -> Any:
    """GPT-2, with token weights."""
    config = even("gpt2_numbered")
    batch = decoder_batch() | {"weights": torch.ones(8, 16)}
    return config, functools.partial(train.next_token_loss, config=config), batch


def mtp() -> Any:
    return config_of("mtp"), loss_of("mtp"), train.losses.look_ahead(decoder_batch(), 2)


def taught() -> Any:
    """By a teacher that knows fewer positions."""
    config, theirs = config_of("llama"), dataclasses.replace(even("gpt2_numbered"), max_position_embeddings=17)
    teacher = functools.partial(train.distill, teacher=generic_params(theirs), teacher_config=theirs, chunk=7)
    return config, functools.partial(teacher, config=config), decoder_batch()


def sampled() -> Any:
    """A policy of log-probabilities with a temperature of each row."""
    config = config_of("llama")
    loss = train.logprob_loss(
        lambda logp, _, b: ((b["advantages"] * logp).sum(), (b["labels"] >= 0).sum()),
        config=config,
        temperature="temperature",
    )
    draw = torch.Generator().manual_seed(0)
    advantages = torch.randn(8, 16, generator=draw)
    return config, loss, decoder_batch() | {"temperature": torch.full((8,), 0.7), "advantages": advantages}


def kinds() -> dict[str, Callable[[], Any]]:
    """{name: (config, loss, batch)}: every loss of `train`, and every form of batch."""
    names = ("classification", "none", "pairs", "sound", "images", "siglip", "pictures", "flow", "bert", "gemma4")
    made: dict[str, Callable[[], Any]] = {name: functools.partial(of_setting, name) for name in names}
    width = {"num_labels": 4}
    targets = lambda batch: {"targets": torch.full((*batch["tokens"].shape, 4), 0.25)}  # noqa: E731
    several, number = {**width, "problem_type": "multi_label_classification"}, {**width, "problem_type": "regression"}
    classes = lambda batch: {"labels": batch["segment_ids"].clamp(max=3)}  # noqa: E731
    made |= {
        "labels": functools.partial(headed, "classification", train.classification_loss, targets, **several),
        "numbers": functools.partial(headed, "classification", train.classification_loss, targets, **number),
        "tokens": functools.partial(headed, "tokens", train.losses.token_classification_loss, classes, **width),
        "answers": functools.partial(headed, "question_answering", train.losses.answer_loss, classes, num_labels=2),
        "positions": learned_positions,
        "experts": functools.partial(of_decoder, "gpt_oss", routing=replayed),
        "mtp": mtp,
        "taught": taught,
        "sampled": sampled,
    }
    return made


def of_setting(name: str) -> Any:
    config, loss, halves = SETTINGS[name]()
    return config, loss, joined(halves)


def spoiled(batch: Batch, name: str, value: float) -> Batch:
    """The batch with this value in one place of the last quarter of its rows, which the last rank has."""
    given, changed = batch[name], batch[name].clone()
    row = len(given) - 1
    at = (row, *[0] * (given.ndim - 1))
    for owners in ("decoder_segment_ids", "image_ids", "text_segment_ids", "segment_ids"):  # no padding
        if given.ndim > 1 and owners in batch and batch[owners].shape == given.shape[:2]:
            at = (row, int((batch[owners][row] > 0).nonzero()[0]), *[0] * (given.ndim - 2))
            break
    changed[at] = value
    return {**batch, name: changed}


def placed(config: Any, mesh: Mesh, how: Strategy) -> Any:
    plan = P.plan(fnmodels.family_of(config).spec(config), rules_of(mesh, config), devices(mesh))
    plan = stage_plan(plan, config, devices(mesh), how) if mesh.pp > 1 else plan
    whole = tree.flatten(generic_params(config))
    return with_paths(lambda path, how: how.distribute(whole[path][how.local_box()].clone()), plan)


def outcome(call: Callable[[], Any]) -> str:
    """What a call says; other errors than refusals fail the test."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return "runs"


def faults_of(kind: str, over: str, rows: str) -> dict[str, str]:
    """{entry and its fault: what this rank says}."""
    (config, loss, batch), mesh = kinds()[kind](), Mesh.parse(over)
    how = Strategy(rows=rows, schedule="GPipe")
    held = placed(config, mesh, how)
    evaluate = train.make_eval_step(loss, mesh=mesh, strategy=how)
    rank = torch.distributed.get_rank()

    def mine(given: Batch) -> Batch:
        return given if rows == "whole" else {name: x.chunk(mesh.rows)[rank % mesh.rows] for name, x in given.items()}

    sent: list[str] = []

    def said(given: Batch) -> str:
        sent.clear()
        words = outcome(lambda: evaluate(held, mine(given)))
        exchanged = "in the same microbatch" in words  # of pairs, whose halves may lie on two ranks
        assert words == "runs" or exchanged or not sent, (words, sent)
        return words

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_AllGather", "_Sum", "_ReduceScatter"):
            kind_of = getattr(collectives, name)
            patch.setattr(kind_of, "run", noted(kind_of.run, name, sent))
        return {"as it is": said(batch)} | faults(batch, said, REFUSED[kind])


def noted(run: Callable[..., Any], name: str, sent: list[str]) -> Callable[..., Any]:
    def noting(*args: Any) -> Any:
        sent.append(name)
        return run(*args)

    return noting


def faults(batch: Batch, said: Callable[[Batch], str], refused: dict[str, tuple[float, ...]]) -> dict[str, str]:
    """Two values of each entry that is refused; of the others, with which a step is taken, one."""
    found: dict[str, str] = {}
    for name, tensor in batch.items():
        values = (float("nan"), -1.0) if tensor.is_floating_point() else (ONE, -7)
        values = values if name in refused else values[:1]
        found |= {f"{name} {value}": said(spoiled(batch, name, value)) for value in values}
    return found


# {kind: the entries that are refused, and with which values}
REFUSED: dict[str, dict[str, tuple[float, ...]]] = {
    "classification": {"tokens": (ONE, -7), "positions": (ONE, -7), "labels": (ONE, -7)},
    "none": {"tokens": (ONE, -7), "positions": (ONE, -7), "labels": (-7,), "roles": (-7,)},
    "pairs": {"tokens": (ONE, -7), "decoder_tokens": (ONE, -7), "labels": (ONE, -7)},
    "sound": {"positions": (ONE, -7), "decoder_tokens": (ONE, -7), "decoder_positions": (ONE, -7), "labels": (ONE, -7)},
    "images": {"tokens": (ONE, -7), "positions": (ONE, -7), "segment_ids": (ONE,), "labels": (-7,)},
    "siglip": {"tokens": (ONE, -7), "positions": (ONE, -7), "segment_ids": (ONE,)},
    "pictures": {"labels": (ONE, -7)},
    "flow": {"segment_ids": (ONE,), "text_segment_ids": (ONE,)},
    "bert": {"tokens": (ONE, -7), "labels": (ONE, -7), "positions": (ONE, -7)},
    "gemma4": {"tokens": (ONE, -7), "labels": (ONE, -7), "patch_positions": (ONE, -7)},
    "labels": {"tokens": (ONE, -7), "positions": (ONE, -7), "targets": (-1.0,)},
    "numbers": {"tokens": (ONE, -7), "positions": (ONE, -7)},
    "tokens": {"tokens": (ONE, -7), "positions": (ONE, -7), "labels": (ONE, -7)},
    "answers": {"tokens": (ONE, -7), "positions": (ONE, -7)},
    "positions": {"tokens": (ONE, -7), "labels": (ONE, -7), "positions": (ONE, -7)},
    "experts": {"tokens": (ONE, -7), "labels": (ONE, -7), "routing": (ONE, -7)},
    "mtp": {"tokens": (ONE, -7), "labels": (ONE, -7), "next_tokens": (ONE, -7), "next_labels": (ONE, -7)},
    "taught": {"tokens": (ONE, -7), "labels": (ONE, -7), "positions": (ONE, -7)},
    "sampled": {"tokens": (ONE, -7), "labels": (ONE, -7), "temperature": (-1.0,)},
}


def checked(kind: str, found: list[dict[str, str]]) -> None:
    """All ranks say the same, and refuse what the table has, with the value."""
    first, *others = found
    for name, said in first.items():
        assert all(other[name] == said for other in others), (name, [of_rank[name] for of_rank in found])
    assert first["as it is"] == "runs", first["as it is"]
    for name, values in REFUSED[kind].items():
        for value in values:
            said = first[f"{name} {value}"]
            assert str(int(value)) in said or "captions" in said, (name, said)


@pytest.mark.parametrize("kind", kinds())
def test_an_entry_of_a_batch_that_one_rank_cannot_use_is_refused_by_all(ranks: Ranks, kind: str) -> None:
    found = ranks(2)(faults_of, kind, "fsdp=2", "whole")
    checked(kind, found)
    refused = [f"{name} {value}" for name, values in REFUSED[kind].items() for value in values]
    assert all(found[0][fault].startswith("Process 1: ") for fault in refused)


STAGED = [kind for kind in kinds() if kind not in ("images", "siglip", "gemma4")]  # towers have no stages


@pytest.mark.parametrize("kind", STAGED)
def test_an_entry_that_one_stage_cannot_use_is_refused_by_all(ranks: Ranks, kind: str) -> None:
    """The first stage reads tokens, the last one labels."""
    checked(kind, ranks(2)(faults_of, kind, "pp=2", "whole"))


@pytest.mark.parametrize("kind", ["pairs", "tokens", "experts"])
def test_an_entry_of_one_rank_of_a_stage_is_refused_by_all(ranks: Ranks, kind: str) -> None:
    checked(kind, ranks(4)(faults_of, kind, "pp=2,dp=2", "whole"))


OWN = [
    "none",
    "labels",
    "positions",
    "experts",
    "mtp",
    "taught",
    "sampled",
]  # a decoder and encoders, by each form of loss


@pytest.mark.parametrize(
    ("kind", "mesh"), [*((kind, "fsdp=2") for kind in OWN), *((kind, "pp=2,fsdp=2") for kind in ("experts", "none"))]
)
def test_an_entry_of_own_rows_is_refused_by_all(ranks: Ranks, kind: str, mesh: str) -> None:
    checked(kind, ranks(Mesh.parse(mesh).world)(faults_of, kind, mesh, "own"))


def structures_of(kind: str) -> dict[str, str]:
    """{entry and what is wrong with it on the last rank alone: what this rank says}."""
    (config, loss, batch), mesh, how = kinds()[kind](), Mesh(fsdp=2), Strategy(rows="own")
    held = placed(config, mesh, how)
    evaluate = train.make_eval_step(loss, mesh=mesh, strategy=how)
    last = torch.distributed.get_rank() == 1
    own = {name: x.chunk(2)[int(last)] for name, x in batch.items()}
    found = {}
    for name, x in own.items():
        wrong: dict[str, Batch] = {
            "missing": {entry: other for entry, other in own.items() if entry != name},
            "dtype": {**own, name: x.int() if x.dtype == torch.int64 else x.double().half()},
            "shape": {**own, name: x[..., None].expand(*x.shape, 2)},
            "length": {**own, name: x[:, 1:] if x.ndim > 1 else x[1:]},
            "list": {**own, name: x.tolist()},
        }
        for what, given in wrong.items():
            found[f"{name} {what}"] = outcome(functools.partial(evaluate, held, given if last else own))
    return found


@pytest.mark.parametrize("kind", ["classification", "experts", "sampled"])
def test_an_entry_that_is_missing_or_of_another_form_on_one_rank_is_refused_by_all(ranks: Ranks, kind: str) -> None:
    first, second = ranks(2)(structures_of, kind)
    assert first == second
    assert not {name for name, said in first.items() if said == "runs"}


def pairs_without_partners() -> dict[str, list[str]]:
    """What is said of a caption, an image and a query without a partner in the rows of the last rank."""
    found = {}
    for kind, name, change in (
        ("images", "segment_ids", lambda ids: ids.where(ids != 2, 0)),
        ("images", "image_ids", lambda ids: ids.where(ids != 2, 0)),
        ("images", "labels", lambda labels: labels.where(labels != 3, -100)),
        ("siglip", "segment_ids", lambda ids: ids.where(ids != 2, 0)),
        ("none", "labels", lambda labels: labels.where(labels != 2, 7)),
        ("none", "roles", lambda roles: roles.where(roles != 0, 1)),
    ):
        config, loss, batch = kinds()[kind]()
        half = len(batch[name]) // 2
        spoilt = {**batch, name: torch.cat((batch[name][:half], change(batch[name][half:])))}
        meshes = ["fsdp=2"] if kind != "none" else ["fsdp=2", "pp=2"]
        for mesh in map(Mesh.parse, meshes):
            evaluate = train.make_eval_step(loss, mesh=mesh, strategy=Strategy(schedule="GPipe"))
            held = placed(config, mesh, Strategy(schedule="GPipe"))
            found[f"{kind} {name} {mesh}"] = outcome(functools.partial(evaluate, held, spoilt))
    return found


def test_a_caption_an_image_and_a_query_without_a_partner_are_refused_by_all(ranks: Ranks) -> None:
    first, second = ranks(2)(pairs_without_partners)
    assert first == second
    assert first["images segment_ids fsdp=2"].startswith("Process 1: The batch has 1 captions, 2 images and 2 labels")
    assert first["images image_ids fsdp=2"].startswith("Process 1: The batch has 2 captions, 1 images and 2 labels")
    assert first["siglip segment_ids fsdp=2"].startswith("Process 1: The batch has 1 captions")
    assert "positives here; it needs exactly one" in first["none labels fsdp=2"] == first["none labels pp=2"]


def other_calls() -> list[str]:
    """What an engine says of a batch for training, and of one for log-probabilities."""
    config, loss, batch = kinds()["positions"]()
    engine = Engine(config, placed(config, Mesh(fsdp=2), Strategy()), train.sgd(0.1), mesh=Mesh(fsdp=2))
    wrong = spoiled(batch, "positions", ONE)
    logprobs = functools.partial(train.token_logprobs, config=config)
    calls = [lambda: engine.forward_backward([batch, wrong], loss), lambda: engine.infer([wrong], logprobs)]
    step = train.make_step(loss, train.sgd(0.1), mesh=Mesh(fsdp=2), accumulate=2)
    calls.append(lambda: step(engine.state, wrong))
    return [outcome(call) for call in calls]


def test_engines_and_steps_refuse_alike(ranks: Ranks) -> None:
    first, second = ranks(2)(other_calls)
    assert first == second
    assert all(said.startswith("Process 1: The positions go from 0 to 900000000") for said in first)


def unchecked() -> list[str]:
    """A planted fault: no rank checks its rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_over, "check_of", lambda function: lambda batch, config: None)
        return [faults_of("pairs", "fsdp=2", "whole")["decoder_tokens -7"]]


def test_a_rank_that_checks_nothing_is_seen(ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match="rank"):
        ranks(2)(unchecked)
