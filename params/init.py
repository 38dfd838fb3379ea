"""Trees of parameters from a family's spec: real, on meta, or just counted."""

from __future__ import annotations

import hashlib
import math
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.families import family_of
from fnmodels.leaf import Constant, Leaf
from fnmodels.tree import Tree


def leaf_dtype(leaf: Leaf, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype a leaf is made or loaded in when the model is asked for in `dtype` (None: as declared)."""
    return leaf.dtype if dtype is None or leaf.keep_dtype else dtype


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be None or a floating torch.dtype, not {dtype!r}.")


def init(config: Any, seed: int, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tree:
    """Fresh parameters. Each leaf is drawn from a generator of its own, seeded by (seed, path), on the CPU and in fp32.

    So a leaf is the same whatever else is drawn, in what order, on which device and by which rank.
    dtype: None keeps what the spec declares (fp32).
    """
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise TypeError(f"seed must be an int, not {seed!r}.")
    _check_dtype(dtype)
    leaves = tree.flatten(family_of(config).spec(config))
    made = {path: draw(leaf, seed, path).to(device, leaf_dtype(leaf, dtype)) for path, leaf in leaves.items()}
    return tree.unflatten(made)


def draw(leaf: Leaf, seed: int, path: str) -> Tensor:
    """One leaf's initial value, fp32 on the CPU."""
    if isinstance(leaf.init, Constant):
        return torch.full(leaf.shape, leaf.init.value)
    digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.empty(leaf.shape).normal_(0.0, leaf.init.std, generator=generator)


def abstract(config: Any, *, dtype: torch.dtype | None = None) -> Tree:
    """The same tree on the meta device: shapes and dtypes of any size of model, no memory."""
    _check_dtype(dtype)
    spec = family_of(config).spec(config)
    return tree.map(lambda leaf: torch.empty(leaf.shape, dtype=leaf_dtype(leaf, dtype), device="meta"), spec)


def count(config: Any) -> int:
    """How many numbers the parameters hold; a tied head counts once."""
    return sum(math.prod(leaf.shape) for leaf in tree.leaves(family_of(config).spec(config)))
