"""A server that forks process groups for tests of sharded checkpoints: `python -m tests.support.sharded_ranks FOLDER`.

Each input line is [number of processes, name of a function here]; the answer is a line with the exit codes.
"""

import datetime
import json
import os
import resource
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

# Making DTensors imports it, and would do so in each process anew.
import torch._dynamo
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import params as P
from fnmodels import llama, tree
from fnmodels.errors import MismatchError
from train import adamw, checkpoint, init_state, make_step, sharded

PROGRESS = {"tokens": 7}


def whole(step: int) -> Any:
    """The full state, which any number of processes must load. No mesh divides its rows."""
    generator = torch.Generator().manual_seed(step)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "step": torch.tensor(step),
        "layers": [{"w": leaf(7, 6), "v": leaf(5, 8), "norm": leaf(6).bfloat16()} for _ in range(2)],
        "short": leaf(3, 2),
        "counts": torch.randint(100, (16,), generator=generator),
    }


def spread(state: Any) -> Any:
    """Places each leaf differently: sharded over one or both mesh dimensions, or replicated; one is no DTensor."""
    world = dist.get_world_size()
    shape = (2, world // 2) if world > 1 else (1, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
    ways = {
        "w": [Shard(0), Shard(1)],
        "v": [Shard(1), Replicate()],
        "norm": [Replicate(), Replicate()],
        "short": [Replicate(), Shard(0)],
        "counts": [Shard(0), Shard(0)],
    }
    flat = tree.flatten(state)
    return tree.unflatten(
        {
            path: leaf
            if path == "step"
            else distribute_tensor(leaf, mesh, ways[path.split(".")[-1]], src_data_rank=None)
            for path, leaf in flat.items()
        }
    )


def same(found: Any, step: int) -> bool:
    flat, expected = tree.flatten(found), tree.flatten(whole(step))
    return flat.keys() == expected.keys() and all(
        torch.equal(leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, expected[path])
        for path, leaf in flat.items()
    )


def save(folder: Path) -> None:
    for step in (1, 2, 3):
        sharded.save(folder, step, spread(whole(step)), PROGRESS, keep=2)


def load(folder: Path) -> None:
    found = sharded.latest(folder)
    assert found and (found.step, found.progress) == (3, PROGRESS)
    like = spread(tree.map(torch.zeros_like, whole(0)))
    assert same(sharded.load(found, like), 3)


def refuse(folder: Path) -> None:
    """All processes raise, whichever one found the error."""
    found = sharded.latest(folder)
    assert found
    with pytest.raises(FileExistsError, match="Step 3 is saved already"):
        sharded.save(folder, 3, spread(whole(3)))
    with pytest.raises(ValueError, match="x: a float"):
        sharded.save(folder, 4, {"x": 1.0})
    with pytest.raises(MismatchError, match=r"short: expected none, found torch\.float32"):
        sharded.load(found, {"step": torch.tensor(0.5)})


def fail(folder: Path) -> None:
    """The disk is full for one process."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"large": distribute_tensor(torch.ones(400_000), mesh, [Shard(0)], src_data_rank=None)}
    if dist.get_rank() == 1:  # still enough for the file store of the process group
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
    with pytest.raises(OSError, match="File too large"):
        sharded.save(folder, 4, state)
    assert checkpoint.steps(folder) == [2, 3]


def initialize(folder: Path) -> None:
    """Parameters initialized shard by shard on a 2-D mesh equal those of one process."""
    config = llama.Config(64, 16, 24, 2, 4, 2, tie_word_embeddings=True)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("fsdp", "tp"))
    rules = P.Rules({"mlp": "tp", "heads": "tp"}, spread="fsdp")
    made = P.init(config, 3, plan=P.plan(llama.spec(config), rules, mesh))
    for path, leaf in P.flatten(P.init(config, 3)).items():
        shared = P.flatten(made)[path]
        assert isinstance(shared, DTensor) and shared.to_local().numel() < leaf.numel(), path
        assert torch.equal(shared.full_tensor(), leaf), path


def guest(folder: Path) -> None:
    """Without a mesh each process trains independently: a collective would hang or mix their values."""
    params, optimizer = {"w": torch.ones(3)}, adamw(0.1)
    step = make_step(lambda p, b: ((p["w"] * b["x"]).sum(), torch.tensor(1)), optimizer, clip=1.0)
    state, batch = init_state(params, optimizer), {"x": torch.full((3,), float(dist.get_rank() + 1))}
    for _ in range(1 + 2 * dist.get_rank()):
        state, metrics = step(state, batch)
        assert metrics["count"] == 1 and metrics["grad_norm"] > dist.get_rank()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, int(state.step))  # the group works as before
    assert found == [1 + 2 * rank for rank in range(dist.get_world_size())]


def member(rank: int, world: int, name: str, folder: Path, store: str) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", f"file://{store}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60)
        )
        globals()[name](folder)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def serve(folder: Path) -> None:
    for line in sys.stdin:
        world, name = json.loads(line)
        with tempfile.TemporaryDirectory() as place:
            pids = []
            for rank in range(world):
                pid = os.fork()
                if not pid:
                    member(rank, world, name, folder, f"{place}/store")
                pids.append(pid)
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
