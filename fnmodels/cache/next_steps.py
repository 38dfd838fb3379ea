"""The next steps of plain rows, prepared many at a time: all but the tokens follows from numbers that the host knows.

What `prepare` makes of S tokens are tensors [B, S, ...], so that a step's are a slice of those of many. They belong to
the cache, and go on to the one after it; they are made anew for another config, length or rows, and once a caller has
written into any of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.inputs.mask import MaskLike
from fnmodels.models.common.family import DecoderConfig
from fnmodels.ops.position_range import check_count, position_range
from fnmodels.ops.rotary import Rotation, is_rotating, laid_out
from fnmodels.ops.torch_internals import version
from fnmodels.preparation import prepare_text

from .known_rows import KnownRows
from .value import Cache

AHEAD = 32  # steps
_OF_TOKENS = ("tokens", "token_ids")  # inputs that are not known before the step
Prepared = tuple[dict[str, Any], dict[str, MaskLike], dict[str, Any]]


@dataclass(frozen=True)
class NextSteps:
    """The inputs, masks and tables of some steps of one token each.

    config, length, vectors: what they were made of; vectors: whether tokens are vectors. rows: before each step. steps:
    what `prepare` makes, without the tokens, and the tables laid out for rotation. written: the tensors of all steps
    together, of which those of one are views, and how often each had been written to.
    """

    config: DecoderConfig
    length: int | Tensor | None
    vectors: bool
    rows: tuple[KnownRows, ...]
    steps: tuple[tuple[Prepared, dict[str, Any]], ...]
    written: tuple[tuple[Tensor, int | None], ...]

    def are_of(self, config: DecoderConfig, tokens: Tensor, length: int | Tensor | None) -> bool:
        """Whether they were made of these."""
        same = length is self.length or (isinstance(length, int) and length == self.length)
        return same and config is self.config and tokens.is_floating_point() is self.vectors

    def number(self, rows: KnownRows) -> int | None:
        """Which of the steps is the next one of these rows; None: it is another, or what it reads was written to."""
        count = rows.lengths[0] - self.rows[0].lengths[0]
        if not 0 <= count < len(self.rows) or self.rows[count] != rows:
            return None
        return count if all(version(tensor) == times for tensor, times in self.written) else None


def next_step(
    config: DecoderConfig, tokens: Tensor, cache: Cache, rows: KnownRows, length: int | Tensor | None
) -> Prepared:
    """`prepare` of the next tokens [B, 1] of a cache of plain rows, which need not be read."""
    steps, count = _noted(cache), max(rows.lengths) + 1
    number = steps.number(rows) if steps is not None and steps.are_of(config, tokens, length) else None
    if steps is None or number is None:
        fresh = (
            steps is not None and isinstance(length, Tensor) and steps.length is not length
        )  # in every call, perhaps
        steps, number = None if fresh else _ahead(config, tokens, rows, length), 0
        if steps is None:
            return prepare_text(config, tokens, rows.positions(), rows.segment_ids(), length, count=count)
        object.__setattr__(cache, "_next", steps)
    elif (most := position_range(config)) is not None and count > most:
        check_count(config, steps.steps[number][0][2], count)
    (inputs, masks, tables), _ = steps.steps[number]
    return {name: tokens if name in _OF_TOKENS else value for name, value in inputs.items()}, masks, dict(tables)


def laid_out_tables(cache: Cache, rows: KnownRows, tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tables, laid out for rotation where they are those of `next_step` for these rows."""
    steps = _noted(cache)
    number = None if steps is None else steps.number(rows)
    if steps is None or number is None:
        return tables
    (_, _, made), ready = steps.steps[number]
    return {kind: ready[kind] if table is made.get(kind) else table for kind, table in tables.items()}


def pass_on(cache: Cache, after: Cache) -> Cache:
    """Gives the cache after a step what was prepared for it."""
    if (steps := _noted(cache)) is not None:
        object.__setattr__(after, "_next", steps)
    return after


def _noted(cache: Cache) -> NextSteps | None:
    steps: NextSteps | None = vars(cache).get("_next")
    return steps


def _ahead(config: DecoderConfig, tokens: Tensor, rows: KnownRows, length: int | Tensor | None) -> NextSteps | None:
    """The next steps of these rows; None where a model's tensors are not [B, S, ...], or writes are not counted."""
    if torch.is_inference_mode_enabled() or (isinstance(length, Tensor) and length.is_inference()):
        return None
    later = [rows]
    while len(later) < AHEAD:
        later.append(later[-1].next())
    positions, ids = rows.positions() + torch.arange(AHEAD), rows.segment_ids().repeat(1, AHEAD)
    many = tokens.expand(-1, AHEAD, *tokens.shape[2:])
    made = prepare_text(config, many, positions, ids, length, count=max(rows.lengths) + 1)
    ready = _laid_out(made[2])
    leaves = {id(leaf): leaf for leaf in tree.leaves((made, ready))}.values()
    if not all(isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.shape[1] == AHEAD for leaf in leaves):
        return None
    steps = tuple(_of_each((made, ready), {}))
    read = (*leaves, length) if isinstance(length, Tensor) else tuple(leaves)
    written = tuple((tensor, version(tensor)) for tensor in read)
    return NextSteps(config, length, tokens.is_floating_point(), tuple(later), steps, written)


def _laid_out(tables: Mapping[str, Any]) -> dict[str, Any]:
    """{kind: `Rotation` of its table}, or what there is in place of a table that rotates."""
    rotations: dict[int, Rotation] = {}
    for table in tables.values():
        if is_rotating(table) and id(table) not in rotations:
            rotations[id(table)] = laid_out(table)
    return {kind: rotations.get(id(table), table) for kind, table in tables.items()}


def _of_each(made: Any, shared: dict[int, Sequence[Any]]) -> Sequence[Any]:
    """The trees of each step. shared: those of the nodes that were seen, by their identity: kinds share masks."""
    if id(made) in shared:
        return shared[id(made)]
    found: Sequence[Any]
    if isinstance(made, Tensor):
        found = made.split(1, 1)
    elif isinstance(made, dict | tuple | list):
        values = made.values() if isinstance(made, dict) else made
        entries = zip(*(_of_each(value, shared) for value in values), strict=True) if made else [()] * AHEAD
        found = [dict(zip(made, of, strict=True)) if isinstance(made, dict) else type(made)(of) for of in entries]
    elif is_dataclass(made):
        static = {field.name: bool(field.metadata.get("static")) for field in fields(made)}
        values = [getattr(made, name) for name in static]
        parts = [[v] * AHEAD if s else _of_each(v, shared) for v, s in zip(values, static.values(), strict=True)]
        node: Any = type(made)
        found = [node(*of) for of in zip(*parts, strict=True)]
    else:  # an absent child
        found = [made] * AHEAD
    shared[id(made)] = found
    return found
