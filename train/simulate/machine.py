"""Rates of a device (FLOPs, reads, messages per second): `Machine`, published ones, and the one at hand, measured."""

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import torch

from train.parallel.mesh import NAMES, Mesh


@dataclass(frozen=True)
class Link:
    """A connection of one device: bytes it sends per second, and seconds until a message's first byte arrives."""

    bytes: float
    latency: float


@dataclass(frozen=True)
class Machine:
    """The speed of one device and of its links.

    peak: FLOP/s that the vendor states; utilization is a share of it. products, attention: FLOP/s that large matrix
    products and attention reach. memory: bytes per second of elementwise operations. launch: seconds that each
    operation costs at least, whatever its size. node: devices joined by `near`; groups that span more use `far`.
    overlap: mesh dimensions whose messages travel while the device computes. links: of single mesh dimensions,
    before near and far.
    """

    peak: float
    products: float
    attention: float
    memory: float
    launch: float
    node: int
    near: Link
    far: Link
    overlap: Collection[str] = ("dp", "fsdp", "pp")
    links: Mapping[str, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if wrong := [name for name in (*self.overlap, *self.links) if name not in NAMES]:
            raise ValueError(f"{wrong[0]!r} is no dimension of a mesh; there are {', '.join(NAMES)}.")

    def link(self, mesh: Mesh, dim: str) -> Link:
        """The link of a mesh dimension's groups: ranks are numbered in the order of `train.parallel.mesh.NAMES`."""
        inner = math.prod(mesh.sizes[name] for name in NAMES[NAMES.index(dim) + 1 :])
        return self.links.get(dim) or (self.near if inner * mesh.sizes[dim] <= self.node else self.far)


# Peaks and bandwidths: the vendors' data sheets. What large operations reach are shares: attention as measured in
# arXiv 2307.08691 (A100, 0.5 to 0.7) and 2407.08608 (H100, 0.45 to 0.7), products and memory as usual for bf16.
_NVLINK4, _NVLINK3, _CUT = Link(450e9, 5e-6), Link(300e9, 5e-6), Link(200e9, 5e-6)  # per direction; H800: 200
_IB400, _IB200 = Link(50e9, 15e-6), Link(25e9, 15e-6)
_H100 = Machine(989e12, 0.68 * 989e12, 0.5 * 989e12, 0.85 * 3.35e12, 4e-6, 8, _NVLINK4, _IB400)
MACHINES: Mapping[str, Machine] = {
    "a100": Machine(312e12, 0.75 * 312e12, 0.5 * 312e12, 0.85 * 2.0e12, 4e-6, 8, _NVLINK3, _IB200),
    "h100": _H100,
    "h200": replace(_H100, memory=0.85 * 4.8e12),
    "h800": replace(_H100, near=_CUT),
}


def measured(link: Link | None = None) -> Machine:
    """This machine's CPU as one device with the threads of the process, in fp32: each rate is the best of a few runs.

    link: between processes; None: as memory, without latency. Nothing overlaps, for the sums run on the same cores.
    Takes about two seconds.
    """
    x = torch.randn(1024, 1024)
    products = 2 * 1024**3 / _seconds(lambda: x @ x)
    q = torch.randn(1, 8, 1024, 64)
    attention = 4 * q.numel() * 1024 / _seconds(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q))
    wide, small = torch.randn(2**24), torch.randn(8)
    memory = 3 * 4 * wide.numel() / _seconds(lambda: wide * wide)
    launch = _seconds(lambda: [small * small for _ in range(1000)]) / 1000
    link = link or Link(memory, 0.0)
    return Machine(products, products, attention, memory, launch, 1, link, link, overlap=())


def _seconds(run: Callable[[], object]) -> float:
    """The least of seven runs, after one that is not timed."""
    run()
    took = []
    for _ in range(7):
        start = time.perf_counter()
        run()
        took.append(time.perf_counter() - start)
    return min(took)
