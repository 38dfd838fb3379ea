"""Selects the leaves that take an adapter, and makes the leaves of one."""

import fnmatch
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from fnmodels import tree
from fnmodels.errors import UnsupportedError
from fnmodels.models.common.family import DecoderConfig
from fnmodels.models.common.registry import family_of
from fnmodels.models.common.spec import Constant, Leaf, Normal
from fnmodels.tree import Tree
from params.axes import RANK
from params.io.safetensors_file import Box
from params.sharding import sharding_of

from .nodes import Lora, Replaced, TwoUses, base_of

# 2-D leaves that are added, convolved, multiplied in another dtype, or of no module in transformers
_OTHER_MATRICES = (
    "embed_positions",
    "embed_types",
    "relative_bias",
    "_bias",
    "conv",
    "A_log",
    "patch_proj",
    "tid2eid",
    "_hyper.fn",
    "fold.fn",
    "compressor.bias",
    "pool_gate",
    "attention.o_a",
)


def chosen_targets(config: DecoderConfig, params: Tree, targets: tuple[str, ...]) -> dict[str, Leaf]:
    """{path: leaf} of the linear weights that match `targets`; ValueError as in `add`."""
    leaves = tree.flatten(family_of(config).spec(config))
    if nodes_of(params):
        raise ValueError("params hold adapters already; merge them first.")
    chosen: set[str] = set()
    for target in targets:
        ends = {p for p in leaves if p.rpartition(".")[2] == target}
        named = {p for p in ends if is_linear(p, leaves[p]) and leaves[p].trainable} or ends
        named |= {p for p in leaves if fnmatch.fnmatchcase(p, target)}
        if not named:
            last = sorted({p.rpartition(".")[2] for p, leaf in leaves.items() if is_linear(p, leaf)})
            raise ValueError(f"The target {target!r} names no parameter; linear weights end in {', '.join(last)}.")
        chosen |= named
    wrong = sorted(path for path in chosen if not takes_adapter(path, leaves[path]))
    if wrong:
        raise ValueError(f"{wrong[0]} {list(leaves[wrong[0]].shape)} is no weight of a linear map; adapters need one.")
    flat = params_by_path(params) if any(is_embedding(path) for path in chosen) else {}
    if sharded := [path for path in chosen if is_embedding(path) and sharding_of(flat[path]) is not None]:
        raise UnsupportedError(f"{sharded[0]} is a DTensor, and an embedding's adapter is for plain tensors.")
    return {path: leaves[path] for path in chosen}


def targets(config: DecoderConfig) -> list[str]:
    """The paths of all weights whose adapters are trainable: linear ones, and those of experts; not the embedding.

    Args:
        config: The model's config.

    Returns:
        The paths; those of an indexer (DeepSeek-V3.2), which gradients do not reach, are not among them.
    """
    leaves = tree.flatten(family_of(config).spec(config))
    takes = {path: leaf for path, leaf in leaves.items() if leaf.trainable and takes_adapter(path, leaf)}
    return [path for path in takes if not is_embedding(path)]


def is_linear(path: str, leaf: Leaf | Tensor) -> bool:
    """Whether F.linear applies a leaf, by the families' naming; embeddings, routers and gates have other names.

    Args:
        path: The dotted path.
        leaf: The leaf, of which the shape is read.

    Returns:
        True for matrices named ..._proj or lm_head.
    """
    return len(leaf.shape) == 2 and path.endswith(("_proj", "lm_head"))


def is_embedding(path: str) -> bool:
    """Whether a leaf is the embedding of tokens."""
    return path.rpartition(".")[2] == "embed_tokens"


def takes_adapter(path: str, leaf: Leaf) -> bool:
    """Whether a leaf is a linear weight, that of experts [E, out, in], or the embedding of tokens."""
    experts = len(leaf.shape) == 3 and ".experts." in path and path.endswith("_proj")
    return is_linear(path, leaf) or experts or is_embedding(path)


def may_read_adapter(path: str, leaf: Leaf) -> bool:
    """Whether F.linear or F.embedding reads the leaf, whatever its name, so that a file may have an adapter of it."""
    matrix = len(leaf.shape) == 2 and not path.endswith(_OTHER_MATRICES)
    return takes_adapter(path, leaf) or matrix


def adapter_leaves(leaf: Leaf, rank: int) -> tuple[Leaf, Leaf]:
    """The leaves (a, b) of an adapter of the weight `leaf`."""
    (*count, out_size, in_size), (*axis, out_axis, in_axis) = leaf.shape, leaf.axes
    a = Leaf((*count, rank, in_size), leaf.dtype, (*axis, RANK, in_axis), Normal(1.0), unit=leaf.unit)
    b = Leaf((*count, out_size, rank), leaf.dtype, (*axis, out_axis, RANK), Constant(0.0), unit=leaf.unit)
    return a, b


def nodes_of(params: Tree) -> dict[str, Lora | Replaced | TwoUses]:
    """{path: node} of the adapters in `params`, and of what is trained in full beside them."""
    return {path: leaf for path, leaf in params_by_path(params).items() if isinstance(leaf, (Lora, Replaced, TwoUses))}


def params_by_path(params: Tree) -> dict[str, Any]:
    """{path: leaf}, where a node is one leaf."""
    found: dict[str, Any] = {}
    map_leaves(found.__setitem__, params)
    return found


def on_same_mesh(weight: Tensor, leaves: tuple[Leaf, Leaf], *make: Callable[[Box | None], Tensor]) -> tuple[Any, Any]:
    """(a, b) on the weight's device, in its dtype and sharded to match; each of `make` returns a box (None: all)."""
    sharding = sharding_of(weight)
    if sharding is None:
        a, b = (values(None).to(weight.device, weight.dtype) for values in make)
        return a, b
    distributed = []
    last = weight.ndim - 1
    for leaf, values, rank_dim in zip(leaves, make, (last - 1, last), strict=True):
        dims = tuple(None if dim == rank_dim else dim for dim in sharding.dims)
        own = replace(sharding, dims=dims, shape=leaf.shape)
        distributed.append(own.distribute(values(own.local_box()).to(weight.device, weight.dtype)))
    return distributed[0], distributed[1]


def initial_magnitude(path: str, node: Lora) -> Tensor:
    """[out] or [E, out], DoRA's magnitude of an adapter that has not been trained; UnsupportedError for DTensors."""
    if sharding_of(base_of(node.weight)) is not None:
        raise UnsupportedError(f"{path} is a DTensor, for which DoRA is not supported: take plain LoRA.")
    return node.row_norms().to(node.weight.dtype)


def map_leaves(function: Callable[[str, Any], Any], node: Tree, path: str = "") -> Tree:
    """A tree map that treats an adapter's node, such as `Lora`, as one leaf.

    Args:
        function: Called as function(path, leaf).
        node: The tree.
        path: The path of `node` itself; "" for a full tree.

    Returns:
        The tree of results.
    """
    if isinstance(node, dict):
        return {key: map_leaves(function, value, f"{path}.{key}" if path else key) for key, value in node.items()}
    if isinstance(node, list):
        return [map_leaves(function, value, f"{path}.{i}") for i, value in enumerate(node)]
    return function(path, node)
