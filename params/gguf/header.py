"""The header of a GGUF file: metadata, and the place of each tensor, checked against the format and the file's size.

It is parsed here rather than by the gguf package, whose reader takes the counts of a damaged file at their word.
"""

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fnmodels.errors import FormatError, UnsupportedError
from params.io.safetensors_file import OpenFiles

from .blocks import block_of

HEADER_LIMIT = 200_000_000  # bytes; the header of a vocabulary of 262,144 tokens has 7 MB
NAME_LIMIT = 65_535  # bytes of a key or of a tensor's name
DIMENSIONS = 4
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8"}
_SCALARS[12] = "<f8"
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file.

    Attributes:
        kind: its ggml type, a number.
        shape: as torch has it; the file lists the dimensions in the opposite order.
        start: of its bytes in the file.
        nbytes: of the tensor as it is stored.
        path: of the file.
    """

    kind: int
    shape: tuple[int, ...]
    start: int
    nbytes: int
    path: Path


@dataclass(frozen=True)
class GgufFile:
    """A file whose header passed all checks: {key: value} of its metadata, and its tensors by name."""

    path: Path
    handles: OpenFiles
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def read(self, name: str, part: int | None = None) -> bytearray:
        """The bytes of a tensor, or of an entry of its first dimension."""
        tensor = self.tensors[name]
        size = tensor.nbytes if part is None else tensor.nbytes // tensor.shape[0]
        data = bytearray(size)
        self.handles.fill(tensor.path, data, tensor.start + (part or 0) * size)
        return data


def read_header(path: Path, handles: OpenFiles) -> GgufFile:
    """Check the header of a file; no tensor is read.

    Raises:
        FormatError: what is wrong with the file.
        UnsupportedError: a version or a type of tensor that is not read.
    """
    cursor = _Cursor(path, handles)
    magic, version = cursor.take(4), cursor.integer("<u4")
    if magic != b"GGUF":
        raise FormatError(f"{path} begins with {magic!r}, not with GGUF, so it is no GGUF file.")
    if version not in (2, 3):
        why = "it is big-endian" if version & 0xFFFF == 0 else "versions 2 and 3 are read"
        raise UnsupportedError(f"{path} is of version {version} of the format: {why}.")
    tensor_count, entry_count = cursor.integer("<u8"), cursor.integer("<u8")
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):  # each takes bytes of the file, which ends
        key = cursor.name()
        if key in metadata:
            raise FormatError(f"{path}: the key {key!r} is there twice.")
        metadata[key] = cursor.value(cursor.integer("<u4"), key)
    infos: dict[str, tuple[int, tuple[int, ...], int]] = {}
    for _ in range(tensor_count):
        name = cursor.name()
        if name in infos:
            raise FormatError(f"{path}: the tensor {name!r} is there twice.")
        infos[name] = cursor.tensor_info(name)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise FormatError(f"{path}: 'general.alignment' is {alignment!r}, but must be a power of two.")
    return GgufFile(path, handles, metadata, _placed(path, infos, cursor, alignment))


def _placed(
    path: Path, infos: dict[str, tuple[int, tuple[int, ...], int]], cursor: "_Cursor", alignment: int
) -> dict[str, GgufTensor]:
    """The tensors, which follow each other without gaps but those of the alignment, up to the end of the file."""
    first = end = _aligned(cursor.position, alignment)
    tensors = {}
    for name, (kind, shape, offset) in infos.items():
        try:
            elements, size = block_of(kind)
        except UnsupportedError as error:
            raise UnsupportedError(f"{path}: the tensor {name!r} {error}") from None
        if shape[-1] % elements:
            raise FormatError(f"{path}: rows of {shape[-1]} are no whole blocks of {elements} in the tensor {name!r}.")
        if first + offset != _aligned(end, alignment):
            raise FormatError(
                f"{path}: the tensor {name!r} is at {offset:,}, but the one before it ends at {end - first:,}."
            )
        tensors[name] = GgufTensor(kind, shape, first + offset, math.prod(shape) // elements * size, path)
        end = first + offset + tensors[name].nbytes
    if not end <= cursor.size <= _aligned(end, alignment):
        what = "truncated" if cursor.size < end else "is something appended"
        raise FormatError(f"{path} has {cursor.size:,} bytes, but its tensors end at {end:,}: {what}?")
    return tensors


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


class _Cursor:
    """Reads a header from its start; every length is compared with what is left of the file before it is used."""

    CHUNK = 1 << 20

    def __init__(self, path: Path, handles: OpenFiles) -> None:
        self.path, self.handles = path, handles
        self.size = os.fstat(handles.get(path).fileno()).st_size
        self.position = 0
        self._data, self._start = bytearray(), 0  # bytes of the file from _start on

    def take(self, count: int) -> bytes:
        if count > self.size - self.position:
            raise FormatError(
                f"{self.path} has {self.size:,} bytes and is cut or damaged: its header goes on at "
                f"{self.position:,} with {count:,} bytes."
            )
        if self.position + count > HEADER_LIMIT:
            raise FormatError(f"{self.path}: the header has more than {HEADER_LIMIT:,} bytes.")
        at = self.position - self._start
        if at + count > len(self._data):
            length = min(max(count, self.CHUNK), self.size - self.position)
            self._data, self._start, at = bytearray(length), self.position, 0
            self.handles.fill(self.path, self._data, self.position)
        self.position += count
        return bytes(self._data[at : at + count])

    def integer(self, kind: str) -> int:
        number: int = struct.unpack({"<u4": "<I", "<u8": "<Q"}[kind], self.take(int(kind[-1])))[0]
        return number

    def text(self, what: str) -> str:
        data = self.take(self.integer("<u8"))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise FormatError(f"{self.path}: {what} is not UTF-8 text.") from None

    def name(self) -> str:
        start = self.position
        name = self.text(f"the name at byte {start:,}")
        if not 0 < len(name.encode()) <= NAME_LIMIT:
            raise FormatError(f"{self.path}: the name at byte {start:,} has {len(name):,} characters.")
        return name

    def value(self, kind: int, key: str) -> Any:
        """A value of the metadata; a list for an array."""
        if kind == _STRING:
            return self.text(f"the value of {key!r}")
        if kind in _SCALARS:
            return self._scalars(kind, 1)[0]
        if kind != _ARRAY:
            raise FormatError(f"{self.path}: the value of {key!r} is of type {kind}, which the format does not have.")
        inner, count = self.integer("<u4"), self.integer("<u8")
        if inner == _STRING:
            return [self.text(f"a text of {key!r}") for _ in range(count)]
        if inner in _SCALARS:
            return self._scalars(inner, count)
        raise FormatError(f"{self.path}: the array {key!r} holds values of type {inner}, which is not read.")

    def _scalars(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_SCALARS[kind])
        values = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        # The shortest decimal that is this fp32 number: 1e-05 is stored as 9.999999747378752e-06.
        return [float(str(one)) for one in values] if kind == 6 and count < 100 else values.tolist()

    def tensor_info(self, name: str) -> tuple[int, tuple[int, ...], int]:
        """(ggml type, shape, offset behind the header) of a tensor."""
        count = self.integer("<u4")
        if not 1 <= count <= DIMENSIONS:
            raise FormatError(f"{self.path}: the tensor {name!r} has {count:,} dimensions; 1 to {DIMENSIONS} are read.")
        shape = tuple(self.integer("<u8") for _ in range(count))[::-1]
        if 0 in shape or math.prod(shape) >= 1 << 62:
            raise FormatError(f"{self.path}: the tensor {name!r} has the impossible shape {list(shape)}.")
        return self.integer("<u4"), shape, self.integer("<u8")
