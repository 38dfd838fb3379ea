"""The next steps of plain rows, prepared many at a time: all but the tokens follows from numbers that the host knows.

What `prepare` makes of S tokens are tensors [B, S, ...], so that a step's are a slice of those of many. They belong to
the cache, and go on to the one after it; they are made anew for another config, length or rows, and once a caller has
written into any of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.inputs.mask import MaskLike
from fnmodels.models.common.family import DecoderConfig
from fnmodels.ops.position_range import position_range
from fnmodels.ops.rotary import Rotation, is_rotating, laid_out
from fnmodels.ops.torch_internals import versions
from fnmodels.preparation import prepare_text

from .known_rows import KnownRows
from .value import Cache, Facts, with_facts

AHEAD = 32  # steps
_OF_TOKENS = ("tokens", "token_ids")  # inputs that are not known before the step
Prepared = tuple[dict[str, Any], dict[str, MaskLike], Mapping[str, Any]]


class NextStep(NamedTuple):
    """One step of one token per row: the rows before it, the results of `prepare` without the tokens, and its tables
    laid out for rotation.
    """

    rows: KnownRows
    inputs: Mapping[str, Any]
    masks: dict[str, MaskLike]
    tables: Mapping[str, Any]
    ready: Mapping[str, Any]

    def reads(self, inputs: Any, tables: Mapping[str, Any]) -> bool:
        """Whether inputs["valid"] and all tables are those of this step."""
        if not isinstance(inputs, dict) or inputs.get("valid") is not self.inputs.get("valid"):
            return False
        if tables is self.tables:
            return True
        return tables.keys() == self.tables.keys() and all(tables[kind] is own for kind, own in self.tables.items())


@dataclass(frozen=True)
class NextSteps:
    """Some steps of one token each, for all of which there is room.

    config, length, vectors: what they were made of; vectors: whether tokens are vectors. tensors, writes: those of all
    steps together, of which those of one are views, and how often each had been written to.
    """

    config: DecoderConfig
    length: int | Tensor | None
    vectors: bool
    steps: tuple[NextStep, ...]
    tensors: tuple[Tensor, ...]
    writes: list[int]

    def are_of(self, config: DecoderConfig, tokens: Tensor, length: int | Tensor | None) -> bool:
        """Whether they were made of these."""
        same = length is self.length or (isinstance(length, int) and length == self.length)
        return same and config is self.config and tokens.is_floating_point() is self.vectors

    def of(self, rows: KnownRows) -> NextStep | None:
        """The next step of these rows; None: it is another one, or what it reads was written to."""
        count = rows.lengths[0] - self.steps[0].rows.lengths[0]
        if not 0 <= count < len(self.steps):
            return None
        step = self.steps[count]
        same = step.rows is rows or step.rows == rows
        return step if same and versions(self.tensors) == self.writes else None

    def after(self, rows: KnownRows) -> KnownRows:
        """The rows after a step; those of the next one here, where it is the next."""
        count = rows.lengths[0] - self.steps[0].rows.lengths[0]
        following = 0 <= count < len(self.steps) - 1 and self.steps[count].rows is rows
        return self.steps[count + 1].rows if following else rows.next()


def prepared_step(facts: Facts, config: DecoderConfig, tokens: Tensor, length: int | Tensor | None) -> NextStep | None:
    """The next step of these facts, where it was prepared for tokens like these [B, 1]."""
    steps: NextSteps | None = facts.steps
    return steps.of(facts.rows) if steps is not None and steps.are_of(config, tokens, length) else None


def prepare_ahead(
    cache: Cache, facts: Facts, config: DecoderConfig, tokens: Tensor, length: int | Tensor | None
) -> tuple[Facts, NextStep | None]:
    """The facts, also noted on the cache, with steps of its plain rows, for which there is room, and the first of them;
    None where a step has to be prepared alone.
    """
    known: NextSteps | None = facts.steps
    if known is not None and isinstance(length, Tensor) and known.length is not length:  # one in each call?
        return facts, None
    steps = _ahead(config, tokens, facts.rows, length, room(cache))
    if steps is None:
        return facts, None
    facts = facts._replace(steps=steps)
    with_facts(cache, facts)
    return facts, steps.steps[0]


def prepared(step: NextStep, tokens: Tensor) -> Prepared:
    """(inputs, masks, freqs_cis) of the tokens [B, 1] of a step."""
    inputs = dict(step.inputs)
    for name in _OF_TOKENS:
        if name in inputs:
            inputs[name] = tokens
    return inputs, step.masks, step.tables


def room(cache: Cache) -> int | None:
    """How many tokens the slots of a row hold; None where they are rings."""
    return min((slots.segments.shape[1] for slots in cache.slots.values() if not slots.ring), default=None)


def ready_tables(step: NextStep | None, tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tables, laid out for rotation where they are those of the step."""
    if step is None:
        return tables
    return {kind: step.ready[kind] if table is step.tables.get(kind) else table for kind, table in tables.items()}


