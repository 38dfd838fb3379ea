"""Dequantization of fp8 and mxfp4 checkpoints: low-precision values with one scale per block of elements.

Integers (AWQ, GPTQ, compressed-tensors) are in `integer_weights`; `pair_scales` and `read_quantized` are for both.

    method  in the files                                                     values          scales are
    fp8     X [.., out, in], X_scale_inv [.., ceil(out / 128), ceil(in / 128)]  float8_e4m3fn   multiplied
    mxfp4   X_blocks [.., out, in / 32, 16], X_scales [.., out, in / 32]        e2m1, 2 a byte  bytes s: 2^(s - 127)

They are read as bf16 or the requested dtype; products are taken in fp32, which is exact for mxfp4. fp8 is the format of
DeepSeek V3 (arXiv 2412.19437), with fp32 scales, and Qwen 3, with bf16 scales: blocks have 128 rows and columns, the
last ones may be smaller. mxfp4 is the format of gpt-oss (OCP Microscaling Formats 1.0): the first of two elements is
the low half of their byte, and X itself is transposed, [.., in, out].
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, overload

import torch
from torch import Tensor

from fnmodels.errors import MismatchError
from fnmodels.models.common.quantization import Quantization
from params.io.safetensors_file import Box, TensorEntry, TensorFile, box_shape, read_tensor, row_entries

from .integer_weights import FORMS, IntegerWeight, pair_integers, read_integer_weight
from .shard_index import as_lines

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8_SCALES = (torch.float32, torch.bfloat16, torch.float16)  # all exact in fp32
MXFP4_BLOCK = (1, 32)  # rows and columns that share a scale
CHUNK = 1 << 20  # elements dequantized at a time; temporary memory is ten bytes for each


@dataclass(frozen=True)
class BlockScaled:
    """A quantized tensor: values and scales in the files. shape and dtype are those of the dequantized tensor.

    values: entry in the file that `Found` pairs with this. block: rows and columns that share a scale; None for mxfp4.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: TensorEntry
    scales: TensorEntry
    scale_file: TensorFile
    block: tuple[int, int] | None


Quantized = BlockScaled | IntegerWeight
Found = dict[str, tuple[TensorFile, TensorEntry | Quantized]]


def pair_scales(
    folder: Path, found: dict[str, tuple[TensorFile, TensorEntry]], quantization: Quantization | None
) -> Found:
    """`found` with each quantized tensor and its scales as one `Quantized`.

    MismatchError names all tensors whose scales are missing or have the wrong shape or dtype.
    """
    if quantization is None:
        return {**found}
    pair = {"fp8": _fp8, "mxfp4": _mxfp4, **dict.fromkeys(FORMS, _integers)}[quantization.method]
    paired, faults = pair(found, quantization)
    if faults:
        method = quantization.method
        raise MismatchError(f"{folder}: {len(faults)} tensors are not as {method} has them:{as_lines(faults)}")
    return paired  # may contain none: dequantized models often keep the quantization_config


