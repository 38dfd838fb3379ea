"""Memory in pages of 2 MiB for tensors that each decoding step reads whole, on a CPU under Linux.

A step reads all weights and keys once. With pages of 4 KiB a core stops at the end of each for the address of the next,
and so does its prefetcher. Values and addresses of tensors stay; where the system has no such pages nothing happens.

Row: generate, compiled.
"""

import ctypes
import functools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.values import has_values
from fnmodels.ops.torch_internals import PRIVATE

PAGE = 1 << 21  # bytes
_WORTHWHILE = PAGE // 8  # bytes: a smaller tensor is not the reason to move the whole page that it lies in
_ADVISE, _COLLAPSE = 14, 25  # MADV_HUGEPAGE; MADV_COLLAPSE, since Linux 6.1
_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def advise_huge_pages(tensor: Tensor) -> None:
    """Asks for huge pages for memory that is not written yet, which costs no time."""
    for start, length in _spans([tensor]):
        first, last = -(-start // PAGE) * PAGE, (start + length) // PAGE * PAGE
        if first < last:
            _call(first, last - first, _ADVISE)


def move_to_huge_pages(tensors: Iterable[Any]) -> int:
    """Moves memory that is written to huge pages, in place: 2 s per GB, and no time where it lies in them.

    Returns how many pages the tensors lie in then. Memory that files are mapped to stays where it is; what a forked
    process shares with its parent becomes its own.
    """
    pages = {
        page for start, length in _spans(tensors) for page in range(start // PAGE, (start + length - 1) // PAGE + 1)
    }
    return sum(_call(page * PAGE, PAGE, _COLLAPSE) for page in sorted(pages))


def _spans(tensors: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """(address, bytes) of the storages of tensors in this process's memory that are worth it."""
    if torch.compiler.is_compiling() or _madvise() is None:
        return
    for t in tensors:
        if not isinstance(t, Tensor) or not _has_memory(t):
            continue
        if t.is_mkldnn:
            address, size = PRIVATE["ops.mkldnn.data_ptr"], PRIVATE["ops.mkldnn._nbytes"]
            start, length = (0, 0) if address is None or size is None else (address(t), size(t))
        else:
            start, length = t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()
        if length >= _WORTHWHILE:
            yield start, length


def _has_memory(t: Tensor) -> bool:
    return t.is_cpu and (type(t) is Tensor if t.is_mkldnn else t.layout is torch.strided and has_values(t))


def _call(start: int, length: int, advice: int) -> bool:
    madvise = _madvise()
    return madvise is not None and madvise(start, length, advice) == 0


@functools.cache
def _madvise() -> Any:
    """The system's function, or None without huge pages."""
    if sys.platform != "linux" or not _SWITCH.exists() or "[never]" in _SWITCH.read_text():
        return None
    found = getattr(ctypes.CDLL(None), "madvise", None)
    if found is not None:
        found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found
