"""What `train.simulate` tells, against formulas and one real process; against real ranks: tests/parallel."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fnmodels
import params as P
from fnmodels import tree
from tests.support.cases import cases
from train.parallel import Mesh
from train.parallel.pipeline import timeline
from train.parallel.pipeline.schedule import SCHEDULES, Pipeline, pipeline
from train.parallel.pipeline.timeline import idle, order, peak
from train.simulate import RankFacts, Work, main, shown, simulate, table


def config_of(name: str, layers: int) -> Any:
    """A variant with as many layers, all of its last one's kind but the first."""
    config = next(case.config for case in cases() if case.name == name)
    kinds = (config.layer_kinds[0], *config.layer_kinds[-1:] * (layers - 1))
    return dataclasses.replace(config, num_hidden_layers=layers, layer_kinds=kinds)


def one(config: Any, mesh: str = "", **work: Any) -> RankFacts:
    return simulate(config, Mesh.parse(mesh), Work(**{"rows": 4, "length": 64, **work}))[0]


# ------------------------------------------------------------------------------------------------ the pipeline


@pytest.mark.parametrize(("ranks", "parts"), [(2, 4), (4, 4), (4, 12)])
def test_waiting_is_what_the_papers_say(ranks: int, parts: int) -> None:
    config = config_of("llama_tied", 4 * ranks)

    def waits(schedule: str, **options: Any) -> float:
        pipe = pipeline(config, ranks, schedule, **options)
        return max(idle(pipe, [order(pipe, rank, parts) for rank in range(ranks)]))

    plain = (ranks - 1) / (parts + ranks - 1)  # arXiv 1811.06965, 2104.04473
    assert waits("GPipe") == pytest.approx(plain)
    assert waits("1F1B") == pytest.approx(plain)
    assert waits("Interleaved1F1B", virtual=2) == pytest.approx((ranks - 1) / (2 * parts + ranks - 1))
    assert waits("ZBVZeroBubble") < waits("Interleaved1F1B", virtual=2)  # arXiv 2401.10241


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_order_does_everything_once(schedule: str) -> None:
    pipe = pipeline(config_of("llama_tied", 8), 4, schedule)
    for rank in range(4):
        actions = order(pipe, rank, 8)
        forward = [(stage, part) for kind, stage, part in actions if kind == "F"]
        back = [(stage, part) for kind, stage, part in actions if kind in "BW"]
        every = sorted((stage, part) for stage in pipe.stages(rank) for part in range(8))
        assert sorted(forward) == sorted(back) == every
        assert peak(actions, dict.fromkeys(pipe.stages(rank), 0)) == 0


def test_what_is_in_flight() -> None:
    config = config_of("llama_tied", 4)
    work: dict[str, Any] = {"rows": 8, "microbatches": 8}
    held = {s: simulate(config, Mesh(pp=4), Work(8, 64, 8, s)) for s in ("GPipe", "1F1B")}
    stream = 64 * config.hidden_size * 2
    layer = held["1F1B"][2].held["activations"] // 2  # two of its one layer, each with what it has sent
    assert [rank.held["activations"] for rank in held["1F1B"][:3]] == [4 * layer, 3 * layer, 2 * layer]
    assert [rank.held["activations"] for rank in held["GPipe"][:3]] == [8 * layer] * 3
    last = held["1F1B"][3].held["activations"]
    assert one(config, rows=1).held["activations"] == 3 * (layer - stream) + last
    full = simulate(config, Mesh(pp=4), Work(**work, length=64, remat="full"))
    # A layer's input and what is sent, and the layer that is computed again.
    assert full[0].held["activations"] == 4 * 2 * stream + layer - stream
    alone = one(config, rows=8, microbatches=8)  # without a pipeline one after the other
    assert alone.held["activations"] == one(config, rows=1).held["activations"]


# ------------------------------------------------------------------------------------------------ one rank


