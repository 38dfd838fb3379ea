"""`Form`: how a quantized weight is stored, as a record that both readers of files and kept leaves compute from.

A form has parts, the tensors of one weight. Each says how its entries lie over the weight's rows and columns (`Axis`)
and what they stand for (`decode`). The value of an element, in fp32, is

    (code - zero) * scale * factor + bias

where codes may be looked up in a table, and scales and zeros may be quantized themselves: they are forms then.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from .decode import floats, look_up

Region = tuple[slice, slice]  # rows and columns
SCALES = (torch.float32, torch.bfloat16, torch.float16)  # all exact in fp32
INDICES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Axis:
    """Layout of elements along one dimension of a part: `elements` of them share `entries` entries; 0: all share them.

    packed: decoding gives one number for each element, and otherwise one for all that share an entry.
    """

    elements: int = 1
    entries: int = 1
    packed: bool = False

    def count(self, size: int) -> int:
        """The entries of `size` elements; the last ones may share theirs with fewer."""
        return -(-size // self.elements) * self.entries if self.elements else self.entries

    def size(self, count: int) -> int:
        """The elements of `count` entries, of codes."""
        return count // self.entries * self.elements

    def region(self, extent: slice) -> slice:
        """The entries of the elements `extent`."""
        if not self.elements:
            return slice(0, self.entries)
        return slice(extent.start // self.elements * self.entries, -(-extent.stop // self.elements) * self.entries)


EACH, ALL = Axis(), Axis(0)


class Reader(Protocol):
    """A source of the parts of a weight: files, or tensors in memory."""

    def has(self, part: Part) -> bool:
        """Whether the weight has this part, which may be absent if it is not `needed`."""

    def read(self, part: Part, region: Region) -> Tensor:
        """A region of the part, [rows, columns] whatever its order in the file."""

    def columns(self, part: Part) -> int:
        """The number of columns of entries in the part."""

    def refuse(self, part: Part, what: str) -> None:
        """Raise an error that says `what` about the values of a part."""

    @property
    def checks(self) -> bool:
        """Whether the values of parts are checked: those in memory were, when they were read."""


@dataclass(frozen=True)
class Part:
    """One tensor of a quantized weight.

    ending: of its name, after what the names of all parts begin with. inputs_first: it is [columns, rows] in the file.
    decode: from entries to numbers. pieces: the file has the columns in pieces of this length, [rows, n, pieces].
    check: which numbers are refused. padded: the file may have more columns, without meaning.
    """

    ending: str
    dtypes: tuple[torch.dtype, ...]
    rows: Axis = EACH
    columns: Axis = EACH
    decode: Callable[[Tensor], Tensor] = floats
    inputs_first: bool = False
    needed: bool = True
    pieces: int = 0
    padded: bool = False
    check: Literal["", "finite", "not negative", "positive"] = ""

    def parts(self) -> Iterator[tuple[Part, tuple[Axis, ...], tuple[Axis, ...]]]:
        yield self, (self.rows,), (self.columns,)

    def aligned(self, reader: Reader, rows: slice, columns: slice) -> Tensor:
        """The numbers of all entries that the elements touch."""
        values = self.decode(reader.read(self, (self.rows.region(rows), self.columns.region(columns))))
        if reader.checks and self.check and (fault := self.fault(values)):
            reader.refuse(self, fault)
        return values

    def fault(self, values: Tensor) -> str:
        """The fault of the part's numbers by its `check`; "" for none."""
        good = values.isfinite()
        if self.check == "positive":
            good &= values > 0
        elif self.check == "not negative":
            good &= values >= 0
        if good.all():
            return ""
        end = {"positive": " and above 0", "not negative": " and 0 or above"}.get(self.check, "")
        bad = values[~good]
        return f"{len(bad):,} of {values.numel():,} scales, {bad[0].item()} for one, are not finite{end}"


