"""Adapters put into a tree of parameters, taken out of it, and merged with the weights."""

import fnmatch
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels import tree
from fnmodels.errors import UnsupportedError
from fnmodels.models.common.family import DecoderConfig
from fnmodels.models.common.registry import family_of
from fnmodels.models.common.spec import Constant, Leaf
from fnmodels.tree import Tree
from params.initialize import draw
from params.io.safetensors_file import Box
from params.quantized.kept import KeptWeight

from .leaves import (
    adapter_leaves,
    chosen_targets,
    initial_magnitude,
    is_embedding,
    map_leaves,
    nodes_of,
    on_same_mesh,
    params_by_path,
)
from .nodes import NODES, Lora, Replaced, RowLora, TwoUses, base_of, with_base


def add(
    config: DecoderConfig,
    params: Tree,
    *,
    rank: int,
    alpha: float | None = None,
    targets: Iterable[str] = ("q_proj", "v_proj"),
    seed: int = 0,
    rslora: bool = False,
    dora: bool = False,
) -> Tree:
    """Puts a LoRA adapter (arXiv 2106.09685) at every target; weights are not copied, and outputs do not change.

    Args:
        config: The model's config.
        params: Its parameters.
        rank: The rank of the adapters.
        alpha: The adapter is scaled by alpha / rank; None: rank.
        targets: Last components of paths ("q_proj": every trainable linear weight of that name, except experts'), or
            shell patterns over full paths ("layers.1?.mlp.*", "layers.*.experts.*_proj"). "embed_tokens" is the
            embedding, of a tied model also the head.
        seed: a is drawn by (seed, path), uniform in +-1/sqrt(in) as in PEFT, in the weight's dtype; b starts at 0.
        rslora: Whether adapters are scaled by alpha / sqrt(rank) (arXiv 2312.03732).
        dora: Whether there is a magnitude (arXiv 2402.09353), which starts as the norms of the weight's rows.

    Returns:
        The tree with `Lora` nodes at the targets.

    Raises:
        ValueError: A target matches nothing, or a leaf that is no linear weight, or the rank is below 1.
        UnsupportedError: `dora` for DTensors.
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}; it must be at least 1.")
    chosen = chosen_targets(config, params, tuple(targets))
    scale = (rank if alpha is None else alpha) / (math.sqrt(rank) if rslora else rank)

    def adapted(path: str, weight: Any) -> Any:
        if path not in chosen:
            return weight
        a, b = adapter_leaves(chosen[path], rank)

        def uniform(box: Box | None) -> Tensor:
            # the distribution function of a normal variable is uniform at its draws
            return torch.special.erf(draw(a, seed, f"{path}.a", box) / math.sqrt(2)) / math.sqrt(a.shape[-1])

        pair = on_same_mesh(weight, (a, b), uniform, lambda box: draw(b, seed, f"{path}.b", box))
        node = Lora(weight, *pair, scale)
        return replace(node, magnitude=initial_magnitude(path, node)) if dora else node

    return map_leaves(adapted, params)


def unfreeze(params: Tree, targets: Iterable[str]) -> Tree:
    """Trains parameters in full beside adapters (PEFT's modules_to_save).

    Args:
        params: The tree of parameters.
        targets: Paths, or shell patterns over them ("score*", "lm_head", "layers.*_layernorm"). PEFT saves modules, so
            name a head's bias with its weight.

    Returns:
        The tree, with a `Replaced` with a copy of the values at each target.

    Raises:
        ValueError: A target matches nothing, or matches a parameter with an adapter.
    """
    flat, chosen = params_by_path(params), set[str]()
    for target in targets:
        matches = {path for path in flat if fnmatch.fnmatchcase(path, target)}
        if not matches:
            raise ValueError(f"The target {target!r} names no parameter; their names are such as {min(flat)!r}.")
        chosen |= matches
    if adapted := sorted(path for path in chosen if isinstance(flat[path], NODES)):
        raise ValueError(f"{adapted[0]} has an adapter already, or is trained in full.")
    return map_leaves(lambda path, leaf: Replaced(leaf, leaf.clone()) if path in chosen else leaf, params)


def merge(params: Tree) -> Tree:
    """Merges every adapter into its weight.

    Args:
        params: The tree with adapters.

    Returns:
        The tree of plain tensors.

    Raises:
        UnsupportedError: A tied embedding whose use as the head is trained differently.
    """
    return map_leaves(lambda _, leaf: base_of(leaf, merged=True), params)


def adapters(params: Tree) -> Tree:
    """The adapters of a tree alone: what is trained and saved, and what torch.func differentiates.

    Args:
        params: The tree with adapters.

    Returns:
        The tree of adapters at their paths, without weights.
    """
    return _present(map_leaves(lambda _, leaf: with_base(leaf, None) if isinstance(leaf, NODES) else None, params))


def _present(node: Tree) -> Tree:
    """The tree without the entries of dicts that are None, which torch.func refuses as leaves."""
    if isinstance(node, dict):
        return {key: _present(value) for key, value in node.items() if value is not None}
    return [_present(value) for value in node] if isinstance(node, list) else node


def weights(params: Tree) -> Tree:
    """The weights of a tree without its adapters.

    Args:
        params: The tree with adapters.

    Returns:
        The tree, in which each node is replaced by its weight, unchanged.
    """
    return map_leaves(lambda _, leaf: base_of(leaf), params)


def attach(params: Tree, trained: Tree) -> Tree:
    """Puts adapters into a tree, in place of any that it has.

    Args:
        params: The tree of parameters.
        trained: A tree of `adapters`.

    Returns:
        The tree with these adapters.
    """
    nodes = nodes_of(trained)
    return map_leaves(lambda path, leaf: with_base(nodes.get(path), base_of(leaf)), params)


def per_row(params: Tree, adapters: Sequence[Tree], rows: Tensor) -> Tree:
    """Several fine-tuned models in one batch: row i has the adapters number rows[i].

    Each row's output is that of `attach(params, adapters[rows[i]])`. Every target must read [B, S, in]: losses that
    flatten tokens take none of lm_head.

    Args:
        params: The parameters, without adapters.
        adapters: Trees with adapters, of any rank and targets; a tree without any is the model itself.
        rows: int64 [B], the index of each row's adapters.

    Returns:
        The tree with `RowLora` nodes, for batches of B rows.

    Raises:
        ValueError: `rows` is not [B] or lies outside of the adapters, or `params` has adapters.
        UnsupportedError: Experts have adapters, or a parameter is trained in full.
    """
    if rows.ndim != 1 or (len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(adapters)):
        raise ValueError(f"rows must be [B], each from 0 to {len(adapters) - 1}; it is {rows.tolist()}.")
    nodes = [nodes_of(adapter) for adapter in adapters]
    if nodes_of(params):
        raise ValueError("params hold adapters already; merge them, or take `weights`.")
    others = sorted(path for by_path in nodes for path, node in by_path.items() if not isinstance(node, Lora))
    if others:
        raise UnsupportedError(f"{others[0]} is trained in full, and one batch has one value of it.")

    def stacked(path: str, weight: Any) -> Any:
        loras = [cast(Lora | None, by_path.get(path)) for by_path in nodes]
        return weight if not any(loras) else _stacked(path, weight, loras, rows)

    return map_leaves(stacked, params)


def _stacked(path: str, weight: Tensor, loras: Sequence[Lora | None], rows: Tensor) -> RowLora:
    if is_embedding(path):
        raise UnsupportedError(f"{path} is an embedding, which has no adapters per row.")
    if weight.ndim != 2:
        raise UnsupportedError(
            f"{path} {list(weight.shape)} is a weight of experts, which have no adapters per row: "
            'attach each row its own in torch.func.vmap over fnmodels.rows(batch), with kernel="math".'
        )
    first = next(node for node in loras if node is not None)
    rank = max(len(node.a) for node in loras if node is not None)
    none = Lora(weight, first.a[:0], first.b[:, :0])
    complete = [none if node is None else replace(node, weight=weight) for node in loras]
    a = torch.stack([F.pad(node.a, (0, 0, 0, rank - len(node.a))) for node in complete])
    b = torch.stack([F.pad(node.scale * node.b, (0, rank - len(node.a))) for node in complete])
    if all(node.magnitude is None for node in complete):
        return RowLora(weight, a, b, rows)
    ones = torch.ones_like(weight[:, 0])
    factors = [ones if node.magnitude is None else node.magnitude / node.row_norms() for node in complete]
    return RowLora(weight, a, b, rows, torch.stack(factors))


def spec(config: DecoderConfig, params: Tree) -> Tree:
    """The family's spec for parameters with adapters, for an optimizer: `train.adamw(rate, spec=lora.spec(config,
    params))`.

    Args:
        config: The model's config.
        params: The tree with adapters.

    Returns:
        The tree of leaves: adapters are trainable and decay, and what is trained in full is as trainable as in the
        family's spec, with its weight decay.
    """
    leaves = tree.flatten(family_of(config).spec(config))
    return map_leaves(lambda path, value: _spec(leaves[path], value), params)


def _spec(leaf: Leaf, value: Any) -> Any:
    """The leaf of a base model's parameter and of what is trained for it."""
    if isinstance(value, TwoUses):
        uses = {
            use: with_base(_spec(leaf, use_value), None)
            for use in ("embed", "head")
            if (use_value := getattr(value, use))
        }
        return TwoUses(_spec(leaf, None), **uses)
    if isinstance(value, Replaced):
        return Replaced(_spec(leaf, None), leaf)
    frozen = replace(leaf, trainable=False, decay=False)
    if isinstance(value, KeptWeight):
        return tree.map(lambda part: replace(frozen, shape=tuple(part.shape), axes=("part",) * part.ndim), value)
    if not isinstance(value, Lora):
        return frozen
    magnitude = (
        None
        if value.magnitude is None
        else Leaf(leaf.shape[:-1], leaf.dtype, leaf.axes[:-1], Constant(1.0), unit=leaf.unit)
    )
    return Lora(_spec(leaf, value.weight), *adapter_leaves(leaf, value.a.shape[-2]), value.scale, magnitude)
