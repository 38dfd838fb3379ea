"""Weights as publishers' quantized files store them, each beside its values by a loop over blocks: `made(shape, seed)`.

A maker returns ({the name's ending after that of the module: tensor}, the values in fp32).
"""

from collections.abc import Callable

import torch
from torch import Tensor

Made = tuple[dict[str, Tensor], Tensor]
Maker = Callable[[tuple[int, ...], int], Made]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def powers_of(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """(bytes of e8m0, the powers of two that they are)."""
    stored = torch.randint(112, 126, shape, generator=draw(seed)).to(torch.uint8)
    return stored, torch.tensor([2.0 ** (byte - 127) for byte in stored.flatten().tolist()]).view(shape)


def over_blocks(values: Tensor, scales: Tensor, rows: int, columns: int) -> Tensor:
    """The values [.., out, in] times the scale of the block that each is in."""
    out = values.clone()
    for i in range(scales.shape[-2]):
        for j in range(scales.shape[-1]):
            block = (..., slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            out[block] *= scales[..., i, j, None, None]
    return out


def fp8(block: tuple[int, int], weight: str, scale: str, dtype: torch.dtype | None = torch.float8_e8m0fnu) -> Maker:
    """e4m3 with a scale for each block: a power of two as bytes of `dtype`, or a number in fp32 without one."""

    def made(shape: tuple[int, ...], seed: int) -> Made:
        codes = (torch.randn(shape, generator=draw(seed)) * 30).to(torch.float8_e4m3fn)
        *lead, out, width = shape
        count = (*lead, -(-out // block[0]), -(-width // block[1]))
        if dtype is None:
            scales = torch.rand(count, generator=draw(seed + 1)) * 0.01 + 0.001
            return {weight: codes, scale: scales}, over_blocks(codes.float(), scales, *block)
        stored, powers = powers_of(count, seed + 1)
        return {weight: codes, scale: stored.view(dtype)}, over_blocks(codes.float(), powers, *block)

    return made


def fp8_tensor(weight: str, scale: str, shape_of_scale: tuple[int, ...], activations: str) -> Maker:
    """e4m3 with one scale, beside that of activations."""

    def made(shape: tuple[int, ...], seed: int) -> Made:
        codes = (torch.randn(shape, generator=draw(seed)) * 30).to(torch.float8_e4m3fn)
        number = 0.001 * (seed % 7 + 1)
        parts = {weight: codes, scale: torch.full(shape_of_scale, number), activations: torch.tensor(0.5)}
        return parts, codes.float() * torch.tensor(number)

    return made


def of_table() -> Maker:
    """A shard of a table of embeddings in e4m3, whose scale all shards have."""
    scale = torch.tensor([0.00019931793212890625], dtype=torch.bfloat16)

    def made(shape: tuple[int, ...], seed: int) -> Made:
        codes = (torch.randn(shape, generator=draw(seed)) * 30).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale.clone()}, codes.float() * scale.float()

    return made


def fp4(weight: str, scale: str) -> Maker:
    """e2m1, two in a byte of int8, the lower half first; a power of two for each 32 columns."""

    def made(shape: tuple[int, ...], seed: int) -> Made:
        *lead, out, width = shape
        packed = torch.randint(0, 256, (*lead, out, width // 2), generator=draw(seed))
        stored, powers = powers_of((*lead, out, width // 32), seed + 1)
        pairs = [(E2M1[byte % 16], E2M1[byte // 16]) for byte in packed.flatten().tolist()]
        values = over_blocks(torch.tensor(pairs).view(shape), powers, 1, 32)
        codes = packed.to(torch.uint8).view(torch.int8)
        return {weight: codes, scale: stored.view(torch.float8_e8m0fnu)}, values

    return made
