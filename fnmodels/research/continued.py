"""Runs of a model that differ from a given one by edits at one layer, from this layer on, and from a position on.

What an edit cannot change is taken from the given run: the input of its layer, and in a causal model keys, values and
logits of the positions before it.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fnmodels.apply import CacheStep, forward, hidden, run_layers
from fnmodels.edits import edit_end, edits_of_stage
from fnmodels.inputs.mask import Mask
from fnmodels.inputs.values import has_values
from fnmodels.models.common.context import Context
from fnmodels.models.common.family import DecoderConfig, field_of, function_of, parsed
from fnmodels.models.common.heads import PER_DOCUMENT
from fnmodels.models.common.registry import family_of
from fnmodels.ops.slots import Entry
from fnmodels.options import Edit
from fnmodels.run_params import RunParams
from fnmodels.taps import FINAL, tap_names
from fnmodels.tree import Tree
from fnmodels.tree import leaves as tree_leaves
from fnmodels.tree import map as map_tree
from fnmodels.unembedding import unembedded

from .common import Prepared, layer_count


class _Continued(Context):
    """Keys and values of a layer's entry come before those of the call; the entry returned has both."""

    def extend(self, new: Entry) -> Entry:
        past = self.tensors["cache"]
        read = {name: torch.cat((past[name], value), 1) if name in past else value for name, value in new.items()}
        self._put(read)
        return read


@dataclass(frozen=True)
class GivenRun:
    """A run with `edits`, by kernel="math". `further` continues it.

    read: the positions whose logits it returns, increasing. inputs: {layer: x [B, S, D]}, empty where layers read more
    of earlier ones than their output; then every run is of all layers. entries: {layer: keys and values [B, S, ...]}
    where a position depends on earlier ones by attention alone; logits [B, len(read), V] is kept only then.
    """

    params: Tree
    prepared: Prepared
    config: DecoderConfig
    edits: Mapping[str, Edit]
    read: Sequence[int]
    inputs: Mapping[int, Tensor] = field(default_factory=dict)
    entries: Mapping[int, Entry] = field(default_factory=dict)
    logits: Tensor | None = None

    def further(self, edits: Mapping[str, Edit], layer: int, position: int) -> Tensor:
        """Logits [B, len(read), V] with more edits, of taps of `layer`, that change nothing before `position`.

        The values that they get are those of all positions, or of the last ones only.
        """
        if not self.inputs:
            return _all_layers(self, {**self.edits, **edits})
        if not self.entries:
            return _from_layer(self, edits, layer)
        return _from_position(self, edits, layer, position)

    def bytes_from(self, position: int) -> int:
        """About the memory of one run of `further` from a position on: what a layer holds at a time, and logits."""
        inputs: Any = self.prepared[0]
        rows, length = inputs["valid"].shape
        tokens, read = length, len(self.read) if self.inputs else length
        if self.entries:
            tokens, read = length - position, sum(index >= position for index in self.read)
        leaves = tree_leaves(self.params)
        inner = max(max(leaf.shape[-2:]) for leaf in tree_leaves(self.params["layers"]) if leaf.ndim > 1)
        per_token = 6 * inner + 3 * self.config.num_attention_heads * length
        return rows * leaves[0].dtype.itemsize * (tokens * per_token + 3 * read * self.config.vocab_size)


def given_run(
    params: Tree,
    prepared: Prepared,
    layers: Sequence[int],
    *,
    config: DecoderConfig,
    edits: Mapping[str, Edit],
    read: Sequence[int],
) -> GivenRun:
    """The run with `edits` from which runs with further edits of taps of `layers` are continued."""
    given = GivenRun(params, prepared, config, edits, read)
    kinds = family_of(config).kinds(config)
    more = (
        any(kind.indexed or kind.source or kind.joins for kind in parsed(kinds))
        or field_of(config, "head") in PER_DOCUMENT
    )
    looped = bool(field_of(config, "passes"))
    if more or looped or field_of(config, "hidden_size_per_layer_input") or function_of(family_of(config), "shared"):
        return given
    run = functools.partial(hidden, params, *prepared, config=config, kernel="math")
    within = {name: edit for name, edit in edits.items() if name not in FINAL}
    taps = tuple(f"layers.{index}.input" for index in layers)
    if not _by_attention_alone(given):
        _, tapped = run(taps=taps, edits=within or None)
        return replace(given, inputs=_by_layer(tapped))
    empty: dict[int, Entry] = {index: {} for index in range(layer_count(config))}
    x, tapped, entries = run(taps=taps, edits=within or None, cache=CacheStep(empty), context=_Continued)
    return replace(given, inputs=_by_layer(tapped), entries=entries, logits=_logits(given, x))


