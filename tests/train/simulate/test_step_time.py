"""The time of a step by `train.simulate`: by hand for small cases, and published runs of large models."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import fnmodels
from fnmodels.inputs.rules import Causal, Everything, Window
from train.parallel import Mesh
from train.simulate import MACHINES, Link, Machine, Work, main, search, step_time
from train.simulate.activations import layer_kept, microbatch, seen

# products alone: everything else is free
IDEAL = Machine(1e12, 1e12, float("inf"), float("inf"), 0.0, 8, Link(float("inf"), 0.0), Link(float("inf"), 0.0))
LLAMA = fnmodels.preset("llama-3.2-1b")


def scaled(**changes: Any) -> Machine:
    return dataclasses.replace(IDEAL, **changes)


def test_products_are_those_of_the_formula() -> None:
    """2 FLOPs per weight and token forward, 4 backward; attention 2 per pair, head and width of queries and values."""
    work = Work(rows=2, length=64)
    layer = layer_kept(microbatch(LLAMA, Mesh(), work), 0).forward
    block = 2048 * (2048 + 512 + 512 + 2048 + 3 * 8192)
    assert layer.products == 2 * 128 * block
    assert layer.attention == 2 * 2 * 64 * 32 * (64 + 64) * seen(Causal(), 64) and layer.number > 10
    took = step_time(LLAMA, Mesh(), work, IDEAL)
    weights = 16 * block + 128256 * 2048  # the head's too
    assert took.seconds == pytest.approx(6 * 128 * weights / 1e12)
    full = step_time(LLAMA, Mesh(), dataclasses.replace(work, remat="full"), IDEAL)
    assert full.seconds == pytest.approx((6 * 128 * weights + 2 * 128 * 16 * block) / 1e12)
    assert full.flops == took.flops and full.utilization < took.utilization


def test_experts_count_those_that_are_chosen() -> None:
    config = fnmodels.preset("mixtral-8x7b")
    layer = layer_kept(microbatch(config, Mesh(), Work(1, 64)), 0).forward
    assert layer.products == 2 * 64 * (4096 * (4096 + 2 * 1024 + 4096 + 8) + 2 * 3 * 4096 * 14336)


def test_how_many_keys_a_query_sees() -> None:
    assert seen(Everything(), 128) == 128
    assert seen(Causal(), 128) == 65  # of positions 1, 3, 5 ...
    assert seen(Causal() & Window(16), 4096) == pytest.approx(16)


@pytest.mark.parametrize(("overlap", "waits"), [((), 66.0), (("tp",), 0.0)])
def test_messages_are_added_or_hidden(overlap: tuple[str, ...], waits: float) -> None:
    """All-reduces of hidden states over tp, 4 per layer and 2 at the ends, in rings that send each byte once.

    The link takes a second for each. Norms and the statistics of the loss are small beside them.
    """
    work = Work(rows=2, length=64, dtype=torch.float32)
    plain = step_time(LLAMA, Mesh(tp=2), work, IDEAL)
    size = 128 * 2048 * 4
    slow = scaled(near=Link(size, 0.0), overlap=overlap, products=1e6)  # computing takes longer than any message
    took = step_time(LLAMA, Mesh(tp=2), work, slow)
    assert plain.exposed == 0
    assert took.exposed == pytest.approx(waits, rel=0.01)


def test_links_of_a_node_are_those_of_the_innermost_dimensions() -> None:
    mesh, near, far = Mesh(pp=2, fsdp=4, tp=8), Link(2.0, 0.0), Link(1.0, 0.0)
    machine = scaled(near=near, far=far, links={"pp": Link(3.0, 0.0)})
    assert [machine.link(mesh, name) for name in ("tp", "fsdp", "pp")] == [near, far, Link(3.0, 0.0)]
    with pytest.raises(ValueError, match="'data' is no dimension of a mesh; there are pp"):
        scaled(links={"data": near})


def test_a_pipeline_waits_and_overlaps() -> None:
    """As many stages as ranks, with equal layers: (n - 1) / (m + n - 1) of the step is idle, but for the head."""
    config = dataclasses.replace(LLAMA, vocab_size=128)
    took = step_time(config, Mesh(pp=4), Work(8, 64, microbatches=8), IDEAL)
    assert took.idle / took.seconds == pytest.approx(3 / 11, rel=0.01)
    sends = step_time(config, Mesh(pp=4), Work(8, 64, microbatches=8), scaled(near=Link(1e9, 0.01)))
    assert sends.seconds > took.seconds + 6 * 0.01


def test_the_update_is_that_of_the_shards() -> None:
    work, slow = Work(4, 64), scaled(memory=1e9)
    alone, shared = (step_time(LLAMA, mesh, work, slow).update for mesh in (Mesh(), Mesh(fsdp=4)))
    assert alone == pytest.approx(32 * 1_235_814_400 / 1e9) and shared == pytest.approx(alone / 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "rows", "length", "parts", "published"),
    [
        ("pp=16,fsdp=64,tp=8", 2048, 8192, 32, 430e12),
        ("pp=16,fsdp=128,tp=8", 2048, 8192, 16, 400e12),
        ("pp=16,fsdp=8,cp=16,tp=8", 128, 131072, 16, 380e12),
    ],
)
def test_llama_3_405b(mesh: str, rows: int, length: int, parts: int, published: float) -> None:
    """FLOP/s per H100 of arXiv 2407.21783, Table 4, within 25%.

    There weights are gathered once per step, and each rank of tp sends its part of the positions to the next stage.
    """
    machine = dataclasses.replace(MACHINES["h100"], links={"pp": Link(8 * 50e9, 15e-6)})
    work = Work(rows, length, parts, "Interleaved1F1B", virtual=7, sync="step")
    took = step_time(fnmodels.preset("llama-3.1-405b"), Mesh.parse(mesh), work, machine)
    assert took.flops_per_device == pytest.approx(published, rel=0.25)


@pytest.mark.slow
def test_deepseek_v3() -> None:
    """180,000 H800 hours for a trillion tokens on 2,048 devices (arXiv 2412.19437), within 25%.

    There products are fp8, at 1.5 times the rate of bf16 here, and a schedule of two directions hides the exchange.
    """
    h800 = MACHINES["h800"]
    machine = dataclasses.replace(h800, products=1.5 * h800.products, overlap=(*h800.overlap, "ep"))
    work = Work(15360, 4096, 120, "1F1B", sync="step")
    took = step_time(fnmodels.preset("deepseek-v3"), Mesh.parse("pp=16,fsdp=2,ep=64"), work, machine)
    assert 1e12 / took.tokens_per_second == pytest.approx(180e3 * 3600 / 2048, rel=0.25)


def test_search() -> None:
    """All meshes are tried; those that fit are ordered by time, and none that fits is an error with the least."""
    config = dataclasses.replace(LLAMA, num_hidden_layers=4, layer_kinds=LLAMA.layer_kinds[:4])
    work = Work(8, 256)
    found = search(config, 4, work, MACHINES["h100"], 80 * 2**30)
    assert [plan.time.seconds for plan in found] == sorted(plan.time.seconds for plan in found)
    assert {str(plan.mesh) for plan in found} == {"fsdp=4", "fsdp=2,tp=2", "pp=4", "tp=4", "pp=2,fsdp=2", "pp=2,tp=2"}
    best = found[0]
    assert best.time == step_time(config, best.mesh, best.work, MACHINES["h100"]) and best.memory <= 80 * 2**30
    with pytest.raises(ValueError, match=r"Nothing fits into 0\.1 GiB: .* needs the least, \d"):
        search(config, 4, work, MACHINES["h100"], 2**27)
    with pytest.raises(ValueError, match="No mesh of 7 devices divides 8 rows"):
        search(config, 7, work, MACHINES["h100"], 80 * 2**30)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--preset", "llama-3.2-1b", "--machine", "h100"]
    assert main([*words, "--mesh", "fsdp=2"]) == 0
    assert "a step takes 0." in capsys.readouterr().out
    assert main([*words, "--search", "2", "--rows", "2", "--length", "512"]) == 0
    out = capsys.readouterr().out
    assert "plans fit into 80.0 GiB" in out and "microbatches" in out
    assert main([*words, "--search", "2"]) == 2 and "--rows, which must be given" in capsys.readouterr().err
    assert main([*words, "--search", "2", "--rows", "2", "--mesh", "tp=2"]) == 2
    assert "leave out --mesh" in capsys.readouterr().err
