"""Derives each parameter's tensor-parallel role (column-, row-parallel, replicated) from its axes and placement.

All checks run before the first step: a plan that cannot run raises ValueError here.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from fnmodels.models.common.spec import Leaf
from params.axes import (
    AXES,
    BUCKET,
    CONVOLVED,
    EMBED,
    EMBED_TWICE,
    EXPERT,
    EXPERT_MLP,
    HEAD_DIM,
    HEADS,
    KEYS,
    KV_HEADS,
    LINEAR_HEADS,
    LINEAR_KV_HEADS,
    MLP,
    NGRAM,
    VOCAB,
    has_whole_rows,
    regions_of,
    sharded_by,
)
from params.quantized.kept import KeptWeight
from params.sharding import Sharding
from train.comm.region import Region

SHARDED = sharded_by("tp")
LeafT = TypeVar("LeafT", Tensor, KeptWeight)
_LAYER = re.compile(r"((?:\w+\.)?layers\.\d+)\.(.+)")  # also of a stack or tower: encoder.layers.0.mlp.up_proj
_BLOCK = re.compile(
    r"(?:\w+\.)?mtp\.\d+\.block\.(?:(\d+)\.)?(.+)"
)  # of an MTP head: of its layer, or of one of several


@dataclass(frozen=True)
class Use:
    """The role of a parameter of a layer.

    kind: "read" (column-parallel: its input is the residual stream), "write" (row-parallel: its output is added to the
    stream), "norm" (over sharded heads), "gather" and "cut" (they read and write pieces of the stream around what every
    rank computes with all positions), "along" (it reads and writes such pieces by itself), "table" (a range of rows) or
    "plain". shared: its gradient is partial on each rank. rows: the rows of a replicated parameter that this rank uses.
    full: the rows of a full table.
    """

    kind: str
    shared: bool
    rows: slice | None = None
    full: int = 0

    def own(self, leaf: LeafT) -> LeafT:
        """The rows of the parameter that this rank uses."""
        return leaf if self.rows is None else leaf[self.rows]


def uses_of(
    spec: Mapping[str, Leaf],
    dims: Mapping[str, int | None],
    sharded: frozenset[str],
    region: Region,
    kinds: Sequence[Sequence[str]],
    head: Sequence[str] = (),
) -> dict[str, dict[str, Use]]:
    """{kind of layer: the `Use` of each parameter, and of parts of adapters, by path within a layer}.

    spec: of one tower. dims, sharded: from `sharded_dims`. kinds: those under which each layer runs, stack by stack.
    head: those of the layers of an MTP head's block. ValueError for stacks whose layers of one kind differ in a
    parameter's role.
    """
    layers = dict.fromkeys(layer[1] for path in spec if (layer := _LAYER.fullmatch(path)))
    kinds_of = dict(zip(layers, kinds, strict=True))
    by_kind: dict[str, dict[str, Use]] = {kind: {} for several in (*kinds, head) for kind in several}
    # norms of recurrent heads are of groups, which share key heads, or of all heads together, as lightning attention's
    groups = any(LINEAR_KV_HEADS in leaf.axes for leaf in spec.values())
    joint = not groups or bool(_replicated_groups(spec, dims))
    normed = {HEADS, KV_HEADS, MLP} | ({LINEAR_HEADS} if joint else set())
    for path, leaf in spec.items():
        inner = path_in_layer(path)
        if inner is not None:
            layer = _LAYER.fullmatch(path)
            is_norm = dims[path] is not None and leaf.axes[0] in normed and leaf.axes[1:] == () and "norm" in inner
            use = Use("norm", False) if is_norm else _use(leaf, dims[path] is not None, sharded, region)
            adapted = _adapted(leaf, dims[path], use, sharded, region)
            block = _BLOCK.fullmatch(path)
            for kind in kinds_of[layer[1]] if layer else [head[int(block[1] or 0)] if block else kinds[-1][-1]]:
                uses = by_kind[kind]
                if uses.setdefault(inner, use) != use:
                    raise ValueError(
                        f"{path} is used by each process in another way than {inner} of another stack; leave heads out "
                        "of the rules."
                    )
                uses |= {f"{inner}.{part}": one for part, one in adapted.items()}
    return by_kind


def sharded_dims(
    spec: Mapping[str, Leaf], plans: Mapping[str, Sharding], *, sequence: bool = False
) -> tuple[dict[str, int | None], frozenset[str]]:
    """({path: the dimension of the parameter that `tp` shards, or None}, the sharded logical axes).

    ValueError for a mesh without `tp`, and, naming the parameter or axis, for a plan whose layers cannot run.
    """
    sizes = dict(next(iter(plans.values())).sizes)
    if "tp" not in sizes:
        raise ValueError(f"The plan's mesh has no dimension 'tp'; it has {', '.join(sizes)}.")
    dims = {path: sharding.dims[list(sizes).index("tp")] for path, sharding in plans.items()}
    sharded = frozenset(leaf.axes[n] for path, leaf in spec.items() if (n := dims[path]) is not None)
    for path, leaf in spec.items():
        n = dims[path]
        if n is not None and leaf.axes[n] not in SHARDED:
            raise ValueError(
                f"{path}: tensor parallelism shards {', '.join(SHARDED)}, but the plan has {leaf.axes[n]}."
            )
        known = BUCKET in leaf.axes or (n is not None and leaf.axes[n] in (VOCAB, NGRAM))
        if n is not None and path_in_layer(path) is None and not known:
            raise ValueError(
                f"{path} is outside of the layers, where tensor parallelism shards vocabularies alone, and its "
                f"{leaf.axes[n]} are sharded: give the leaf an axis of its own in the family's spec."
            )
        # A parameter with an unknown axis would be treated as acting on the residual stream, and its gradient might be
        # partial.
        strange = sorted(set(leaf.axes) - set(AXES))
        if strange and path_in_layer(path) is not None:
            raise ValueError(
                f"{path} has the axis {strange[0]!r}, and tensor parallelism does not know where such a leaf is used; "
                f"it knows {', '.join(sorted(AXES))}."
            )
        for keys, heads in KEYS.items():
            if heads in sharded:
                _check_heads(path, leaf, keys, n is not None, sizes["tp"])
    for keys, heads in KEYS.items():
        if keys in sharded and heads not in sharded:
            raise ValueError(f"The rules shard {keys} over 'tp' and not {heads}: name both.")
    norms = [path for path, leaf in spec.items() if leaf.axes == (LINEAR_HEADS,) and path.endswith("norm")]
    if LINEAR_HEADS in sharded and norms and _replicated_groups(spec, dims) - {1}:
        raise ValueError(
            f"{norms[0]} normalizes groups of heads, each of which would lie on some of the processes: their number "
            f"must be 1 or a multiple of {sizes['tp']}; leave linear_heads out of the rules."
        )
    axes = {axis for leaf in spec.values() for axis in leaf.axes} & set(SHARDED) - set(KEYS)
    if sequence and axes - sharded:
        raise ValueError(f"sequence=True needs {min(axes - sharded)!r} sharded over 'tp' too: name it in the rules.")
    return dims, sharded


def _replicated_groups(spec: Mapping[str, Leaf], dims: Mapping[str, int | None]) -> set[int]:
    """The numbers of key heads, or groups of heads, of recurrent layers whose key heads every rank holds."""
    leaves = [leaf for path, leaf in spec.items() if LINEAR_KV_HEADS in leaf.axes and dims[path] is None]
    return {leaf.shape[0] // leaf.unit for leaf in leaves}


def _check_heads(path: str, leaf: Leaf, keys: str, is_part: bool, size: int) -> None:
    """ValueError for a parameter that cannot follow heads that `size` ranks share. is_part: it is sharded.

    keys: the axis of their key heads.
    """
    parts = (path_in_layer(path) or path).split(".")
    if any(part.isdigit() for part in parts) and leaf.axes == (HEAD_DIM,):
        raise ValueError(f"{path}: lists with a leaf for each head are not sharded; leave heads out of the rules.")
    if keys not in leaf.axes or is_part:
        return
    heads = leaf.shape[0] // leaf.unit
    if heads % size and size % heads:
        raise ValueError(
            f"{path}: of {heads} KV heads each of {size} processes would need some and a part of another; leave heads "
            "out of the rules."
        )
    if leaf.axes == (keys,) and "norm" in parts[-1]:
        raise ValueError(f"{path} normalizes all KV heads together: there must be one at least for each process.")


def path_in_layer(path: str) -> str | None:
    """The path within a layer, also for those of an MTP head's block; None for parameters outside of layers."""
    if layer := _LAYER.fullmatch(path):
        return layer[2]
    block = _BLOCK.fullmatch(path)
    return block[2] if block else None