def _by_layer(tapped: Mapping[str, Tensor]) -> dict[int, Tensor]:
    return {int(name.split(".", 2)[1]): value for name, value in tapped.items()}


def _by_attention_alone(given: GivenRun) -> bool:
    """Whether what a position adds depends on earlier ones, and only by their keys and values.

    False where the masks cannot be read, and for edits that may relate positions to each other.
    """
    if isinstance(given.params, RunParams) or given.edits.keys() - {"embed"}:
        return False
    masks = {id(mask): mask for mask in given.prepared[1].values()}.values()
    return all(isinstance(mask, Mask) and has_values(mask.kv_positions) and _sees_back(mask) for mask in masks)


def _sees_back(mask: Mask) -> bool:
    """Whether no query of the mask sees a key that stands behind it in its row."""
    return not bool(mask.dense().triu(1).any())


def _all_layers(given: GivenRun, edits: Mapping[str, Edit]) -> Tensor:
    logits: Tensor = forward(given.params, *given.prepared, config=given.config, kernel="math", edits=edits or None)
    return logits if field_of(given.config, "head") in PER_DOCUMENT else logits[:, given.read]


def _from_layer(given: GivenRun, edits: Mapping[str, Edit], layer: int) -> Tensor:
    inputs, masks, freqs_cis = given.prepared
    layers = range(layer, layer_count(given.config))
    later_edits = edits_of_stage(given.edits, tap_names(given.config), layers) or {}
    later_edits.pop(f"layers.{layer}.input", None)  # the input kept has it
    how: dict[str, Any] = {"config": given.config, "kernel": "math", "edits": {**later_edits, **edits}}
    span = layers.start, layers.stop
    x = run_layers(given.params, given.inputs[layer], masks, freqs_cis, *span, **how, **_per_token(inputs))
    return _logits(given, edit_end(given.edits, "hidden", x))


def _from_position(given: GivenRun, edits: Mapping[str, Edit], layer: int, position: int) -> Tensor:
    """`_from_layer` for the tokens from `position` on, which see the keys and values of the given run before them."""
    assert given.logits is not None
    early = bisect.bisect_left(given.read, position)
    if early == len(given.read):
        return given.logits
    inputs, masks, freqs_cis = given.prepared
    rest = slice(position, None)
    later: dict[str, Any] = dict(masks)
    later = {kind: mask.select(rest, slice(None)) for kind, mask in later.items()}
    tables = map_tree(lambda table: table[:, rest], dict(freqs_cis))
    entries = {i: map_tree(lambda value: value[:, :position], entry) for i, entry in given.entries.items()}
    per_token = {key: value[:, rest] for key, value in _per_token(inputs).items()}
    how: dict[str, Any] = {"config": given.config, "kernel": "math", "edits": edits, "context": _Continued}
    x, _ = run_layers(
        given.params,
        given.inputs[layer][:, rest],
        later,
        tables,
        layer,
        layer_count(given.config),
        cache=CacheStep(entries),
        **how,
        **per_token,
    )
    x = x[:, [index - position for index in given.read[early:]]]
    logits, _ = unembedded(given.params, x, given.config, (), {})
    return torch.cat((given.logits[:, :early], logits), 1)


def _per_token(inputs: Tree) -> dict[str, Any]:
    tensors: Mapping[str, Any] = inputs if isinstance(inputs, Mapping) else {}
    return {key: tensors[key] for key in ("valid", "routing") if tensors.get(key) is not None}


def _logits(given: GivenRun, x: Tensor) -> Tensor:
    """Logits at `read` of the final hidden states x [B, S, D]."""
    if any(name in given.edits for name in FINAL):  # which may be tensors [B, S, ...]
        return unembedded(given.params, x, given.config, (), given.edits)[0][:, given.read]
    return unembedded(given.params, x[:, given.read], given.config, (), {})[0]
