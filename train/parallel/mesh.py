"""Mesh dimensions and their sizes (`Mesh`), and how ranks share work where there is a choice (`Strategy`).

    mesh = Mesh.parse("fsdp=2,tp=2")            # or Mesh(fsdp=2, tp=2)
    devices = mesh.device_mesh()                # once, on all ranks: it makes the process groups
    placements = params.plan(family.spec(config), Rules(spread="fsdp"), devices)
    weights = params.init(config, 0, plan=placements)

    name   the ranks of one such group hold
    pp     different layers
    dp     different rows, and the same parameters
    fsdp   different rows, and different shards of each parameter
    ep     different rows, and different experts
    cp     different positions of the same rows
    tp     the same tokens, and different shards of each layer

`DATA` are the dimensions whose ranks see different tokens: sums over tokens, gradients among them, are summed over all
of these and divided once.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

NAMES = ("pp", "dp", "fsdp", "ep", "cp", "tp")  # from the slowest links to the fastest
ROWS = ("dp", "fsdp", "ep")
DATA = (*ROWS, "cp")


@dataclass(frozen=True)
class Mesh:
    """The number of ranks along each dimension; their product is the number of processes.

    Args:
        dp: Replicas of the model that compute different rows.
        fsdp: Shards of every parameter, gathered for use; the ranks compute different rows.
        tp: Shards of the heads and of the MLPs' widths (tensor parallelism).
        cp: Shards of the positions (context parallelism).
        pp: Stages of the stack of layers (pipeline parallelism).
        ep: Shards of the experts; the ranks compute different rows.

    Raises:
        ValueError: A size is not an integer of at least 1.
    """

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name, size in asdict(self).items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name} is {size!r}; the size of a mesh dimension is a whole number of at least 1.")

    @staticmethod
    def parse(text: str) -> Mesh:
        """The mesh of a text such as "fsdp=2,tp=2", as `fnmodels-train --mesh` takes it.

        Args:
            text: Sizes by name, separated by commas; omitted dimensions have size 1.

        Returns:
            The mesh.

        Raises:
            ValueError: A name is unknown or repeated, or a size is no whole number.
        """
        sizes: dict[str, int] = {}
        for part in filter(None, text.replace(" ", "").split(",")):
            name, _, size = part.partition("=")
            if name not in NAMES:
                raise ValueError(f"{name!r} is no dimension of a mesh; there are {', '.join(NAMES)}, as in fsdp=2.")
            if name in sizes:
                raise ValueError(f"The mesh {text!r} names {name} twice.")
            if not (size.isascii() and size.isdigit()):
                raise ValueError(f"{name} is {size!r}; the size of a mesh dimension is a whole number, as in {name}=2.")
            sizes[name] = int(size)
        return Mesh(**sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """{name: size} in the order of NAMES, as in the device mesh."""
        return {name: getattr(self, name) for name in NAMES}

    @property
    def world(self) -> int:
        """The number of processes."""
        return self.pp * self.rows * self.cp * self.tp

    @property
    def rows(self) -> int:
        """The number of shards of a batch's rows."""
        return self.dp * self.fsdp * self.ep

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.sizes.items() if size > 1) or "dp=1"

    def device_mesh(self, device: str | None = None) -> DeviceMesh:
        """A DeviceMesh of all six dimensions, including those of size 1, over the default process group.

        It makes process groups: call it once, on all ranks, and keep the result.

        Args:
            device: "cpu" or "cuda"; None: "cuda" if the group has NCCL.

        Returns:
            The DeviceMesh, with dimensions in the order of NAMES.

        Raises:
            ValueError: There is no process group, or it has another size.
        """
        from torch.distributed.device_mesh import init_device_mesh

        if not dist.is_initialized():
            raise ValueError(
                f"The mesh {self} needs a process group: start the program with torchrun and call "
                "torch.distributed.init_process_group first."
            )
        world = dist.get_world_size()
        if world != self.world:
            raise ValueError(
                f"The mesh {self} is of {self.world} processes, but the process group has {world}: for a part of them "
                f"make a DeviceMesh of all, and slice {', '.join(NAMES)} from it."
            )
        if device is None:
            device = "cuda" if "nccl" in dist.get_backend() else "cpu"
        return init_device_mesh(device, tuple(self.sizes.values()), mesh_dim_names=NAMES)


