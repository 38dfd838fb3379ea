"""Whether the tensors given to layers fit each other, and which tokens are padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fnmodels.inputs.block_mask import is_block_mask
from fnmodels.inputs.convert import shape_of
from fnmodels.inputs.mask import Mask, MaskLike, attention_part
from fnmodels.inputs.order import Segments
from fnmodels.inputs.values import at_hand
from fnmodels.models.common.family import DecoderConfig, field_of
from fnmodels.ops.torch_internals import undisturbed
from fnmodels.tree import Tree, leaves


def cleared(x: Tensor, valid: Tensor | None) -> Tensor:
    """x [B, S, ...] with zeros at padding, if `valid` is given: a masked key has weight 0, but 0 times NaN is NaN."""
    if valid is None:
        return x
    if valid.shape != x.shape[:2] or valid.dtype != torch.bool:
        raise ValueError(
            f"valid must be bool {list(x.shape[:2])} like the tokens, not {str(valid.dtype).removeprefix('torch.')} "
            f"{list(valid.shape)}."
        )
    if _all_valid(valid):
        return x
    return x.where(valid[..., None] if x.ndim == 3 else valid.reshape(*valid.shape, *[1] * (x.ndim - 2)), 0)


def _all_valid(valid: Tensor) -> bool:
    """Whether no token is padding. False where values cannot be read, or a read would wait for a device."""
    known = at_hand(valid)
    return known is not None and bool(undisturbed(torch.all, known))


def valid_of_masks(masks: Mapping[str, MaskLike], x: Tensor) -> Tensor | None:
    """[B, S] bool, False at padding, from the first `Mask` or `Segments` that fits x; None if there is none."""
    for mask in map(attention_part, masks.values()):
        ids = mask.q_segments if isinstance(mask, Mask) else mask.segment_ids if isinstance(mask, Segments) else None
        if ids is not None and ids.shape in (x.shape[:2], (1, x.shape[1])):
            return (ids > 0).expand(x.shape[:2])
    return None


def valid_tokens(valid: Tensor | None, masks: Mapping[str, MaskLike], x: Tensor) -> Tensor:
    """[B, S] bool: `valid` if given, else taken from the masks; ValueError if neither has it."""
    found = valid_of_masks(masks, x) if valid is None else valid
    if found is None:
        raise ValueError(
            "These layers have experts, which must know what is padding, and the masks do not say it: pass `valid` "
            '[B, S], which fnmodels.prepare returns as inputs["valid"].'
        )
    return found


def check_routing(routing: Tensor, x: Tensor, sparse: int, config: DecoderConfig) -> None:
    """ValueError unless routing is int64 [B, S, sparse, k] for x [B, S, D]. sparse: the number of MoE layers."""
    chosen = field_of(config, "num_experts_per_tok") if sparse else 0
    if routing.shape != (*x.shape[:2], sparse, chosen) or routing.dtype != torch.int64:
        raise ValueError(
            f"routing must be int64 [B, S, layers with experts, experts of a token] = "
            f"{[*x.shape[:2], sparse, chosen]}, not {str(routing.dtype).removeprefix('torch.')} {list(routing.shape)}."
        )


def check_choices(choices: Tensor, x: Tensor, layers: int) -> None:
    """ValueError unless choices are int64 [B, S, layers, k] for x [B, S, D]. layers: those with an indexer."""
    if choices.ndim != 4 or choices.shape[:3] != (*x.shape[:2], layers) or choices.dtype != torch.int64:
        raise ValueError(
            f"choices must be int64 [B, S, layers with an indexer, keys of a query] = {[*x.shape[:2], layers]} and the "
            f"keys, not {str(choices.dtype).removeprefix('torch.')} {list(choices.shape)}."
        )


def check_layer_inputs(layer_inputs: Tensor | None, first: int, total: int, config: DecoderConfig) -> None:
    """ValueError unless layer_inputs [B, S, layers, P] are there where the model reads them, from layer `first` on."""
    if layer_inputs is None:
        if field_of(config, "hidden_size_per_layer_input"):
            raise ValueError(
                "Each layer of this model reads embeddings of the token ids beside the residual stream: pass "
                "layer_inputs [B, S, layers, P], which the family's function of this name computes."
            )
    elif not total - first <= layer_inputs.shape[2] <= total:
        raise ValueError(
            f"layer_inputs is {list(layer_inputs.shape)}: dimension 2 has the model's {total} layers, or those from "
            f"layer {first} to the last."
        )


def check_fit(
    layers: Tree,
    x: Tensor,
    masks: Mapping[str, MaskLike],
    freqs_cis: Mapping[str, Tensor],
    kinds: tuple[str, ...],
    used: Sequence[str],
    *,
    stored: int,
    cached: bool,
) -> None:
    """Raises for mismatched arguments that would fail deep inside a block or be broadcast or ignored silently.

    stored: how many layers the params of the model have.
    """
    for name, given in (("masks", masks), ("freqs_cis", freqs_cis)):
        if not isinstance(given, (dict, Mapping)):
            raise TypeError(
                f"{name} must be {{kind: ...}}, as fnmodels.prepare returns it, not a {type(given).__name__}."
            )
    check_layers(layers, stored)
    for kind in used:
        if kind not in masks or kind not in freqs_cis:
            raise ValueError(
                f"The model has {kind!r} layers, but masks has {sorted(masks)} and freqs_cis {sorted(freqs_cis)}."
            )
        if not cached:  # attention checks the masks of steps, whose keys are not the tokens of x
            _check_mask(kind, attention_part(masks[kind]), x)
        tables = freqs_cis[kind]
        for table in (tables,) if isinstance(tables, Tensor) else leaves(tables):
            if table.shape[1] != x.shape[1] or table.shape[0] not in (1, x.shape[0]):
                raise ValueError(
                    f"freqs_cis[{kind!r}] is made for {list(table.shape[:2])} tokens [B, S], x has {list(x.shape[:2])}."
                )


def check_layers(layers: Tree, stored: int) -> None:
    """ValueError for another number of layers than the config's."""
    if isinstance(layers, (list, tuple)) and len(layers) != stored:
        raise ValueError(f"params has {len(layers)} layers, but the config has {stored}.")


def _check_mask(kind: str, mask: MaskLike, x: Tensor) -> None:
    if not isinstance(mask, (Mask, Segments, Tensor)) and not is_block_mask(mask):
        raise TypeError(
            f"masks[{kind!r}] is a {type(mask).__name__}; a mask is a fnmodels.inputs.Mask, a bool tensor or a "
            "BlockMask."
        )
    rows, _, queries, keys = shape_of(mask)
    if queries != x.shape[1] or keys != x.shape[1]:
        raise ValueError(
            f"masks[{kind!r}] is made for {queries} queries and {keys} keys, but x has {x.shape[1]} tokens."
        )
    if rows != x.shape[0] and rows != 1:
        raise ValueError(f"masks[{kind!r}] is made for {rows} rows, but x has {x.shape[0]}.")