@dataclass(frozen=True)
class Form:
    """The storage form of a weight, or of what scales or zeros of another form are (rows, columns: as in `Part`).

    name: in messages and docs. weight: the ending of the dequantized weight's name in the place of the codes'.
    zeros, bias: are subtracted and added. middle: the code of 0 where zeros are absent. table: codes are indices of it.
    index: the group of each column, in the place of an even division. divides: the scales are divided by. width: of
    the matrix of all elements that the parts lie over; 0: that of the weight, -1: all elements are one row. whole: the
    codes can only be decoded at once. turned: the weight is [in, out].
    dtype: of the dequantized weight; None: that of the scales. state: the ending of a tensor that describes the weight.
    beside: endings of tensors that say nothing of the values. repeated: endings of tensors that say again what the form
    is, each with the integers that it must hold. only: a pattern in the names of the tensors of codes that may have it.
    """

    name: str
    codes: Part
    scales: Part | Form | None
    zeros: Part | Form | None = None
    bias: Part | None = None
    table: Part | None = None
    index: Part | None = None
    weight: str = ""
    middle: float = 0
    factor: float = 1
    offset: float = 0
    divides: bool = False
    rows: Axis = EACH
    columns: Axis = EACH
    width: int = 0
    whole: bool = False
    turned: bool = False
    dtype: torch.dtype | None = None
    state: str = ""
    beside: tuple[str, ...] = ()
    repeated: tuple[tuple[str, tuple[int, ...]], ...] = ()
    only: str = ""

    @property
    def descriptions(self) -> tuple[str, ...]:
        """Endings of the tensors that a weight may have besides its parts."""
        named = (self.state, *self.beside, *(ending for ending, _ in self.repeated))
        return tuple(ending for ending in named if ending)

    @functools.cached_property
    def needed(self) -> tuple[str, ...]:
        """Endings of the tensors that every weight has."""
        return tuple(part.ending for part, _, _ in self.parts() if part.needed) + (self.state,) * bool(self.state)

    def parts(self) -> Iterator[tuple[Part, tuple[Axis, ...], tuple[Axis, ...]]]:
        """Each part with the axes that lead from the weight's rows and columns to its entries."""
        for member in (self.codes, self.scales, self.zeros, self.bias, self.table, self.index):
            if member is not None:
                for part, rows, columns in member.parts():
                    if isinstance(member, Form):
                        rows, columns = (member.rows, *rows), (member.columns, *columns)
                    yield part, rows, columns

    def aligned(self, reader: Reader, rows: slice, columns: slice) -> Tensor:
        return self.elements(reader, self.rows.region(rows), self.columns.region(columns))

    def elements(self, reader: Reader, rows: slice, columns: slice) -> Tensor:
        """fp32 [rows, columns], new memory."""
        codes = self.codes.aligned(reader, rows, columns)
        if self.table is not None:
            codes = look_up(codes, self.table.aligned(reader, rows, columns).flatten())
        codes = _cut(_cut(codes, self.codes.rows, rows, 0), self.codes.columns, columns, 1)
        values = codes.float()  # in new memory: no decoder returns what it reads
        groups = None
        if self.index is not None and reader.has(self.index):
            groups = self.groups_of(reader, columns)
            if reader.checks and self._is_even(groups[0], columns):  # of most files, and twice as fast
                groups = None
        if self.zeros is not None and _present(reader, self.zeros):
            _apply(Tensor.sub_, values, self.zeros, reader, (rows, columns), groups)
        elif self.middle:
            values.sub_(self.middle)
        if self.scales is not None and _present(reader, self.scales):
            _apply(Tensor.div_ if self.divides else Tensor.mul_, values, self.scales, reader, (rows, columns), groups)
        if self.factor != 1:
            values.mul_(self.factor)
        if self.bias is not None:
            _apply(Tensor.add_, values, self.bias, reader, (rows, columns), groups)
        return values.add_(self.offset) if self.offset else values

    def groups_of(self, reader: Reader, columns: slice) -> tuple[Tensor, slice]:
        """(group [columns] of each column, the elements that all groups cover)."""
        assert self.index is not None and isinstance(self.scales, Part)
        groups = reader.read(self.index, (slice(0, 1), columns)).flatten().long()
        count = reader.columns(self.scales)
        if reader.checks and (outside := (groups < 0) | (groups >= count)).any():
            first = int(groups[outside][0])
            reader.refuse(self.index, f"{int(outside.sum()):,} groups, {first} for one, are not from 0 to {count - 1}")
        return groups, slice(0, count * (self.scales.columns.elements or 1))

    def is_even(self, reader: Reader, columns: slice) -> bool:
        """Whether the groups of these columns are those of the even division."""
        return self._is_even(self.groups_of(reader, columns)[0], columns)

    def _is_even(self, groups: Tensor, columns: slice) -> bool:
        assert self.scales is not None
        size = self.scales.columns.elements
        return size > 0 and torch.equal(groups, torch.arange(columns.start, columns.stop) // size)

    def values(self, reader: Reader, shape: tuple[int, int], region: Region) -> Tensor:
        """fp32, the region of a weight of this shape."""
        rows, columns = region
        if self.whole:
            height, width = self.matrix(shape)
            return self.elements(reader, slice(0, height), slice(0, width)).view(shape)[rows, columns]
        if not self.width:
            return self.elements(reader, rows, columns)
        flat = self.elements(reader, slice(0, 1), slice(rows.start * shape[1], rows.stop * shape[1]))
        return flat.view(-1, shape[1])[:, columns]

    @property
    def is_flat(self) -> bool:
        """Whether its parts lie over all elements together, so that no dimension of the weight is one of theirs."""
        return self.whole or self.width != 0

    def matrix(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The rows and columns that the parts of a weight of this shape lie over."""
        count = shape[0] * shape[1]
        if self.width < 0:
            return 1, count
        return (-(-count // self.width), self.width) if self.width else shape

    def step(self, size: int, width: int, chunk: int) -> int:
        """The number of rows (with codes [in, out]: columns) to dequantize at once, for about `chunk` elements."""
        if self.whole:
            return max(1, size)
        unit = self.codes.columns.elements if self.codes.inputs_first else self._rows_unit()
        return max(1, chunk // max(1, width * unit)) * unit

    def _rows_unit(self) -> int:
        scales = 0 if self.scales is None or self.width else self.scales.rows.elements
        return math.lcm(self.codes.rows.elements or 1, min(scales or 1, 1 << 12))


def _present(reader: Reader, one: Part | Form) -> bool:
    return reader.has(one if isinstance(one, Part) else one.codes)


def _cut(values: Tensor, axis: Axis, extent: slice, dim: int) -> Tensor:
    """The elements `extent` out of the aligned numbers, one for each element or for all that share an entry."""
    if not axis.elements:
        return values
    if not axis.packed and axis.elements > 1:
        values = values.repeat_interleave(min(axis.elements, extent.stop), dim)
    return values.narrow(dim, extent.start % axis.elements, extent.stop - extent.start)


def _apply(
    operation: Callable[[Tensor, Tensor], Tensor],
    values: Tensor,
    operand: Part | Form,
    reader: Reader,
    region: Region,
    groups: tuple[Tensor, slice] | None,
) -> None:
    """Apply the numbers of `operand` to the values [rows, columns] of a region, in place."""
    (rows, columns), axis = region, operand.columns
    if groups is not None and axis.elements:
        numbers = operand.aligned(reader, rows, groups[1])
        operation(values, _cut(numbers, operand.rows, rows, 0).index_select(1, groups[0]))
        return
    numbers = _cut(operand.aligned(reader, rows, columns), operand.rows, rows, 0)
    even = axis.elements and not (columns.start % axis.elements or columns.stop % axis.elements)
    if axis.elements > 1 and even and not axis.packed:  # without numbers for each element
        operation(values.unflatten(1, (-1, axis.elements)), numbers[..., None])
    else:
        operation(values, _cut(numbers, axis, columns, 1))