@dataclass(frozen=True)
class Strategy:
    """Choices of how the ranks of a mesh share the work.

    Args:
        gather_dtype: The dtype in which parameters are all-gathered and used (bf16: half the bytes); None: that of the
            parameters. Gradients are reduced in fp32 at least.
        rows: What a rank receives. "whole": the global batch, of which it takes its rows; "own": its rows alone, any
            number and length, shared by the ranks that differ in pp, cp or tp alone (`train.parallel.agreement`).
        sequence: Whether `tp` also shards positions between the sublayers (sequence parallelism,
            `train.parallel.tensor.api`). Rows are padded to a multiple of cp x tp for the step, and outputs are cut
            back.
        context: How attention over `cp` gets remote keys and values: by an all-gather, by an exchange of heads
            ("ulysses", arXiv 2309.14509) or around a ring (arXiv 2310.01889).
        order: Which positions a rank of `cp` holds; with "ulysses", None keeps documents in order, as "blocks" needs it
            (`train.parallel.context.api`).
        schedule: The pipeline schedule, a name of `train.parallel.pipeline.schedule`.
        virtual: Stages per rank over `pp`, for looped schedules; None: 2.
        split: The number of layers in each stage; None: as even as possible.
    """

    gather_dtype: torch.dtype | None = None
    rows: Literal["whole", "own"] = "whole"
    sequence: bool = False
    context: Literal["gather", "ulysses", "ring"] = "gather"
    order: Literal["auto", "mask", "head_tail"] | None = "auto"
    schedule: str = "1F1B"
    virtual: int | None = None
    split: tuple[int, ...] | None = None


def in_dtype(strategy: Strategy, dtype: torch.dtype | None) -> Strategy:
    """The strategy with the step's `dtype`. ValueError where it has another one."""
    if dtype is None or strategy.gather_dtype == dtype:
        return strategy
    if strategy.gather_dtype is not None:
        raise ValueError(
            f"dtype is {dtype}, and the strategy's gather_dtype {strategy.gather_dtype}: give one of them."
        )
    return replace(strategy, gather_dtype=dtype)


@dataclass(frozen=True)
class Parallelism:
    """The sizes of a mesh, and the strategy over it."""

    mesh: Mesh
    strategy: Strategy = Strategy()


@dataclass(frozen=True)
class DataParallel:
    """The rows of the global batch that this rank computes: shard `rank` of `size` (dp x fsdp x ep).

    Args:
        rank: The index of its shard of the rows.
        size: The number of shards of the rows.
        group: The process group of one rank per row shard, this one among them.
        is_source: Whether this rank is the one of its row shard (first along pp, cp and tp) whose outputs count once;
            all of them hold the same outputs.
    """

    rank: int
    size: int
    group: Any
    is_source: bool


def data_parallel(devices: DeviceMesh) -> DataParallel:
    """The rows of this rank. It may make process groups: call it once, on all ranks of the default group.

    Args:
        devices: The mesh of processes, of `Mesh.device_mesh`.

    Returns:
        This rank's `DataParallel`.
    """
    mesh = mesh_of(devices)
    at = dict(zip(devices.mesh_dim_names or (), devices.get_coordinate() or (), strict=True))
    used = [name for name in NAMES if name in ROWS and mesh.sizes[name] > 1]
    rank = 0
    for name in used:
        rank = rank * mesh.sizes[name] + at[name]
    is_source = not any(at.get(name, 0) for name in ("pp", "cp", "tp"))
    if len(used) == 1:
        group = devices.get_group(used[0])
    else:
        rows = [index for index, name in enumerate(devices.mesh_dim_names or ()) if name in ROWS]
        rest = [index for index in range(devices.ndim) if index not in rows]
        ranks = devices.mesh.permute(*rest, *rows).reshape(-1, mesh.rows).tolist()
        group, _ = dist.new_subgroups_by_enumeration(ranks)
    return DataParallel(rank, mesh.rows, group, is_source)


def warn_of_group() -> None:
    """Warns that the existing process group is used, with its backend and timeouts."""
    warnings.warn(
        f"The process group that is there is used as it is ({dist.get_world_size()} processes, "
        f"{dist.get_backend()}): its backend and time-outs rule.",
        stacklevel=3,
    )


def mesh_of(devices: DeviceMesh) -> Mesh:
    """The sizes of a device mesh. ValueError unless its dimensions are named as in NAMES."""
    names = devices.mesh_dim_names or ()
    if not names or set(names) - set(NAMES):
        unknown = sorted(set(names) - set(NAMES))
        what = f"has the dimension {unknown[0]!r}" if unknown else "has no names"
        raise ValueError(f"The device mesh {what}; its dimensions must be named {', '.join(NAMES)}, or some of these.")
    return Mesh(**dict(zip(names, devices.shape, strict=True)))


def whole_groups(devices: DeviceMesh) -> list[Any]:
    """Process groups over which successive reductions cover all ranks of the mesh, and no others."""
    if devices.size() == dist.get_world_size():
        return [dist.group.WORLD]  # one reduction: ranks cannot differ in the norm and in whether they skip a step
    return [devices.get_group(index) for index in range(devices.ndim) if devices.size(index) > 1]