def _fp8(found: dict[str, tuple[TensorFile, TensorEntry]], quantization: Quantization) -> tuple[Found, list[str]]:
    paired: Found = {**found}
    faults = []
    rows, columns = quantization.block
    for name, (file, entry) in found.items():
        if entry.dtype != torch.float8_e4m3fn or len(entry.shape) < 2:
            continue
        scale_name = f"{name}_scale_inv"
        if scale_name not in found:
            faults.append(f"{name!r} in {file.path.name}: float8_e4m3fn, but its scale {scale_name!r} is missing")
            continue
        *lead, out, width = entry.shape
        scale_file, scales = found[scale_name]
        blocks = (*lead, -(-out // rows), -(-width // columns))
        faults += _scale_faults(scale_name, scale_file, scales, blocks, *FP8_SCALES)
        paired[name] = (file, BlockScaled(entry.shape, torch.bfloat16, entry, scales, scale_file, (rows, columns)))
        del paired[scale_name]
    return paired, faults


def _mxfp4(found: dict[str, tuple[TensorFile, TensorEntry]], quantization: Quantization) -> tuple[Found, list[str]]:
    paired: Found = {**found}
    faults = []
    for blocks_name, (file, entry) in found.items():
        if not blocks_name.endswith("_blocks"):
            continue
        name = blocks_name.removesuffix("_blocks")
        scale_name = f"{name}_scales"
        where = f"{blocks_name!r} in {file.path.name}"
        if scale_name not in found:
            faults.append(f"{where}: its scales {scale_name!r} are missing")
            continue
        if name in found:
            faults.append(f"{where}: {name!r} is there as well, and only one of them can be meant")
            continue
        if entry.dtype != torch.uint8 or len(entry.shape) < 3 or entry.shape[-1] != 16:
            found_as = f"{list(entry.shape)} of {str(entry.dtype).removeprefix('torch.')}"
            faults.append(f"{where}: expected [.., out, in / 32, 16] of uint8, found {found_as}")
            continue
        *lead, out, blocks, _ = entry.shape
        scale_file, scales = found[scale_name]
        faults += _scale_faults(scale_name, scale_file, scales, (*lead, out, blocks), torch.uint8)
        shape = (*lead, blocks * 32, out)
        paired[name] = (file, BlockScaled(shape, torch.bfloat16, entry, scales, scale_file, None))
        del paired[blocks_name], paired[scale_name]
    return paired, faults


def _integers(found: dict[str, tuple[TensorFile, TensorEntry]], quantization: Quantization) -> tuple[Found, list[str]]:
    paired, faults = pair_integers(found, quantization)
    return {**paired}, faults


def _scale_faults(
    name: str, file: TensorFile, scales: TensorEntry, shape: tuple[int, ...], *dtypes: torch.dtype
) -> list[str]:
    if scales.shape == shape and scales.dtype in dtypes:
        return []
    *wanted, actual = (str(d).removeprefix("torch.") for d in (*dtypes, scales.dtype))
    return [
        f"{name!r} in {file.path.name}: expected {list(shape)} of {' or '.join(wanted)}, one for each block of the "
        f"tensor it scales, found {list(scales.shape)} of {actual}"
    ]


@overload
def split_rows(tensor: TensorEntry, rows: slice = ...) -> list[TensorEntry]: ...
@overload
def split_rows(tensor: BlockScaled, rows: slice = ...) -> list[BlockScaled]: ...
@overload
def split_rows(tensor: IntegerWeight, rows: slice = ...) -> NoReturn: ...
def split_rows(tensor: TensorEntry | Quantized, rows: slice = slice(None)) -> list[TensorEntry] | list[BlockScaled]:
    """One tensor per index of the first dimension, or of those in `rows`."""
    if isinstance(tensor, IntegerWeight):
        raise ValueError(f"{tensor.module}.weight has two dimensions: integers are a weight [out, in] each.")
    if isinstance(tensor, BlockScaled):
        return [
            replace(tensor, shape=tensor.shape[1:], values=values, scales=scales)
            for values, scales in zip(row_entries(tensor.values, rows), row_entries(tensor.scales, rows), strict=True)
        ]
    return row_entries(tensor, rows)


def read_quantized(
    file: TensorFile, tensor: Quantized, dtype: torch.dtype | None, buffer: Tensor, box: Box | None = None
) -> Tensor:
    """The dequantized tensor, or its shard `box`, in new memory (mxfp4: a transposed view); dtype None: bf16.

    For a shard, all blocks that it touches are read. Integers are read by `read_integer_weight`.
    """
    if isinstance(tensor, IntegerWeight):
        return read_integer_weight(tensor, dtype, buffer, box)
    box = tuple(slice(0, n) for n in tensor.shape) if box is None else box
    box = box if tensor.block else (*box[:-2], box[-1], box[-2])  # in the order of the file
    out = torch.empty(box_shape(box), dtype=dtype or tensor.dtype, device="cpu")
    _fill(out, box, file, tensor, buffer)
    return out if tensor.block else out.mT


def _fill(target: Tensor, box: Box, file: TensorFile, tensor: BlockScaled, buffer: Tensor) -> None:
    """Dequantize the shard `box` of [.., out, in] into `target`, in chunks of rows of each matrix."""
    if target.ndim > 2:
        for matrix, quantized in zip(target, split_rows(tensor, box[0]), strict=True):
            _fill(matrix, box[1:], file, quantized, buffer)
        return
    (rows, columns), (height, width) = box, tensor.block or MXFP4_BLOCK
    across = slice(columns.start // width, -(-columns.stop // width))  # blocks per row
    top, offset = rows.start // height, columns.start - across.start * width
    scales = read_tensor(tensor.scale_file, tensor.scales, None, buffer, (slice(top, -(-rows.stop // height)), across))
    _check_scales(tensor, scales)
    elements = slice(across.start * width, min(across.stop * width, tensor.values.shape[1]))
    inner = (elements,) if tensor.block else (across, slice(0, tensor.values.shape[-1]))
    step = height * max(1, CHUNK // (height * max(1, width * (across.stop - across.start))))
    for begin in range(top * height, rows.stop, step):
        end = min(begin + step, rows.stop)
        values = read_tensor(file, tensor.values, None, buffer, (slice(begin, end), *inner))
        row_scales = scales[begin // height - top : -(-end // height) - top]
        wide = _from_fp8(values, row_scales, tensor.block) if tensor.block else _from_mxfp4(values, row_scales)
        first = max(begin, rows.start)
        target[first - rows.start : end - rows.start] = wide[first - begin :, offset : offset + target.shape[1]]


def _check_scales(tensor: BlockScaled, scales: Tensor) -> None:
    """MismatchError for scales that no quantizer writes: not positive, not finite, or a byte that means NaN."""
    bad = ~((scales > 0) & scales.isfinite()) if tensor.block else scales == 255
    if bad.any():
        file, start = tensor.scale_file, tensor.scales.start
        name = next(name for name, entry in file.entries.items() if entry.start <= start < entry.stop)
        faulty = f"{int(bad.sum()):,} of {bad.numel():,} scales, {scales[bad][0].item()} for one,"
        wanted = "finite and above 0" if tensor.block else "below 255, which stands for NaN"
        raise MismatchError(f"{file.path}: {name!r}: {faulty} are not {wanted}.")


def _from_fp8(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """[out, in] float8_e4m3fn and FP8_SCALES [ceil(out / rows), ceil(in / columns)] -> fp32 [out, in]."""
    out, width = values.shape
    rows, columns = min(block[0], out), min(block[1], width)  # a block may be larger than the tensor
    wide = scales.repeat_interleave(rows, 0)[:out].repeat_interleave(columns, 1)[:, :width]
    # a table lookup, because torch's own cast from fp8 takes four times as long on a CPU
    decoded = torch.arange(256, dtype=torch.uint8).view(values.dtype).float()
    return decoded.index_select(0, values.view(torch.uint8).flatten().int()).view(out, width).mul_(wide)


def _from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """[out, n, 16] and [out, n], both uint8 -> fp32 [out, 32 n]."""
    decoded = torch.tensor([*E2M1, *(-value for value in E2M1)])
    pairs = torch.stack((decoded.repeat(16), decoded.repeat_interleave(16)), 1)  # by byte: low half, high half
    # looked up a pair at a time, as one 64-bit word
    words = pairs.view(torch.int64).flatten().index_select(0, blocks.flatten().int())
    values = words.view(torch.float32).view(*scales.shape, 32)
    return values.mul_(scales.view(torch.float8_e8m0fnu).float()[..., None]).flatten(1)