def test_bytes_of_a_plan() -> None:
    config = config_of("llama_tied", 4)
    numbers = P.count(config)
    alone, four = one(config), one(config, "fsdp=4")
    assert alone.held["parameters"] == alone.held["gradients"] == 4 * numbers == alone.held["optimizer"] // 2
    odd = 4 * config.vocab_size * config.hidden_size  # 61 rows, which 4 does not divide; the columns are
    assert four.held["parameters"] == numbers and odd % 4 == 0
    assert not alone.messages
    narrow = one(config, "fsdp=4", dtype=torch.bfloat16)
    assert narrow.held["gathered weights"] == 2 * numbers  # no remat: all layers' stay
    remat = one(config, "fsdp=4", dtype=torch.bfloat16, remat="full")
    layers = numbers - config.vocab_size * config.hidden_size - config.hidden_size
    assert remat.held["gathered weights"] == 2 * (numbers - layers + layers // 4)
    gathers = [message for message in remat.messages if message.kind == "all_gather"]
    assert [(m.count, m.bytes) for m in gathers] == [(2 * 4 + 1, 2 * (2 * layers + numbers - layers))]


def test_experts_are_divided_and_the_rest_is_not() -> None:
    config = dataclasses.replace(config_of("deepseek_v3", 3), moe_intermediate_size=16)
    spec = tree.flatten(fnmodels.family_of(config).spec(config))
    experts = sum(leaf.shape[0] * leaf.shape[1] * leaf.shape[2] for path, leaf in spec.items() if ".experts." in path)
    assert one(config).held["parameters"] - one(config, "ep=3", rows=3).held["parameters"] == 4 * experts * 2 // 3


def test_a_thousand_ranks_in_seconds() -> None:
    work = Work(1024 * 16, 4096, 16, "1F1B", remat="full")
    found = simulate(fnmodels.preset("deepseek-v3"), Mesh(pp=8, ep=64, fsdp=16), work)
    assert len(found) == 8 and sum(hi - lo for rank in found for lo, hi in rank.layers) == 61
    whole = sum(rank.held["parameters"] for rank in found)
    assert whole > 4 * 671e9 / 1024  # and copies of what is not sharded over all


@pytest.mark.parametrize(
    ("mesh", "work", "sentence"),
    [
        ("fsdp=3", {}, "4 rows do not divide into 1 microbatch on each of 3 ranks .* give a multiple of 3"),
        ("cp=3", {}, "Rows of 64 tokens do not divide by cp = 3"),
        ("ep=2", {}, "ep is 2, but a llama has no experts"),
        ("pp=8", {"microbatches": 4}, "8 stages, more than the model's 4 layers"),
        ("pp=4", {"microbatches": 2}, "1F1B needs at least as many microbatches as stages, 4, not 2"),
        ("tp=2", {}, "vocab is 61"),
        ("", {"remat": "some"}, "remat is 'some'"),
        ("", {"remat": "selective"}, 'remat="selective" is not simulated'),
    ],
)
def test_what_does_not_fit_raises(mesh: str, work: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        one(config_of("llama_tied", 4), mesh, **work)


# ------------------------------------------------------------------------------------------------ the command


def test_command(rendered: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "memory.png"
    arguments = ["--preset", "llama-3.2-1b", "--mesh", "pp=2,fsdp=2", "--length", "512", "--picture", str(picture)]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "llama-3.2-1b on pp=2,fsdp=2, 4 ranks" in said and "It fits: at most" in said
    for kind in ("all_gather", "reduce_scatter", "send", "tied gradients"):
        assert kind in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*arguments[:-2], "--memory", "2"]) == 0
    assert re.search(r"DOES NOT FIT: 2 of 2 pipeline ranks \(pp 0, 1\) need more than 2.0 GiB", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--preset", "llama-3.1-9b"], "no preset"),
        (["--preset", "llama-3.1-8b", "--mesh", "fdsp=2"], "no dimension of a mesh"),
        (["--preset", "llama-3.1-8b", "--schedule", "2F2B"], "no schedule"),
        (["--preset", "llama-3.1-8b", "--mesh", "fsdp=2", "--rows", "3"], "give a multiple of 2"),
        (["--preset", "llama-3.1-8b", "--mesh", "fsdp=2", "--virtual", "2"], "the mesh fsdp=2 has none: add a pp"),
        (["--preset", "llama-3.1-8b", "--picture", "memory.doc"], "ends in .png or .svg"),
        (["--preset", "gpt-oss-20b", "--mesh", "tp=16"], "180 elements wide"),
        (["--preset", "gpt2", "--length", "1025"], "longer than the 1024 positions"),
    ],
)
def test_errors_are_one_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_words() -> None:
    assert [shown(size) for size in (12, 2048, 3 * 2**20, 5000 * 2**30)] == [
        "12 B",
        "2.0 KiB",
        "3.0 MiB",
        "5,000.0 GiB",
    ]
    facts = RankFacts(0, ((0, 2), (6, 8)), dict.fromkeys(one(config_of("llama_tied", 4)).held, 0), (), 0.25)
    assert "0-1 6-7" in table([facts], None) and "25.0%" in table([facts], None)
    tight = dataclasses.replace(facts, held={**facts.held, "buffers": 95})
    assert table([tight], 100).endswith("(see docs/parallel.md): at most 95 B of 100 B.")
    assert "DOES NOT FIT: each rank needs more than 90 B, up to 95 B, most of it buffers." in table([tight], 90)


def test_a_schedule_of_unknown_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "SINGLE", (*timeline.SINGLE, "2F2B"))
    with pytest.raises(ValueError, match=r"The order of 2F2B is not known; .* those of GPipe and 1F1B are"):
        order(Pipeline(None, "2F2B", ((0, 1), (1, 2)), (0, 1)), 0, 4)
