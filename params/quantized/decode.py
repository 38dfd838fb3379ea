"""Decoders of quantized tensors: what the bytes of a file stand for, element by element.

A decoder takes a matrix as it lies in the file and returns one number for each element. Packed ones return several
elements for each entry, in order, along the packed dimension.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits; the fourth is the sign


def floats(raw: Tensor) -> Tensor:
    """Floating-point numbers of any width, integers too -> fp32."""
    if raw.dtype != torch.float8_e4m3fn:
        return raw.float()
    # a table lookup, because torch's own cast from fp8 takes four times as long on a CPU
    table = torch.arange(256, dtype=torch.uint8, device=raw.device).view(raw.dtype).float()
    return table.index_select(0, raw.contiguous().view(torch.uint8).flatten().int()).view(raw.shape)


def powers(raw: Tensor) -> Tensor:
    """Bytes s -> 2^(s - 127), fp32 (e8m0 of OCP Microscaling Formats 1.0); 255 stands for NaN."""
    return raw.view(torch.float8_e8m0fnu).float()


def floats_or_powers(raw: Tensor) -> Tensor:
    """Floating-point numbers, or bytes as `powers` reads them."""
    return powers(raw) if raw.dtype == torch.uint8 else floats(raw)


def e2m1(raw: Tensor) -> Tensor:
    """Bytes [rows, n] -> fp32 [rows, 2 n]: two 4-bit floats (OCP e2m1) each, the lower half first."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=raw.device)
    return _pairs(raw.contiguous().view(torch.uint8), torch.stack((table.repeat(16), table.repeat_interleave(16)), 1))


def look_up(codes: Tensor, table: Tensor) -> Tensor:
    """The numbers of a table, fp32. Of a table of 16, codes are bytes of two indices, the upper half first."""
    if len(table) == 16:
        return _pairs(codes, torch.stack((table.repeat_interleave(16), table.repeat(16)), 1))
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def _pairs(raw: Tensor, pairs: Tensor) -> Tensor:
    """Bytes [rows, n] -> [rows, 2 n], by a table [256, 2], looked up a pair at a time as one 64-bit word."""
    words = pairs.contiguous().view(torch.int64).flatten().index_select(0, raw.flatten().int())
    return words.view(torch.float32).view(raw.shape[0], -1)


def same(raw: Tensor) -> Tensor:
    """Entries as they are, of codes that a table is looked up by."""
    return raw


@dataclass(frozen=True)
class PackedIntegers:
    """Unsigned integers of `bits` bits, packed along dimension `dim`: the first in the lowest bits of a word.

    order: for each place in a word, lowest first, which of the word's integers is there. Without it, where a word is
    no multiple of `bits`, integers continue in the next one. offset: is added to them, modulo 2^bits. signed: the
    highest bit is their sign.
    """

    bits: int
    dim: int
    order: tuple[int, ...] = ()
    offset: int = 0
    signed: bool = False

    def __call__(self, raw: Tensor) -> Tensor:
        if self.signed:
            integers = replace(self, signed=False)(raw.view(torch.uint8)).int()
            return integers - ((integers >> self.bits - 1) << self.bits)
        if self.dim == 0 and raw.stride(0) < raw.stride(1):  # packed along the dimension that is contiguous
            return replace(self, dim=1)(raw.mT).mT
        raw = raw.view(torch.int32) if raw.dtype == torch.uint32 else raw
        integers = self._in_words(raw) if raw.dtype.itemsize * 8 % self.bits == 0 else self._across_words(raw)
        return (integers + self.offset) & (1 << self.bits) - 1 if self.offset else integers

    def _in_words(self, raw: Tensor) -> Tensor:
        count = raw.dtype.itemsize * 8 // self.bits
        order = self.order or range(count)
        shifts = torch.tensor([self.bits * order.index(i) for i in range(count)], dtype=raw.dtype, device=raw.device)
        integers = (raw.unsqueeze(self.dim + 1) >> shifts.view(-1, *[1] * (1 - self.dim))) & (1 << self.bits) - 1
        return integers.flatten(self.dim, self.dim + 1)

    def _across_words(self, raw: Tensor) -> Tensor:
        """The integers of groups of `bits` words of 32 bits, which hold 32 of them."""
        starts = torch.arange(32, device=raw.device) * self.bits
        words = raw.unflatten(self.dim, (-1, self.bits)).long() & 0xFFFFFFFF
        inner = self.dim + 1
        low = words.index_select(inner, starts // 32)
        high = words.index_select(inner, (starts // 32 + 1).clamp(max=self.bits - 1))
        shifts = (starts % 32).view(-1, *[1] * (1 - self.dim))
        integers = (low >> shifts | high << 32 - shifts) & (1 << self.bits) - 1
        return integers.int().flatten(self.dim, inner)


@dataclass(frozen=True)
class Slabs:
    """Unsigned integers packed as HQQ does: a word holds entries of `count` equal slabs of rows, the first highest.

    Dimension 0 of the result has as many rows as all slabs; padding at its end is the caller's to cut. lowest_first:
    the first slab is in the lowest bits.
    """

    bits: int
    count: int
    lowest_first: bool = False

    def shifts(self) -> list[int]:
        """The lowest bit of each slab in a word."""
        shifts = [self.bits * slab for slab in range(self.count)]
        return shifts if self.lowest_first else shifts[::-1]

    def __call__(self, raw: Tensor) -> Tensor:
        return torch.cat([(raw >> shift) & (1 << self.bits) - 1 for shift in self.shifts()])