def _ahead(
    config: DecoderConfig, tokens: Tensor, rows: KnownRows, length: int | Tensor | None, room: int | None
) -> NextSteps | None:
    """The next steps of these rows; None where a model's tensors are not [B, S, ...], or writes are not counted."""
    if torch.is_inference_mode_enabled() or (isinstance(length, Tensor) and length.is_inference()):
        return None
    longest = max(rows.lengths)
    ends = [end for end in (room, position_range(config)) if end is not None and end > longest]
    count = min([AHEAD, *(end - longest for end in ends)])
    later = [rows]
    while len(later) < count:
        later.append(later[-1].next())
    positions, ids = rows.positions() + torch.arange(count), rows.segment_ids().repeat(1, count)
    many = tokens.expand(-1, count, *tokens.shape[2:])
    made = prepare_text(config, many, positions, ids, length, count=longest + 1)
    ready = _laid_out(made[2])
    leaves = {id(leaf): leaf for leaf in tree.leaves((made, ready))}.values()
    if not all(isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.shape[1] == count for leaf in leaves):
        return None
    read = (*leaves, length) if isinstance(length, Tensor) else tuple(leaves)
    if (writes := versions(read)) is None:
        return None
    each = _of_each((*made, ready), count, {})
    steps = tuple([NextStep(own, *parts) for own, parts in zip(later, each, strict=True)])
    return NextSteps(config, length, tokens.is_floating_point(), steps, read, writes)


def _laid_out(tables: Mapping[str, Any]) -> dict[str, Any]:
    """{kind: `Rotation` of its table}, or what there is in place of a table that rotates."""
    rotations: dict[int, Rotation] = {}
    for table in tables.values():
        if is_rotating(table) and id(table) not in rotations:
            rotations[id(table)] = laid_out(table)
    return {kind: rotations.get(id(table), table) for kind, table in tables.items()}


def _of_each(made: Any, count: int, shared: dict[int, Sequence[Any]]) -> Sequence[Any]:
    """The trees of each step. shared: those of the nodes that were seen, by their identity: kinds share masks."""
    if id(made) in shared:
        return shared[id(made)]
    found: Sequence[Any]
    if isinstance(made, Tensor):
        found = made.split(1, 1)
    elif isinstance(made, dict | tuple | list):
        values = made.values() if isinstance(made, dict) else made
        entries = zip(*(_of_each(value, count, shared) for value in values), strict=True) if made else [()] * count
        found = [dict(zip(made, of, strict=True)) if isinstance(made, dict) else type(made)(of) for of in entries]
    elif is_dataclass(made):
        static = {field.name: bool(field.metadata.get("static")) for field in fields(made)}
        values = [getattr(made, name) for name in static]
        parts = [[v] * count if s else _of_each(v, count, shared) for v, s in zip(values, static.values(), strict=True)]
        node: Any = type(made)
        found = [node(*of) for of in zip(*parts, strict=True)]
    else:  # an absent child
        found = [made] * count
    shared[id(made)] = found
    return found
