"""Reading and writing of safetensors files: eight bytes of header length, a JSON header, the tensors' bytes.

The header is parsed here rather than by the safetensors package, so that the header which was checked is the one that
is used: another reader might interpret a damaged header differently. Format: https://github.com/huggingface/safetensors
The package also maps and writes less efficiently (see `map_file`, `write_tensors`); tests compare both with it.
"""

import json
import math
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import FormatError, UnsupportedError
from fnmodels.files import open_regular

from .files import parse_json

HEADER_LIMIT = 100_000_000  # bytes, the limit of the format
HANDLES = 64  # files held open; a common limit for a process is 1,024, shared with everything else
GAP = 1 << 13  # bytes; a gap smaller than this between two ranges is read too: cheaper than another system call
NAMES_LIMIT = 250_000  # tensors in a file; the largest published models have fewer in all their files
DTYPES = {  # in the order of the safetensors package, by size
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
NAMES = {dtype: name for name, dtype in DTYPES.items()}
Box = tuple[slice, ...]  # a shard of a tensor: start and stop in each dimension


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: its dtype and shape, and its byte range start <= i < stop in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class OpenFiles:
    """An LRU cache of open files: a checkpoint may have more shards than a process may have files open.

    read: bytes read through it; reads of mapped memory cannot be counted.
    """

    def __init__(self) -> None:
        self.read = 0
        self._open: dict[Path, FileIO] = {}  # in the order of use
        self._first: dict[Path, tuple[int, ...]] = {}

    def get(self, path: Path) -> FileIO:
        """The open file of `path`. FormatError: it had to be opened again and has been replaced or changed."""
        handle = self._open.pop(path, None)
        if handle is None:
            handle = FileIO(open_regular(path, follow=True))  # `plain_file` has checked it, or the caller named it
            status = os.fstat(handle.fileno())
            identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            if self._first.setdefault(path, identity) != identity:
                handle.close()
                raise FormatError(f"{path} was replaced or changed after its header had been checked: load it again.")
        self._open[path] = handle
        if len(self._open) > HANDLES:
            self._open.pop(next(iter(self._open))).close()
        return handle

    def fill(self, path: Path, view: memoryview | bytearray, start: int) -> None:
        """Fill `view` with the bytes of the file from `start` on."""
        # A single read returns at most 2 GiB; unfilled memory would look like weights.
        handle, done = self.get(path), 0
        while done < len(view):
            count = os.preadv(handle.fileno(), [memoryview(view)[done:]], start + done)
            if not count:
                missing = len(view) - done
                raise FormatError(f"{path} ended {missing:,} bytes early while being read: is it being rewritten?")
            done += count
        self.read += done

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()


@dataclass(frozen=True)
class TensorFile:
    """A file whose header passed all checks. Mapped tensors stay valid after its handle is closed."""

    path: Path
    handles: OpenFiles
    entries: dict[str, TensorEntry]


def open_tensors(path: Path, stack: ExitStack) -> TensorFile:
    """Open `path` and check its header against the format and the file's size; no tensor is read. `stack` closes it.

    FormatError names the file and what is wrong with it, UnsupportedError a dtype that torch does not have.
    """
    return open_tensor_files([path], stack)[0]


def open_tensor_files(paths: Iterable[Path], stack: ExitStack) -> list[TensorFile]:
    """`open_tensors` for many files, of which at most `HANDLES` are open at a time."""
    handles = OpenFiles()
    stack.callback(handles.close)
    return [TensorFile(path, handles, _entries(path, handles)) for path in paths]


def _entries(path: Path, handles: OpenFiles) -> dict[str, TensorEntry]:
    size = os.fstat(handles.get(path).fileno()).st_size
    if size < 8:
        raise FormatError(f"{path} has {size} bytes, less than the 8 that a safetensors file begins with.")
    prefix = bytearray(8)
    handles.fill(path, prefix, 0)
    length = int.from_bytes(prefix, "little")
    if prefix == b"version ":
        raise FormatError(f"{path} is a Git LFS pointer instead of the file itself; `git lfs pull` gets it.")
    if length > HEADER_LIMIT:
        raise FormatError(f"{path} announces a header of {length:,} bytes; at most {HEADER_LIMIT:,} are allowed.")
    if 8 + length > size:
        raise FormatError(f"{path} has {size:,} bytes, but its header alone would end at {8 + length:,}: truncated?")
    data = bytearray(length)
    handles.fill(path, data, 8)
    if not data.startswith(b"{"):
        raise FormatError(f"{path}: the header must begin with '{{', not with {bytes(data[:8])!r}.")
    header = parse_json(data, f"{path}: the header")
    if len(header) > NAMES_LIMIT:
        raise FormatError(f"{path} announces {len(header):,} tensors; at most {NAMES_LIMIT:,} are read.")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{path}: __metadata__ must map strings to strings.")
    base = 8 + length
    entries = {name: _entry(path, name, value, base) for name, value in header.items()}
    end = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            fault = "overlaps the one before" if entry.start < end else "leaves a hole before it"
            problem = f"begins at byte {entry.start:,}, not {end:,}: it {fault}"
            raise FormatError(f"{path}: the tensor {_short(name)} {problem}.")
        end = entry.stop
    if end != size:
        fault = "truncated" if end > size else "bytes at the end that belong to no tensor"
        raise FormatError(f"{path} has {size:,} bytes, but its tensors end at {end:,}: {fault}.")
    return entries


def _entry(path: Path, name: str, value: Any, base: int) -> TensorEntry:
    def wrong(what: str) -> FormatError:
        return FormatError(f"{path}: the tensor {_short(name)} {what}.")

    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise wrong("must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not _naturals(shape):
        raise wrong(f"has the shape {_short(shape)}; it must be a list of sizes")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong(f"has the data_offsets {_short(offsets)}; they must be [begin, end]")
    if not isinstance(dtype, str):
        raise wrong(f"has the dtype {_short(dtype)}; it must be a string")
    if dtype not in DTYPES:
        raise UnsupportedError(
            f"{path}: the tensor {_short(name)} has the dtype {_short(dtype)}, which is not supported."
        )
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if size != offsets[1] - offsets[0]:
        raise wrong(f"takes {size:,} bytes as {dtype} {_short(shape)}, but spans {offsets[1] - offsets[0]:,}")
    return TensorEntry(DTYPES[dtype], tuple(shape), base + offsets[0], base + offsets[1])


def _naturals(value: Any) -> bool:
    # The bounds limit the product of a malicious shape.
    good = isinstance(value, list) and len(value) <= 64
    return good and all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 63 for v in value)


def check_floating(file: TensorFile) -> None:
    """UnsupportedError unless every tensor is of fp64, fp32, fp16 or bf16: a cast of others would invent weights."""
    for name, entry in file.entries.items():
        if entry.dtype not in _FLOATS:
            text = f"{file.path}: the tensor {_short(name)} is {NAMES[entry.dtype]}; weights are F64, F32, F16 or BF16."
            raise UnsupportedError(text)


def _short(value: Any) -> str:
    text = _REPR.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


_REPR = reprlib.Repr()  # truncates before it formats: a shape may have millions of sizes
_REPR.maxlist = _REPR.maxdict = _REPR.maxlong = 80
_REPR.maxstring = 500


def map_file(file: TensorFile) -> memoryview:
    """A private memory map of the full file: pages are read when touched, and writes never reach the file."""
    # Not safetensors' `safe_open`: it maps in the same way, but its `get_tensor` (torch.asarray of a storage) reads the
    # first page of each tensor. Measured on 1 GB of 129 tensors that are not in the page cache: 800 ms, here 12 ms. It
    # also reopens the file by name, which may by now be another file than the one whose header was checked. And not
    # Python's mmap, which keeps a file open for each mapping: a process could map only some hundred shards.
    handle = file.handles.get(file.path).fileno()
    size = os.fstat(handle).st_size
    mapped = torch.from_file(f"/dev/fd/{handle}", shared=False, size=size, dtype=torch.uint8, device="cpu")
    return mapped.numpy().data


def mapped_tensor(mapping: memoryview, entry: TensorEntry) -> Tensor:
    """A tensor backed by the mapping, or a copy where its bytes are not aligned for its dtype.

    Each has its own storage: with slices of one storage, a deep copy of one leaf would copy the full file.
    """
    count = entry.stop - entry.start
    if not count:
        return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    if entry.start % entry.dtype.itemsize:
        data = torch.frombuffer(bytearray(mapping[entry.start : entry.stop]), dtype=entry.dtype)
    else:
        count //= entry.dtype.itemsize
        data = torch.frombuffer(mapping, dtype=entry.dtype, count=count, offset=entry.start)
    return data.view(entry.shape)


def cast_buffer() -> Tensor:
    """A buffer for `read_tensor` to cast through, allocated once: one per tensor would fragment the heap."""
    return torch.empty(1 << 22, dtype=torch.uint8, device="cpu")  # with a quarter of it, casts take three times as long


def read_tensor(
    file: TensorFile, entry: TensorEntry, dtype: torch.dtype | None, buffer: Tensor, box: Box | None = None
) -> Tensor:
    """A tensor, or its shard `box`, read into new memory and cast in chunks; dtype None: the file's dtype."""
    shape = entry.shape if box is None else box_shape(box)
    out = torch.empty(shape, dtype=dtype or entry.dtype, device="cpu")
    if box is None:
        read_into(out, file, entry, buffer)
    else:
        read_box(out, file, entry, box, buffer)
    return out


def read_into(out: Tensor, file: TensorFile, entry: TensorEntry, buffer: Tensor) -> None:
    """`read_tensor` into existing contiguous memory on the CPU."""
    if out.dtype == entry.dtype:
        file.handles.fill(file.path, _byte_view(out), entry.start)
        return
    typed_buffer, start = buffer.view(entry.dtype), entry.start
    for chunk in out.view(-1).split(len(typed_buffer)):
        read = typed_buffer[: len(chunk)]
        file.handles.fill(file.path, _byte_view(read), start)
        chunk.copy_(read)
        start += read.nbytes


def box_shape(box: Box) -> tuple[int, ...]:
    """The shape of the shard `box`."""
    return tuple(extent.stop - extent.start for extent in box)


def contiguous_entry(entry: TensorEntry, box: Box) -> TensorEntry | None:
    """The shard `box` as an entry of its own if its bytes are contiguous in the file, as full rows are; else None."""
    shape, lengths = entry.shape, box_shape(box)
    if lengths == shape:  # the full tensor, the usual case
        return entry
    outer = next((dim for dim, length in enumerate(lengths) if length != 1), len(shape))
    if 0 not in lengths and lengths[outer + 1 :] != shape[outer + 1 :]:
        return None
    offset = sum(extent.start * math.prod(shape[dim + 1 :]) for dim, extent in enumerate(box))
    start = entry.start + offset * entry.dtype.itemsize
    return TensorEntry(entry.dtype, lengths, start, start + math.prod(lengths) * entry.dtype.itemsize)


def row_entries(entry: TensorEntry, rows: slice = slice(None)) -> list[TensorEntry]:
    """One entry per index of the first dimension (those in `rows`), which are contiguous in the file."""
    size = (entry.stop - entry.start) // max(1, entry.shape[0])
    starts = [entry.start + index * size for index in range(entry.shape[0])[rows]]
    return [TensorEntry(entry.dtype, entry.shape[1:], start, start + size) for start in starts]


def read_box(out: Tensor, file: TensorFile, entry: TensorEntry, box: Box, buffer: Tensor) -> None:
    """`read_into` for the shard `box` of a tensor.

    A shard of rows is read exactly. For a shard of columns, the gap between the columns of two rows is read too where
    it is smaller than GAP.
    """
    contiguous = contiguous_entry(entry, box)
    if contiguous is not None:
        read_into(out, file, contiguous, buffer)
        return
    pitch = (entry.stop - entry.start) // entry.shape[0]
    columns = contiguous_entry(TensorEntry(entry.dtype, entry.shape[1:], 0, pitch), box[1:])  # within a row
    width = columns.stop - columns.start if columns else 0
    row_bytes = width if pitch - width >= GAP else pitch  # read per row
    if columns is None or row_bytes > len(buffer):
        for target, row in zip(out, row_entries(entry, box[0]), strict=True):
            read_box(target, file, row, box[1:], buffer)
        return
    for begin in range(0, len(out), len(buffer) // row_bytes):
        target = out[begin : begin + len(buffer) // row_bytes]
        read, start = buffer[: len(target) * row_bytes], entry.start + (box[0].start + begin) * pitch
        if row_bytes == width:
            view = _byte_view(read)
            for index in range(len(target)):
                row_view = view[index * width : (index + 1) * width]
                file.handles.fill(file.path, row_view, start + index * pitch + columns.start)
        else:
            file.handles.fill(file.path, _byte_view(read), start)
        first = (columns.start if row_bytes == pitch else 0) // entry.dtype.itemsize
        elements = read.view(entry.dtype).view(len(target), -1)
        target.view(len(target), -1).copy_(elements[:, first : first + width // entry.dtype.itemsize])


def _byte_view(tensor: Tensor) -> memoryview:
    """A writable view of the bytes of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of known dtype and shape whose values `make` computes when it is written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Write a new file and flush it to disk. The bytes do not depend on the order of `tensors`.

    At most one tensor is copied at a time: to join its slices, to move it to the CPU, to make it contiguous.
    """
    # Not safetensors' `save_file`: it wants all tensors of a file in memory at once (measured: 277 MB beside a model of
    # 468 MB with fused projections, here 18 MB; of a model on a GPU, all of it), gives the file mode 0600 whatever the
    # umask, and takes longer. The bytes are the same: the widest dtypes come first, which aligns every tensor.
    ranks = {dtype: rank for rank, dtype in enumerate(reversed(NAMES))}
    order = sorted(tensors, key=lambda name: (ranks[tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        tensor = tensors[name]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            # .numpy() refuses tensors with a lazy conjugate or negative bit
            values = tensors[name].make().detach().to("cpu").resolve_conj().resolve_neg()
            file.write(_byte_view(values.contiguous()))
        file.flush()
        os.fsync(file.fileno())
