"""Blocks of ggml's types, by the gguf package: their sizes, and their values in fp32."""

import importlib.util
from functools import cache

import numpy as np
import torch
from torch import Tensor

from fnmodels.errors import UnsupportedError, UserError


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


def dequantized(data: bytearray, kind: int, shape: tuple[int, ...]) -> Tensor:
    """The values in fp32 of a tensor that is stored as `data`."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    rows = np.frombuffer(data, np.uint8).reshape(*shape[:-1], -1)
    with np.errstate(all="ignore"):  # scales of damaged blocks are not finite, which check_finite finds
        return torch.from_numpy(dequantize(rows, GGMLQuantizationType(kind))).view(shape)
