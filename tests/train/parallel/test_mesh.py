"""What a mesh says of itself, and what it refuses before anything is sent."""

import subprocess
import sys

import pytest
import torch.distributed as dist

from tests.support.ranks_pool import Ranks, devices
from train.parallel import NAMES, Mesh
from train.parallel.mesh import mesh_of


def test_sizes_are_named_in_the_order_of_the_device_mesh() -> None:
    mesh = Mesh.parse("tp=2, fsdp=3")
    assert mesh == Mesh(fsdp=3, tp=2) and str(mesh) == "fsdp=3,tp=2"
    assert tuple(mesh.sizes) == NAMES and mesh.world == 6 and mesh.rows == 3
    assert Mesh.parse(str(Mesh())) == Mesh.parse("") == Mesh() and Mesh().world == 1
    every = Mesh(pp=2, dp=3, fsdp=5, ep=7, cp=11, tp=13)
    assert every.world == 2 * 3 * 5 * 7 * 11 * 13 and every.rows == 3 * 5 * 7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fdsp=2", "'fdsp' is no dimension of a mesh; there are pp, dp, fsdp, ep, cp, tp"),
        ("tp=2,tp=2", "names tp twice"),
        ("tp=two", "tp is 'two'"),
        ("tp", "tp is ''"),
        ("tp=0", "tp is 0"),
    ],
)
def test_a_mesh_that_cannot_be_read_is_refused_in_a_sentence(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Mesh.parse(text)


def test_without_a_process_group_nothing_is_started() -> None:
    with pytest.raises(ValueError, match="fsdp=2 needs a process group: start the program with torchrun"):
        Mesh(fsdp=2).device_mesh()
    assert not dist.is_initialized()


def test_importing_it_is_light() -> None:
    dear = ["torch.distributed.tensor", "torch._dynamo"]
    source = f"import sys, train.parallel; print([name in sys.modules for name in {dear}])"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "[False, False]\n"


def in_ranks() -> None:
    found = devices(Mesh(fsdp=2))
    assert found.mesh_dim_names == NAMES and found.shape == (1, 1, 2, 1, 1, 1)
    assert mesh_of(found) == Mesh(fsdp=2) and mesh_of(found["fsdp"]) == Mesh(fsdp=2)
    for mesh in (Mesh(fsdp=4), Mesh()):
        with pytest.raises(ValueError, match=f"is of {mesh.world} processes, but the process group has 2"):
            mesh.device_mesh()
    other = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("batch",))
    with pytest.raises(ValueError, match="has the dimension 'batch'; its dimensions must be named pp, dp"):
        mesh_of(other)


def test_the_device_mesh_of_a_group_that_is_there(ranks: Ranks) -> None:
    ranks(2)(in_ranks)
