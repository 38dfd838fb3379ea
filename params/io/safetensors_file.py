"""The safetensors format: eight bytes of length, a JSON header, the tensors' bytes.

The header is read here rather than by the safetensors package, because what was checked must be what is used: a reader
with another opinion about a damaged header would undo the check. Format: https://github.com/huggingface/safetensors
The package would also map and write less well, see `map_file` and `write_tensors`; the tests hold both against it.
"""

from __future__ import annotations

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

from .files import parse_json

HEADER_LIMIT = 100_000_000  # bytes, the format's own bound
HANDLES = 64  # files held open; a process may commonly have 1,024, and other things need some of them
GAP = 1 << 13  # bytes between two pieces that are read with them: they cost less than one more call
NAMES_LIMIT = 250_000  # tensors in a file; the largest published models have fewer in all their files together
DTYPES = {  # in the package's order, which is also that of their sizes
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
NAMES = {dtype: name for name, dtype in DTYPES.items()}
Box = tuple[slice, ...]  # a part of a tensor: start and stop in each dimension


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: bytes start <= i < stop, counted from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class OpenFiles:
    """Open files, those used last: a checkpoint may have more shards than a process may have files open.

    read: how many bytes have come from them; of what is mapped nobody can tell.
    """

    def __init__(self) -> None:
        self.read = 0
        self._open: dict[Path, FileIO] = {}  # in the order of use
        self._first: dict[Path, tuple[int, ...]] = {}

    def get(self, path: Path) -> FileIO:
        """FormatError: it had to be opened again, and another file, or a changed one, has come into its place."""
        handle = self._open.pop(path, None)
        if handle is None:
            handle = FileIO(path)
            found = os.fstat(handle.fileno())
            identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            if self._first.setdefault(path, identity) != identity:
                handle.close()
                raise FormatError(f"{path} was replaced or changed after its header had been checked: load it again.")
        self._open[path] = handle
        if len(self._open) > HANDLES:
            self._open.pop(next(iter(self._open))).close()
        return handle

    def fill(self, path: Path, view: memoryview | bytearray, start: int) -> None:
        """Read the bytes of the file from `start` on into all of `view`."""
        # A single read returns at most 2 GiB, and memory that it left alone would look like weights.
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
    """A file whose header is good. Mapped tensors outlive the closing of its handle."""

    path: Path
    handles: OpenFiles
    entries: dict[str, Entry]


def open_tensors(path: Path, stack: ExitStack) -> TensorFile:
    """Open `path` and check its header against the format and the file's size; no tensor is read. `stack` closes it.

    FormatError names the file and what is wrong with it, UnsupportedError a dtype that torch does not have.
    """
    return open_tensor_files([path], stack)[0]


def open_tensor_files(paths: Iterable[Path], stack: ExitStack) -> list[TensorFile]:
    """As `open_tensors`, of files of which at most `HANDLES` are open at a time."""
    handles = OpenFiles()
    stack.callback(handles.close)
    return [TensorFile(path, handles, _entries(path, handles)) for path in paths]


def _entries(path: Path, handles: OpenFiles) -> dict[str, Entry]:
    size = os.fstat(handles.get(path).fileno()).st_size
    if size < 8:
        raise FormatError(f"{path} has {size} bytes, less than the 8 that a safetensors file begins with.")
    prefix = bytearray(8)
    handles.fill(path, prefix, 0)
    length = int.from_bytes(prefix, "little")
    if prefix == b"version ":
        raise FormatError(f"{path} is a pointer of Git LFS in place of the file; `git lfs pull` gets it.")
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
            found = f"begins at byte {entry.start:,}, not {end:,}: it {fault}"
            raise FormatError(f"{path}: the tensor {_short(name)} {found}.")
        end = entry.stop
    if end != size:
        fault = "truncated" if end > size else "bytes at the end that belong to no tensor"
        raise FormatError(f"{path} has {size:,} bytes, but its tensors end at {end:,}: {fault}.")
    return entries


def _entry(path: Path, name: str, value: Any, base: int) -> Entry:
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
    return Entry(DTYPES[dtype], tuple(shape), base + offsets[0], base + offsets[1])


def _naturals(value: Any) -> bool:
    # The bound keeps products of a hostile shape from growing without limit.
    good = isinstance(value, list) and len(value) <= 64
    return good and all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 63 for v in value)


def _short(value: Any) -> str:
    text = _REPR.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


_REPR = reprlib.Repr()  # cuts before it writes: a shape may have millions of sizes
_REPR.maxlist = _REPR.maxdict = _REPR.maxlong = 80
_REPR.maxstring = 500


def map_file(file: TensorFile) -> memoryview:
    """The whole file, lazily: pages are read when touched. Private: what is written to them never reaches the file."""
    # Not safetensors' `safe_open`: it maps in the same way, but its `get_tensor` (torch.asarray of a storage) reads the
    # first page of each tensor. Measured on 1 GB of 129 tensors that are not in the page cache: 800 ms, here 12 ms. It
    # also opens the file anew, by a name that may lead to another file than the one whose header was checked. And not
    # Python's mmap, which keeps a file open for each mapping: some hundred shards would be all that a process may have.
    handle = file.handles.get(file.path).fileno()
    size = os.fstat(handle).st_size
    whole = torch.from_file(f"/dev/fd/{handle}", shared=False, size=size, dtype=torch.uint8, device="cpu")
    return whole.numpy().data


