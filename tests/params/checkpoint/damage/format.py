"""Damaged safetensors files: their length, their header, and the byte ranges in it."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

import params as P
from tests.params.checkpoint.damage.ways import (
    FILE,
    NORM,
    Damage,
    Do,
    in_bytes,
    in_entry,
    in_header,
    in_offsets,
    in_text,
    in_turn,
    instead,
    joined,
    raw,
    sparse,
    swapped_text,
    to_header,
)


def cases() -> Iterator[Damage]:
    """Every case of this group."""
    for name, (do, *words) in (_LENGTHS | _TEXTS | _METADATA | _ENTRIES | _OFFSETS).items():
        yield Damage(name, do, P.FormatError, (FILE, *words))
    for dtype in ("F4", "F128", "f32", "float32", ""):
        yield Damage(
            f"the dtype {dtype!r}", in_entry(dtype=dtype), P.UnsupportedError, (FILE, NORM, "is not supported")
        )
    yield Damage("good: blanks after the header", in_text(lambda text: text + b"   "))
    yield Damage("good: a header in another order than the data", _reordered)
    yield Damage(
        "good: a header with lines and indents", in_header(lambda header: json.dumps(header, indent=8).encode())
    )
    yield Damage("good: other metadata", to_header(__metadata__={"format": "pt", "author": "ä\n" * 99}))
    yield Damage("good: names with escapes", swapped_text(b"model.norm", b"model\\u002enorm"))


def _length(length: int) -> Do:
    return in_bytes(lambda data: struct.pack("<Q", length) + data[8:])


def _longer(more: int) -> Do:
    return in_bytes(lambda data: struct.pack("<Q", struct.unpack("<Q", data[:8])[0] + more) + data[8:])


_LENGTHS = {
    "empty file": (raw(b""), "has 0 bytes"),
    "seven bytes": (raw(b"\2\0\0\0\0\0\0"), "has 7 bytes"),
    "a length and nothing": (raw(struct.pack("<Q", 2)), "truncated"),
    "cut in the header": (in_bytes(lambda data: data[:100]), "truncated"),
    "cut in the data": (in_bytes(lambda data: data[:-1000]), "tensors end at", "truncated"),
    "one byte short": (in_bytes(lambda data: data[:-1]), "truncated"),
    "one byte long": (in_bytes(lambda data: data + b"\0"), "belong to no tensor"),
    "a page of zeros after it": (in_bytes(lambda data: data + bytes(4096)), "belong to no tensor"),
    "itself after it": (in_bytes(lambda data: data + data), "belong to no tensor"),
    "all zeros": (in_bytes(lambda data: bytes(len(data))), "must begin with '{'"),
    "length one less": (_longer(-1), "belong to no tensor"),  # the header ends with a blank
    "length one more": (_longer(1), "not valid JSON"),
    "length eight more": (_longer(8), "not valid JSON"),
    "length 2^31": (_length(1 << 31), "announces a header of"),
    "length 2^63": (_length(1 << 63), "announces a header of"),
    "length 2^64 - 1": (_length((1 << 64) - 1), "announces a header of"),
    "length in the other byte order": (in_bytes(lambda data: data[7::-1] + data[8:]), "announces a header of"),
    "a header of 100 MB of zeros": (instead(sparse(10**8 + 8, struct.pack("<Q", 10**8)), FILE), "begin with"),
    "a header of 100 MB of blanks": (raw(joined(b"{" + b" " * (10**8 - 1), b"")), "not valid JSON"),
    "a file of 1 TB of nothing": (instead(sparse(10**12), FILE), "begin with"),
    "a pointer of Git LFS": (raw(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "git lfs pull"),
    "a web page": (raw(b"<!DOCTYPE html><html><body>Not Found</body></html>"), "announces a header"),
    "a pickle": (instead(lambda path: torch.save({NORM: torch.ones(16)}, path), FILE), "announces a header"),
    "compressed": (in_bytes(lambda data: b"\x1f\x8b\x08\0" + data[4:]), "its header alone would end"),
}

_NO_JSON = "not valid JSON"
_TEXTS = {
    "no JSON": (in_text(lambda text: b"hello, world"), "must begin with"),
    "a blank before the header": (in_text(lambda text: b" " + text), "must begin with"),
    "a line before the header": (in_text(lambda text: b"\n" + text), "must begin with"),
    "a byte order mark before the header": (in_text(lambda text: b"\xef\xbb\xbf" + text), "must begin with"),
    "the header is a list": (in_text(lambda text: b"[]"), "must begin with"),
    "the header is null": (in_text(lambda text: b"null"), "must begin with"),
    "the header is a string": (in_text(lambda text: b'"{}"'), "must begin with"),
    "the header is a number": (in_text(lambda text: b"12345678"), "must begin with"),
    "bytes after the header's JSON": (in_text(lambda text: text + b"x"), _NO_JSON),
    "zeros after the header's JSON": (in_text(lambda text: text + b"\0\0"), _NO_JSON),
    "two headers": (in_text(lambda text: text + text), _NO_JSON),
    "single quotes": (swapped_text(b'"', b"'"), _NO_JSON),
    "a comma too many": (in_text(lambda text: text[:-1] + b",}"), _NO_JSON),
    "a comment": (in_text(lambda text: b"{/* hi */" + text[1:]), _NO_JSON),
    "an unclosed string": (in_text(lambda text: text[:-1] + b',"x'), _NO_JSON),
    "not UTF-8": (swapped_text(b"model.norm", b"model\xff.norm"), _NO_JSON),
    "overlong UTF-8": (swapped_text(b"model.norm", b"model\xc0\xaenorm"), _NO_JSON),
    "UTF-16": (in_text(lambda text: text.decode().encode("utf-16-le")), _NO_JSON),
    "a raw control character": (swapped_text(b"model.norm", b"model\nnorm"), _NO_JSON),
    "an integer of 10,000 digits": (swapped_text(b"[16]", b"[" + b"9" * 10_000 + b"]"), _NO_JSON),
    "a tensor twice": (in_text(lambda text: text[:-1] + b', "model.norm.weight": 1}'), NORM, "is there twice"),
    "a key of a tensor twice": (swapped_text(b'"dtype":', b'"dtype": "F16", "dtype":'), "'dtype' is there twice"),
    "metadata twice": (in_text(lambda text: b'{"__metadata__": {}, ' + text[1:]), "is there twice"),
    "lists in lists": (in_text(lambda text: b'{"a":' + b"[" * 200_000), "nested too deeply"),
    "objects in objects": (in_text(lambda text: b'{"a":' * 100_000), "nested too deeply"),
    "nested as deep as just parses": (in_text(lambda text: b'{"a":%s}' % (b"[" * 500 + b"]" * 500)), "nested too"),
    "400,000 names": (in_text(lambda _: b"{%s}" % b",".join(b'"%d":0' % n for n in range(400_000))), "400,000 tensors"),
}

_METADATA = {
    "metadata is a list": (to_header(__metadata__=[]), "strings to strings"),
    "metadata is null": (to_header(__metadata__=None), "strings to strings"),
    "metadata holds a number": (to_header(__metadata__={"a": 1}), "strings to strings"),
    "metadata holds an object": (to_header(__metadata__={"a": {}}), "strings to strings"),
}

_SIZES, _KEYS, _TEXT = "must be a list of sizes", "must have exactly dtype, shape and data_offsets", "must be a string"
_ENTRIES = {
    "a tensor is a number": (to_header(**{NORM: 3}), NORM, _KEYS),
    "a tensor is a list": (to_header(**{NORM: [1, 2]}), NORM, _KEYS),
    "a tensor is null": (to_header(**{NORM: None}), NORM, _KEYS),
    "a tensor is an empty object": (to_header(**{NORM: {}}), NORM, _KEYS),
    "a tensor without dtype": (to_header(**{NORM: {"shape": [0], "data_offsets": [0, 0]}}), NORM, _KEYS),
    "a tensor without shape": (to_header(**{NORM: {"dtype": "F32", "data_offsets": [0, 0]}}), NORM, _KEYS),
    "a tensor without offsets": (to_header(**{NORM: {"dtype": "F32", "shape": [0]}}), NORM, _KEYS),
    "a tensor with a key too many": (in_entry(strides=[1]), NORM, _KEYS),
    "a shape that is negative": (in_entry(shape=[-16]), NORM, _SIZES),
    "a shape that is fractional": (in_entry(shape=[16.0]), NORM, _SIZES),
    "a shape that is NaN": (in_entry(shape=[float("nan")]), NORM, _SIZES),
    "a shape that is a string": (in_entry(shape="16"), NORM, _SIZES),
    "a shape that is a number": (in_entry(shape=16), NORM, _SIZES),
    "a shape that is null": (in_entry(shape=None), NORM, _SIZES),
    "a shape of strings": (in_entry(shape=["16"]), NORM, _SIZES),
    "a shape of true": (in_entry(shape=[True]), NORM, _SIZES),
    "a shape of null": (in_entry(shape=[None]), NORM, _SIZES),
    "a shape that is nested": (in_entry(shape=[[[[16]]]]), NORM, _SIZES),
    "a shape beyond 64 bits": (in_entry(shape=[1 << 70]), NORM, _SIZES),
    "a shape of 65 dimensions": (in_entry(shape=[1] * 64 + [16]), NORM, _SIZES),
    "a shape of 3,000,000 dimensions": (in_entry(shape=[1] * 3_000_000), NORM, "the shape [1, 1,", _SIZES),
    "a shape too large for its bytes": (in_entry(shape=[17]), NORM, "takes 68 bytes as F32 [17], but spans 64"),
    "a shape too small for its bytes": (in_entry(shape=[15]), NORM, "takes 60 bytes as F32 [15], but spans 64"),
    "a product beyond 64 bits": (in_entry(shape=[1 << 32, 1 << 32]), NORM, "takes 73,786,976,294,838,206,464 bytes"),
    "a product that wraps to the right size": (in_entry(shape=[(1 << 60) + 4, 4]), NORM, "but spans 64"),
    "a dtype too wide for its bytes": (in_entry(dtype="F64"), NORM, "takes 128 bytes as F64"),
    "a dtype that is a number": (in_entry(dtype=32), NORM, _TEXT),
    "a dtype that is a list": (in_entry(dtype=["F32"]), NORM, _TEXT),
}

_PAIR = "must be [begin, end]"
_OFFSETS = {
    "offsets reversed": (in_offsets(lambda a, b: [b, a]), NORM, _PAIR),
    "offsets that are negative": (in_offsets(lambda a, b: [-64, 0]), NORM, _PAIR),
    "offsets that are fractional": (in_offsets(lambda a, b: [float(a), b]), NORM, _PAIR),
    "offsets of strings": (in_offsets(lambda a, b: [str(a), str(b)]), NORM, _PAIR),
    "offsets of true": (in_offsets(lambda a, b: [False, True]), NORM, _PAIR),
    "offsets beyond 64 bits": (in_offsets(lambda a, b: [1 << 64, (1 << 64) + 64]), NORM, _PAIR),
    "three offsets": (in_offsets(lambda a, b: [a, b, b]), NORM, _PAIR),
    "one offset": (in_offsets(lambda a, b: [a]), NORM, _PAIR),
    "offsets beyond the file": (in_offsets(lambda a, b: [1 << 40, (1 << 40) + 64]), "leaves a hole before it"),
    "two tensors on the same bytes": (in_offsets(lambda a, b: [0, 64]), "overlaps the one before"),
    "a tensor over part of another": (in_offsets(lambda a, b: [a - 4, b - 4]), "overlaps the one before"),
    "a hole": (in_turn(in_offsets(lambda a, b: [a + 8, b + 8]), in_bytes(lambda d: d + bytes(8))), "leaves a hole"),
    "an empty tensor beyond the end": (
        to_header(x={"dtype": "F32", "shape": [0], "data_offsets": [1 << 40, 1 << 40]}),
        *("'x'", "leaves a hole before it"),
    ),
}


def _reordered(folder: Path) -> None:
    """Data in the order of names, header in reverse order: unusual but valid."""
    header, data = {}, b""
    for name, tensor in sorted(load_file(folder / FILE).items()):
        span = [len(data), len(data) + tensor.nbytes]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": span}
        data += tensor.numpy().tobytes()
    (folder / FILE).write_bytes(joined(dict(reversed(header.items())), data))
