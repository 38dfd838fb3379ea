"""Tensor parallelism: the processes of a group have the same tokens, and each has some heads and columns of each layer.

    devices = Mesh(tp=4).device_mesh()
    placements = params.plan(family.spec(config), Rules(tensor_axes(config)), devices)
    tensor = tensor_parallel(config, placements)
    total, count = tensor.run(next_token_loss)(params, batch, config=config)

which is `next_token_loss(tensor.outside(params), batch, config=config, layer_fn=tensor.layer_fn)`.

The family's own block runs unchanged on this process' part of the leaves, as plain tensors: it reads the number of
heads from their shapes. What it must not know stands in the leaves, as an adapter does (`params.lora`): in F.linear,
one that reads the residual stream enters the region first, and one that writes to it leaves (see `region`); which of
the two a leaf does, its axes say. So every operation and kernel of every family works, no operation is dispatched
through DTensor (which has no rule for some, gathers in silence for others, and takes many times a small operation's
time), and one rule holds for gradients: a leaf of which every process holds all, used inside, gets a partial one in
each, and `Region.shared` adds them up. A layer takes four reductions, two in each direction.

sequence=True (arXiv 2205.05198) divides the columns of the stream besides: `enter` gathers and `leave` scatters, so
that what lies between the sublayers, and what remat keeps, is 1 / size as long; all leaves used there get partial
gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fnmodels import family_of, tree
from fnmodels.front import Block, LayerFn
from fnmodels.leaf import Leaf
from fnmodels.ops.experts import Experts, choose_experts
from fnmodels.tree import Tree
from params import lora
from params.sharding import Sharding

from . import collectives
from .dtensors import is_spread
from .region import Region
from .vocab import Vocab

DIVIDED = ("heads", "kv_heads", "mlp", "expert_mlp", "vocab")
# Leaves of an attention that are used between its linear maps, or make what is.
_ATTENTION = ("heads", "kv_heads", "latent", "head_dim")
# The axes of layers. A leaf with another one would be taken for one of the stream, and its gradient might be partial.
_KNOWN = {*DIVIDED, *_ATTENTION, "embed", "expert", "router", "one"}


def tensor_axes(config: Any, dim: str = "tp") -> dict[str, str]:
    """The axes for `params.Rules`: what of a family's leaves tensor parallelism divides."""
    axes = {axis for leaf in tree.leaves(family_of(config).spec(config)) for axis in leaf.axes}
    return {axis: dim for axis in DIVIDED if axis in axes}


@dataclass(frozen=True)
class Use:
    """What becomes of a leaf of a layer. kind: "plain", "read" (from the stream), "write" (to it) or "norm" (of heads).

    shared: its gradients in the processes are partial. rows: those which this process uses, of a leaf that all hold.
    """

    kind: str
    shared: bool
    rows: slice | None = None