def mapped_tensor(mapping: memoryview, entry: Entry) -> Tensor:
    """A tensor that lies in the mapping, or a copy where the file is not aligned for it.

    Each has a storage of its own size (as slices of one storage, a deep copy of one leaf would copy the whole file).
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
    """Memory for `read_tensor` to cast through, made once: malloc would leave a hole beside each result otherwise."""
    return torch.empty(1 << 22, dtype=torch.uint8, device="cpu")  # a quarter of it takes three times as long


def read_tensor(
    file: TensorFile, entry: Entry, dtype: torch.dtype | None, buffer: Tensor, box: Box | None = None
) -> Tensor:
    """A tensor in memory of its own, read from the file and cast piece by piece; dtype None: as it is there.

    box: of the tensor, that part alone.
    """
    shape = entry.shape if box is None else box_shape(box)
    out = torch.empty(shape, dtype=dtype or entry.dtype, device="cpu")
    if box is None:
        read_into(out, file, entry, buffer)
    else:
        read_box(out, file, entry, box, buffer)
    return out


def read_into(out: Tensor, file: TensorFile, entry: Entry, buffer: Tensor) -> None:
    """As `read_tensor`, into contiguous memory on the CPU that is there."""
    if out.dtype == entry.dtype:
        file.handles.fill(file.path, _byte_view(out), entry.start)
        return
    piece, start = buffer.view(entry.dtype), entry.start
    for part in out.view(-1).split(len(piece)):
        read = piece[: len(part)]
        file.handles.fill(file.path, _byte_view(read), start)
        part.copy_(read)
        start += read.nbytes


def box_shape(box: Box) -> tuple[int, ...]:
    """The shape of a part of a tensor."""
    return tuple(places.stop - places.start for places in box)


def contiguous_entry(entry: Entry, box: Box) -> Entry | None:
    """The bytes of a part of a tensor, where they lie together: rows do. None where they do not."""
    shape, lengths = entry.shape, box_shape(box)
    if lengths == shape:  # all of it, as nearly always
        return entry
    several = next((dim for dim, length in enumerate(lengths) if length != 1), len(shape))
    if 0 not in lengths and lengths[several + 1 :] != shape[several + 1 :]:
        return None
    offset = sum(places.start * math.prod(shape[dim + 1 :]) for dim, places in enumerate(box))
    start = entry.start + offset * entry.dtype.itemsize
    return Entry(entry.dtype, lengths, start, start + math.prod(lengths) * entry.dtype.itemsize)


def row_entries(entry: Entry, rows: slice = slice(None)) -> list[Entry]:
    """The entries of the first dimension, which lie one after the other in the file."""
    size = (entry.stop - entry.start) // max(1, entry.shape[0])
    starts = [entry.start + index * size for index in range(entry.shape[0])[rows]]
    return [Entry(entry.dtype, entry.shape[1:], start, start + size) for start in starts]


def read_box(out: Tensor, file: TensorFile, entry: Entry, box: Box, buffer: Tensor) -> None:
    """As `read_into`, of a part of the tensor.

    Rows are read alone. Of columns, what lies between those of two rows is read with them where it is less than GAP.
    """
    together = contiguous_entry(entry, box)
    if together is not None:
        read_into(out, file, together, buffer)
        return
    pitch = (entry.stop - entry.start) // entry.shape[0]
    columns = contiguous_entry(Entry(entry.dtype, entry.shape[1:], 0, pitch), box[1:])  # of a row
    width = columns.stop - columns.start if columns else 0
    taken = width if pitch - width >= GAP else pitch  # bytes of a row
    if columns is None or taken > len(buffer):
        for part, row in zip(out, row_entries(entry, box[0]), strict=True):
            read_box(part, file, row, box[1:], buffer)
        return
    for begin in range(0, len(out), len(buffer) // taken):
        some = out[begin : begin + len(buffer) // taken]
        strips, start = buffer[: len(some) * taken], entry.start + (box[0].start + begin) * pitch
        if taken == width:
            raw = _byte_view(strips)
            for index in range(len(some)):
                strip = raw[index * width : (index + 1) * width]
                file.handles.fill(file.path, strip, start + index * pitch + columns.start)
        else:
            file.handles.fill(file.path, _byte_view(strips), start)
        first = (columns.start if taken == pitch else 0) // entry.dtype.itemsize
        numbers = strips.view(entry.dtype).view(len(some), -1)
        some.view(len(some), -1).copy_(numbers[:, first : first + width // entry.dtype.itemsize])


def _byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, for reading and writing."""
    return tensor.view(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class LazyTensor:
    """A tensor to be written, made when its turn comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Write a new file and flush it to disk. The same tensors give the same bytes, in whatever order they come.

    At most one tensor is copied at a time: to join its parts, to bring it to the CPU, to make it contiguous.
    """
    # Not safetensors' `save_file`: it wants all tensors of a file in memory at once (measured: 277 MB beside a model of
    # 468 MB with fused projections, here 18 MB; of a model on a GPU, all of it), gives the file mode 0600 whatever the
    # umask, and takes longer. The bytes are the same: the widest dtype first, which aligns each tensor for its own.
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
            # .numpy() refuses tensors whose conjugation or sign is only noted
            whole = tensors[name].make().detach().to("cpu").resolve_conj().resolve_neg()
            file.write(_byte_view(whole.contiguous()))
        file.flush()
        os.fsync(file.fileno())
