"""FSDP, HSDP and data parallelism by gathered layers: every gradient, norm and update is that of one process."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from fnmodels import tree
from tests.parallel.pool import Ranks, devices
from tests.parallel.reference import CASES, batch, error, loss_of, one_process, optimizer_of, placed
from train import init_state, make_step
from train.parallel import Mesh, collectives, gather
from train.parallel import step as steps
from train.parallel.dtensors import local_tree
from train.step import gradient_sums

MESHES = ("dp=2", "fsdp=2", "fsdp=4", "dp=2,fsdp=2")


@contextlib.contextmanager
def damaged(what: str | None) -> Iterator[None]:
    """One mistake of those that people make."""
    with pytest.MonkeyPatch.context() as patch:
        if what == "copies are not summed":
            patch.setattr(gather, "enter", lambda x, group: x)
            patch.setattr(gather, "enter_all", lambda xs, group: xs)
        if what == "parts are not summed":  # the gradient's own slice in place of the sum's

            def run(self: Any, x: Tensor) -> Tensor:
                rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
                return x.chunk(size, self.dim)[rank].to(self.target)

            patch.setattr(collectives._ReduceScatter, "run", run)
        if what == "means in place of sums":
            sum_up = collectives._ReduceScatter.run
            patch.setattr(
                collectives._ReduceScatter, "run", lambda self, x: sum_up(self, x) / dist.get_world_size(self.group)
            )
        if what == "a count of one rank":
            patch.setattr(steps, "_global", lambda sums, _: sums)
        if what == "every copy counts":
            patch.setattr(steps, "_is_first_copy", lambda _: True)
        if what == "rows of the first rank":
            patch.setattr(
                steps, "own_rows", lambda batch, _: tree.map(lambda t: t[: len(t) // dist.get_world_size()], batch)
            )
        yield


def errors_of(name: str, mesh_text: str, options: dict[str, Any], damage: str | None = None) -> dict[str, float]:
    """{what: how far it is from one process}: each gradient, loss, count and norm, and each parameter after a step."""
    mesh = Mesh.parse(mesh_text)
    grads, stepped, metrics = one_process(name)
    optimizer, params = optimizer_of(name), placed(name, mesh)
    shards = gather.shardings(params)
    mine = {path: how.here() for path, how in tree.flatten(shards).items()}
    found: dict[str, float] = {}
    with damaged(damage):
        loss = gather.gathering(loss_of(name), shards)
        rows = steps.own_rows(batch(), devices(mesh))
        sums = gradient_sums(loss, optimizer)(local_tree(params), [rows], divide=False)
        step = make_step(loss_of(name), optimizer, clip=0.5, mesh=mesh, **options)
        state, measured = step(init_state(params, optimizer), batch())
    for (path, grad), ours in zip(grads.items(), sums.grads, strict=True):
        found[f"gradient of {path}"] = error(ours, grad[mine[path]])
    for metric in ("loss", "count", "grad_norm"):
        found[metric] = error(measured[metric].double(), metrics[metric].double())
    for path, leaf in tree.flatten(state.params).items():
        found[f"{path} after a step"] = error(leaf.to_local(), stepped[path][mine[path]])
    return found


def worst(found: list[dict[str, float]], start: str = "") -> tuple[float, str]:
    """Of all ranks; NaN is the worst."""
    every = [(value, what) for errors in found for what, value in errors.items() if what.startswith(start)]
    return max(every, key=lambda pair: (pair[0] != pair[0], pair[0]))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_is_that_of_one_process(ranks: Ranks, name: str, mesh: str) -> None:
    found = ranks(Mesh.parse(mesh).world)(errors_of, name, mesh, {})
    assert worst(found)[0] < 1e-5, worst(found)
    assert len([what for what in found[0] if what.startswith("gradient of layers.1.")]) > 6


OPTIONS: tuple[dict[str, Any], ...] = (
    {"accumulate": 2},
    {"remat": "full"},
    {"remat": "every:2", "accumulate": 2},
    {"remat": "selective", "inplace": False},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("name", "mesh"), [("llama_tied", "dp=2,fsdp=2"), ("gpt_oss", "fsdp=2")])
def test_the_step_s_options_change_nothing(ranks: Ranks, name: str, mesh: str, options: dict[str, Any]) -> None:
    found = ranks(Mesh.parse(mesh).world)(errors_of, name, mesh, options)
    assert worst(found)[0] < 1e-5, worst(found)


@pytest.mark.parametrize(
    ("damage", "mesh", "seen_in"),
    [
        ("copies are not summed", "dp=2", "gradient of embed_tokens"),
        ("copies are not summed", "dp=2,fsdp=2", "gradient of layers.0.mlp"),
        ("parts are not summed", "fsdp=2", "gradient of layers.0.mlp"),
        ("means in place of sums", "fsdp=2", "gradient of layers.0.mlp"),
        ("a count of one rank", "fsdp=2", "loss"),
        ("every copy counts", "dp=2", "grad_norm"),
        ("rows of the first rank", "fsdp=2", "gradient of layers.0.mlp"),
    ],
)
def test_mistakes_are_seen(ranks: Ranks, damage: str, mesh: str, seen_in: str) -> None:
    found = ranks(Mesh.parse(mesh).world)(errors_of, "llama_tied", mesh, {}, damage)
    assert worst(found, seen_in)[0] > 1e-2, damage