def _use(leaf: Leaf, is_part: bool, sharded: frozenset[str], region: Region) -> Use:
    use = _use_trained(leaf, is_part, sharded, region)
    return use if leaf.trainable else replace(use, shared=False)


def _use_trained(leaf: Leaf, is_part: bool, sharded: frozenset[str], region: Region) -> Use:
    axes, sequence = leaf.axes, region.sequence
    if NGRAM in axes:
        return Use("table", False, full=leaf.shape[0]) if is_part else Use("plain", sequence)
    if CONVOLVED in axes:
        return Use("along" if sequence else "plain", False)
    if EXPERT in axes:
        return Use("plain", not is_part and EXPERT_MLP in sharded)
    if has_whole_rows(axes):  # all ranks compute the same
        ends = {axes[-1] == EMBED: "gather", axes[0] == EMBED and len(axes) > 1: "cut"} if sequence else {}
        return Use(ends.get(True, "plain"), False)
    if regions_of(axes).isdisjoint(sharded):
        return Use("plain", sequence)
    if axes[0] == EMBED:
        return Use("write", False)
    rows = None
    if not is_part and not KEYS.keys().isdisjoint(axes):
        heads = leaf.shape[0] // leaf.unit
        first = region.rank * heads // region.size
        count = max(1, heads // region.size)
        rows = slice(first * leaf.unit, (first + count) * leaf.unit)
    if axes[-1] in (EMBED, EMBED_TWICE):
        return Use("read", not is_part, rows)
    return Use("plain", not is_part, rows)


def _adapted(leaf: Leaf, dim: int | None, use: Use, sharded: frozenset[str], region: Region) -> dict[str, Use]:
    """Roles of an adapted weight: a is sharded like its columns, b like its rows; dim: the one that `tp` shards.

    Each rank multiplies by a and b where it multiplies by the weight. Inside of a region the gradient of what is not
    sharded is therefore partial, also where the weight itself has no gradient.
    """
    columns, rows = len(leaf.shape) - 1, len(leaf.shape) - 2
    inside = EXPERT_MLP in sharded if EXPERT in leaf.axes else not regions_of(leaf.axes).isdisjoint(sharded)
    outside = region.sequence and not has_whole_rows(leaf.axes)
    a, b = (dim != columns, dim != rows) if inside else (outside, outside)
    return {"weight": Use("plain", use.shared, use.rows), "a": Use("plain", a), "b": Use("plain", b, use.rows)}