@dataclass(frozen=True)
class TensorParallel:
    """What a loss function needs: `layer_fn`, and `outside` for the params, or `run`. Made by `tensor_parallel`."""

    region: Region
    uses: Mapping[str, Use]  # by path within a layer
    divided: frozenset[str]  # the axes
    dim: str  # of the mesh

    def run(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """function(params, ..., layer_fn=) on this process' part: of a loss function another, with the same keywords.

        A `layer_fn` that the result is given goes around this one's: remat, or `gather.gathering`, for FSDP besides.
        """

        @functools.wraps(function)
        def run(params: Tree, *args: Any, layer_fn: LayerFn | None = None, **more: Any) -> Any:
            def wrap(block: Block) -> Block:
                return self.layer_fn(block) if layer_fn is None else layer_fn(self.layer_fn(block))

            return function(self.outside(params), *args, layer_fn=wrap, **more)

        return run

    def layer_fn(self, block: Block) -> Block:
        """For `fnmodels.forward`: the block on this process' part. Other wrappers (remat, compilation) go around it."""
        if not isinstance(block, functools.partial):
            raise TypeError("Tensor parallelism wraps the family's own block: apply other wrappers after it.")
        experts = {name: block.keywords.get(name, "auto") for name in ("experts", "kernel")}

        def run(layer: Tree, x: Tensor, mask: Any, freqs: Any, **more: Any) -> tuple[Tensor, dict[str, Tensor]]:
            here = self._layer(layer)
            if self.region.sequence:
                x, more = self._columns(x, tree.leaves(freqs)[0].shape[1], more)
            if "valid" in more and "expert_mlp" in self.divided:
                more["experts"] = functools.partial(_experts, self.region, **experts)
            x, aux = block(here, x, mask, freqs, **more)
            return x, {name: self._tap(value) for name, value in aux.items()}

        return run

    def outside(self, params: Mapping[str, Tree]) -> dict[str, Tree]:
        """The params with what is outside of layers as plain tensors of this process, embedding and head as `Vocab`."""
        made: dict[str, Tree] = {}
        for name, leaf in params.items():
            leaf = leaf if name == "layers" else tree.map(functools.partial(local, dim=self.dim), leaf)
            if name in ("embed_tokens", "lm_head") and "vocab" in self.divided:
                if isinstance(leaf, lora.Lora):
                    raise ValueError(
                        f"{name} has an adapter, and over {self.dim!r} the vocabulary is divided, where adapters are "
                        "not known: leave it out of their targets, or vocab out of the rules."
                    )
                leaf = Vocab(leaf, self.region)
            elif name.startswith("norm") and self.region.sequence:
                leaf = self.region.shared(leaf)
            elif name == "mtp" and self.region.sequence:
                leaf = [{n: x if n == "block" else self.region.shared(x) for n, x in head.items()} for head in leaf]
            made[name] = leaf
        return made

    def whole(self, x: Tensor) -> Tensor:
        """The stream with all its columns, as layers of another stage take it."""
        return self.region.join(x)

    def _layer(self, layer: Tree) -> Tree:
        """The layer as the block is to see it, with leaves that know where they stand."""
        flat = tree.flatten(layer)
        unknown = [path for path in flat if path not in self.uses]
        if unknown:
            raise ValueError(f"A layer has the leaf {unknown[0]!r}, which is not in the plan.")
        flat = {path: local(leaf, self.dim) for path, leaf in flat.items()}
        shared = {path: leaf for path, leaf in flat.items() if self.uses[path].shared}
        for dtype in {leaf.dtype: None for leaf in shared.values()}:
            alike = {path: leaf for path, leaf in shared.items() if leaf.dtype == dtype}
            flat |= zip(alike, self.region.all_shared(list(alike.values())), strict=True)
        entry = _Entry(self.region)
        used = iter([leaf if (rows := self.uses[path].rows) is None else leaf[rows] for path, leaf in flat.items()])

        def standing(path: str, leaf: Any) -> Any:  # a leaf, or a weight with its adapter
            kind = self.uses[path].kind
            return leaf if kind == "plain" else _NODES[kind](leaf, entry)

        return lora.rewrite(standing, tree.map(lambda _: next(used), layer))

    def _columns(self, x: Tensor, length: int, more: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """This process' columns: of the stream where it comes whole, before the first layer, and of the rest."""
        if length % self.region.size:
            raise ValueError(
                f"sequence=True divides rows of {length} tokens among {self.region.size} processes, which does not go; "
                "pad the rows to a multiple."
            )
        if x.shape[1] == length:
            x = self.region.cut(x)
        own = slice(self.region.rank * x.shape[1], (self.region.rank + 1) * x.shape[1])
        return x, {name: value if value is None else value[:, own] for name, value in more.items()}

    def _tap(self, value: Tensor) -> Tensor:
        """What a block returns beside x, of all columns; counts, which have none, add up."""
        if value.ndim > 1 or not self.region.sequence:
            return self.whole(value)
        return collectives.summed(value, self.region.group)


def tensor_parallel(config: Any, placements: Tree, *, dim: str = "tp", sequence: bool = False) -> TensorParallel:
    """Made once, by all processes alike. placements: `params.plan` with `tensor_axes` on a DeviceMesh.

    dim: the mesh dimension of the processes that share tokens. sequence: divide the stream's columns too; what
    `fnmodels.hidden` returns is then this process' part, as are the taps between layers, and `whole` joins it.
    ValueError in a sentence, before anything is sent, for a plan or a family that cannot run so.
    """
    family = family_of(config)
    spec, plans = tree.flatten(family.spec(config)), tree.flatten(lora.weights(placements))
    if spec.keys() != plans.keys():
        raise ValueError("The plan is of another model than the config: make it by params.plan(family.spec(config)).")
    where = _where(plans, dim)
    divided = frozenset(leaf.axes[n] for path, leaf in spec.items() if (n := where[path]) is not None)
    sharding = next(iter(plans.values()))
    _check_divided(spec, where, divided, dim, dict(sharding.sizes)[dim], sequence)
    if sharding.mesh is None:
        raise ValueError("The plan was made from sizes alone; make it with the DeviceMesh.")
    group = sharding.mesh.get_group(dim)
    region = Region(group, dist.get_rank(group), dist.get_world_size(group), sequence)
    uses: dict[str, Use] = {}
    for path, leaf in spec.items():
        inner = _inner(path)
        if inner is not None:
            use = uses[inner] = _use(inner, leaf, where[path] is not None, divided, region)
            uses |= {f"{inner}.{part}": one for part, one in _adapted(use, _is_inside(leaf, divided)).items()}
    return TensorParallel(region, uses, divided, dim)


def local(leaf: Any, dim: str = "tp") -> Tensor:
    """This process' part of a leaf that is a DTensor over `dim` alone, with the gradient of that part; others as is."""
    if not is_spread(leaf):
        return leaf
    mesh = leaf.device_mesh
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    others = [name for name, size in sizes.items() if name != dim and size > 1]
    if others:
        raise ValueError(f"A leaf lies on the mesh dimension {others[0]!r} too: gather it over that one first.")
    part: Tensor = leaf.to_local(grad_placements=leaf.placements)
    return part


def _inner(path: str) -> str | None:
    """The path within a layer; heads that predict further tokens hold one too."""
    parts = path.split(".")
    if parts[0] == "layers":
        return ".".join(parts[2:])
    return ".".join(parts[3:]) if parts[0] == "mtp" and parts[2] == "block" else None


def _where(plans: Mapping[str, Sharding], dim: str) -> dict[str, int | None]:
    names = [name for name, _ in next(iter(plans.values())).sizes]
    if dim not in names:
        raise ValueError(f"The plan's mesh has no dimension {dim!r}; it has {', '.join(names)}.")
    return {path: sharding.dims[names.index(dim)] for path, sharding in plans.items()}


def _check_divided(
    spec: Mapping[str, Leaf],
    where: Mapping[str, int | None],
    divided: frozenset[str],
    dim: str,
    size: int,
    sequence: bool,
) -> None:
    for path, leaf in spec.items():
        axis = None if where[path] is None else leaf.axes[where[path]]  # type: ignore[index]
        if axis is not None and axis not in DIVIDED:
            raise ValueError(f"{path}: tensor parallelism divides {', '.join(DIVIDED)}, but the plan has {axis}.")
        strange = sorted(set(leaf.axes) - _KNOWN)
        if strange and _inner(path) is not None:
            raise ValueError(
                f"{path} has the axis {strange[0]!r}, and tensor parallelism does not know where such a leaf is used; "
                f"it knows {', '.join(sorted(_KNOWN))}."
            )
        if "heads" not in divided:
            continue
        parts = path.split(".")
        if any(part.isdigit() for part in parts[2:]) and leaf.axes == ("head_dim",):
            raise ValueError(f"{path}: lists with a leaf for each head are not divided; leave heads out of the rules.")
        if "kv_heads" in leaf.axes and where[path] is None and _uneven(leaf.shape[0] // leaf.unit, size):
            raise ValueError(
                f"{path}: of {leaf.shape[0] // leaf.unit} KV heads each of {size} processes would need some and a "
                "part of another; leave heads out of the rules."
            )
        if leaf.axes == ("kv_heads",) and "norm" in parts[-1] and where[path] is None:
            raise ValueError(f"{path} normalizes all KV heads together: there must be one at least for each process.")
    if "kv_heads" in divided and "heads" not in divided:
        raise ValueError(f"The rules divide kv_heads over {dim!r} and not heads: name both.")
    axes = {axis for leaf in spec.values() for axis in leaf.axes} & set(DIVIDED) - {"kv_heads"}
    if sequence and axes - divided:
        raise ValueError(f"sequence=True needs {min(axes - divided)!r} divided over {dim!r} too: name it in the rules.")


def _uneven(heads: int, size: int) -> bool:
    return heads % size > 0 and size % heads > 0


def _use(path: str, leaf: Leaf, is_part: bool, divided: frozenset[str], region: Region) -> Use:
    axes, sequence = leaf.axes, region.sequence
    if not leaf.trainable:
        return Use("plain", False)
    if "expert" in axes:
        return Use("plain", not is_part and "expert_mlp" in divided)
    if not _is_inside(leaf, divided):
        return Use("plain", sequence)
    if axes[0] == "embed":
        return Use("write", False)
    rows = None
    if "kv_heads" in axes and not is_part:
        heads = leaf.shape[0] // leaf.unit
        first = region.rank * heads // region.size
        count = max(1, heads // region.size)
        rows = slice(first * leaf.unit, (first + count) * leaf.unit)
    if axes[-1] == "embed":
        return Use("read", not is_part, rows)
    kind = "norm" if is_part and axes[0] in ("heads", "kv_heads") and "norm" in path else "plain"
    return Use(kind, not is_part, rows)


def _is_inside(leaf: Leaf, divided: frozenset[str]) -> bool:
    axes = leaf.axes
    return ("heads" in divided and any(axis in _ATTENTION for axis in axes)) or ("mlp" in divided and "mlp" in axes)


def _adapted(use: Use, inside: bool) -> dict[str, Use]:
    """Of a weight that is used so, with an adapter: b has its rows and a its columns, and what is whole is shared."""
    columns = use.kind == "write"
    a, b = (not columns, columns or use.shared) if inside else (use.shared, use.shared)
    return {"weight": Use("plain", use.shared, use.rows), "a": Use("plain", a), "b": Use("plain", b, use.rows)}


@dataclass
class _Entry:
    """The way into the region, of one call of a block: maps that read one and the same x share one entry."""

    region: Region
    last: tuple[Tensor, Tensor] | None = field(default=None)

    def __call__(self, x: Tensor) -> Tensor:
        if self.last is None or self.last[0] is not x:
            self.last = (x, self.region.enter(x))
        return self.last[1]


@dataclass(frozen=True, eq=False)
class _Map:
    """A part of a linear map's weight. product(map, x, bias): what F.linear is to make of it."""

    product: Callable[..., Tensor]
    weight: Any
    entry: _Entry

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is not F.linear or isinstance(args[0], cls):
            return NotImplemented
        return args[1].product(args[1], args[0], *args[2:], **(kwargs or {}))


def _read(own: _Map, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """With rows [out / size, in], or with all of a map whose results are used inside."""
    return F.linear(own.entry(x), own.weight, bias)


def _write(own: _Map, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """With columns [out, in / size]; the bias is added once, to the sum."""
    y = own.entry.region.leave(F.linear(x, own.weight))
    return y if bias is None else y + bias


@dataclass(frozen=True, eq=False)
class _Norm:
    """A part of the weight of an RMS norm over all heads together, of which each process has some."""

    weight: Any
    entry: _Entry

    def to(self, dtype: torch.dtype) -> _Norm:
        return _Norm(self.weight.to(dtype), self.entry)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.weight.dtype
        return dtype

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is not F.rms_norm:  # where the weight multiplies after the cast back, the norm is not seen here
            raise NotImplementedError(
                "This norm over all heads is taken in low precision, in which it is not divided: compute in fp32, or "
                "leave heads out of the rules."
            )
        x, own, eps = args[0], kwargs["weight"], kwargs["eps"]
        region = own.entry.region
        squares = collectives.leave(x.square().sum(-1, keepdim=True), region.group)
        mean = region.shared(squares) / (x.shape[-1] * region.size)
        return x * torch.rsqrt(mean + eps) * own.weight


_NODES: dict[str, Callable[[Any, _Entry], Any]] = {
    "read": functools.partial(_Map, _read),
    "write": functools.partial(_Map, _write),
    "norm": _Norm,
}


def _experts(
    region: Region,
    leaves: Mapping[str, Tensor],
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    valid: Tensor,
    *,
    experts: str | Experts,
    kernel: Any,
    act: Any,
    input_weighted: bool = False,
) -> Tensor:
    """The experts' functions (`fnmodels.ops.experts`) on columns of each expert; the tokens come from the stream."""
    x, weights = region.enter(x, 0), region.enter(weights, 0)
    if region.sequence:
        indices = collectives.join(indices, 0, region.group)
        valid = collectives.join(valid.byte(), 0, region.group).bool()
    if "down_bias" in leaves and region.rank:  # the sum is to hold it once
        leaves = {**leaves, "down_bias": leaves["down_bias"] * 0}
    run = choose_experts(experts, x, *leaves.values(), kernel=kernel)
    return region.leave(run(leaves, x, weights, indices, valid, act=act, input_weighted=input_weighted), 0)
