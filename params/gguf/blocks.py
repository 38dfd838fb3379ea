"""Blocks of ggml's types, by the gguf package: their sizes, and their values in fp32."""

import importlib.util
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from fnmodels.errors import UnsupportedError, UserError
from params.quantized.form import EACH, Axis, Form, Part


def check_installed() -> None:
    """UserError without the gguf package."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError("reading GGUF files needs the gguf package: pip install 'fnmodels[gguf]'")


@cache
def block_of(kind: int) -> tuple[int, int]:
    """(elements, bytes) of a block of a ggml type. UnsupportedError: it has none, or no values in fp32."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        elements, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise UnsupportedError(f"is of the ggml type {kind}, which the installed gguf package does not know.") from None
    try:
        dequantize(np.zeros((1, size), np.uint8), GGMLQuantizationType(kind))
    except NotImplementedError:
        name = GGMLQuantizationType(kind).name
        raise UnsupportedError(f"is {name}, which the installed gguf package does not dequantize.") from None
    return elements, size


def name_of(kind: int) -> str:
    """The name of a ggml type that the file's header has."""
    from gguf.constants import GGMLQuantizationType

    return GGMLQuantizationType(kind).name


def dequantized(data: bytearray, kind: int, shape: tuple[int, ...]) -> Tensor:
    """The values in fp32 of a tensor that is stored as `data`."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    rows = np.frombuffer(data, np.uint8).reshape(*shape[:-1], -1)
    with np.errstate(all="ignore"):  # scales of damaged blocks are not finite, which check_finite finds
        return torch.from_numpy(dequantize(rows, GGMLQuantizationType(kind))).view(shape)


@dataclass(frozen=True)
class Blocks:
    """A decoder of rows of blocks, uint8 [rows, bytes] -> fp32 [rows, elements], see `params.quantized.decode`."""

    kind: int

    def __call__(self, raw: Tensor) -> Tensor:
        elements, size = block_of(self.kind)
        rows = raw.contiguous().cpu().numpy()
        return dequantized(bytearray(rows.data), self.kind, (raw.shape[0], raw.shape[1] // size * elements)).to(
            raw.device
        )


def block_form(kind: int) -> Form:
    """The storage form of a weight in rows of blocks."""
    elements, size = block_of(kind)
    codes = Part("", (torch.uint8,), EACH, Axis(elements, size, packed=True), Blocks(kind))
    return Form(f"blocks of the ggml type {kind}", codes, None)
