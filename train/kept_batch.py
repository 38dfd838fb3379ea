"""`KeptBatch`: what `fnmodels.prepare` made of the last batch, for batches whose rows hold the same documents.

All but the tokens follows from positions and segment ids. In rows of a fixed length, each of one document, these are
equal in every step, and a small model takes longer to prepare them than for a layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.image_text import Prepared
from fnmodels.inputs.values import at_hand
from fnmodels.models.common.family import DecoderConfig
from fnmodels.ops.torch_internals import quiet, versions
from fnmodels.preparation import check_tokens

MOST = 1 << 13  # tokens of a batch that is kept: tables of more take memory, and no time beside their layers
_OF_POSITIONS = {"tokens", "positions", "valid"}  # inputs of models of which no other follows from the tokens


class _Last(NamedTuple):
    """A batch without its tokens: arguments of `prepare`, results, and how often its tensors had been written to."""

    config: DecoderConfig
    length: int | None
    positions: Tensor
    segment_ids: Tensor
    inputs: dict[str, Any]
    masks: Any
    tables: Any
    tensors: tuple[Tensor, ...]
    writes: list[int]

    def is_of(self, config: DecoderConfig, tokens: Tensor, positions: Any, segment_ids: Any, length: Any) -> bool:
        """Whether `prepare` makes the same of these arguments, apart from the tokens."""
        if config is not self.config or length is not self.length or tokens.shape[:2] != self.positions.shape:
            return False
        same = tokens.is_cpu and _same(positions, self.positions) and _same(segment_ids, self.segment_ids)
        return same and versions(self.tensors) == self.writes


class KeptBatch:
    """The batch that a run prepared last. A caller's writes into its tensors, as into those of the batch, are noticed,
    but not those that torch does not count."""

    def __init__(self) -> None:
        self._last: _Last | None = None

    def prepare(
        self, config: DecoderConfig, tokens: Tensor, *, positions: Tensor, segment_ids: Tensor, length: Any, rng: Any
    ) -> Prepared:
        """`fnmodels.prepare` of a batch, with its errors."""
        places = {"positions": positions, "segment_ids": segment_ids, "length": length}
        if torch.compiler.is_compiling() or rng is not None or not quiet():
            return fnmodels.prepare(config, tokens, **places, rng=rng)
        last = self._last
        if last is not None and last.is_of(config, tokens, positions, segment_ids, length):
            return {**last.inputs, "tokens": check_tokens(tokens)}, dict(last.masks), dict(last.tables)
        if length is None and _is_kept(tokens) and _is_kept(positions) and _is_kept(segment_ids):
            places |= {"positions": positions.clone(), "segment_ids": segment_ids.clone()}  # that are not the caller's
        inputs, masks, tables = fnmodels.prepare(config, tokens, **places)
        self._last = None
        if places["positions"] is not positions and inputs.keys() == _OF_POSITIONS:
            rest = {name: value for name, value in inputs.items() if name != "tokens"}
            tensors = tuple({id(leaf): leaf for leaf in tree.leaves((rest, masks, tables))}.values())
            if (writes := versions(tensors)) is not None:
                held = config, None, places["positions"], places["segment_ids"], rest, dict(masks), dict(tables)
                self._last = _Last(*held, tensors, writes)
        return inputs, masks, tables


def _is_kept(tensor: Any) -> bool:
    plain = isinstance(tensor, Tensor) and at_hand(tensor) is tensor
    return plain and tensor.ndim == 2 and tensor.numel() <= MOST and not tensor.is_inference()


def _same(tensor: Any, held: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.is_cpu and tensor.dtype is held.dtype and torch.equal(tensor, held)
