"""Weights in buckets of so many bytes, for a sampler in another process, with checksums that the receiver verifies.

    has = {}                                                      # digests of what the receiver has
    for bucket in buckets(changed(engine.export(), has), 256 << 20):
        send(bucket)                                              # the first time all tensors, then those that differ
    ...
    for name, tensor in received(arriving): ...             # in the other process

The loaders of vLLM and SGLang take the pairs (name, tensor) of one bucket at a time: `load_weights(bucket.tensors())`.
SGLang joins some tensors of a module (q_a_proj and kv_a_proj_with_mqa of DeepSeek-V3) within one such call and leaves
one that comes alone unread, without an error; so tensors of a module that follow each other travel together, those of
its projections (self_attn.q_proj.weight) and its own (self_attn.sinks).
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fnmodels.errors import MismatchError

ALIGNMENT = 64  # bytes, as torch's allocator has it


@dataclass(frozen=True)
class Entry:
    """A tensor within a bucket: its name in the checkpoint, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together.

    Args:
        number: The bucket's place in its sequence, from 0.
        last: Whether it ends the sequence.
        entries: The tensors, in the order of their bytes.
        data: uint8 [bytes], on the tensors' device; each tensor begins at a multiple of 64 bytes.
        checksum: Of everything above.
    """

    number: int
    last: bool
    entries: tuple[Entry, ...]
    data: Tensor
    checksum: str

    def to(self, device: torch.device | str) -> "Bucket":
        """The bucket with its bytes on a device.

        Args:
            device: Where the bytes are to be.

        Returns:
            The bucket.
        """
        return replace(self, data=self.data.to(device))

    def tensors(self) -> list[tuple[str, Tensor]]:
        """The tensors under their names.

        Returns:
            The pairs (name, tensor), which share the bucket's memory.

        Raises:
            MismatchError: The bucket differs from what was sent.
        """
        size = sum(_padded(entry.nbytes) for entry in self.entries)
        if self.data.numel() != size or _checksum(self.number, self.last, self.entries, self.data) != self.checksum:
            raise MismatchError(f"Bucket {self.number} of the weights is not what was sent: its checksum differs.")
        found, begin = [], 0
        for entry in self.entries:
            found.append((entry.name, self.data[begin : begin + entry.nbytes].view(entry.dtype).view(entry.shape)))
            begin += _padded(entry.nbytes)
        return found


def as_stored(
    tensors: Iterable[tuple[str, Tensor]], dtypes: torch.dtype | Mapping[str, torch.dtype]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors in the dtypes of the receiver: trained in fp32, say, and sampled in bf16.

    Args:
        tensors: (name, tensor), such as `engine.export()`.
        dtypes: That of each name, as a checkpoint has them; or one for all floating tensors.

    Yields:
        (name, tensor).

    Raises:
        MismatchError: `dtypes` lacks a name.
    """
    for name, tensor in tensors:
        if isinstance(dtypes, torch.dtype):
            yield name, tensor.to(dtypes) if tensor.is_floating_point() else tensor
        elif name in dtypes:
            yield name, tensor.to(dtypes[name])
        else:
            raise MismatchError(f"{name} is among the weights, and not among the {len(dtypes)} dtypes that were given.")


def changed(tensors: Iterable[tuple[str, Tensor]], has: MutableMapping[str, bytes]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of those modules in which a bit, a shape or a dtype differs from what the receiver has.

    For parts of a model that stand still: frozen layers, experts without tokens. Within a tensor `deltas` finds the
    elements that differ.

    Args:
        tensors: (name, tensor) of all weights, such as `engine.export()`; over a mesh all ranks iterate alike.
        has: {name: digest of what was sent}, empty at first. It is updated as tensors are yielded: clear it where
            sending fails, and all are sent again.

    Yields:
        (name, tensor).
    """
    for module in _modules(
        (name, tensor.detach().clone()) for name, tensor in tensors
    ):  # whose memory may be used again
        digests = {name: _digest(tensor) for name, tensor in module}
        if any(has.get(name) != digest for name, digest in digests.items()):
            has.update(digests)
            yield from module


def buckets(tensors: Iterable[tuple[str, Tensor]], size: int) -> Iterator[Bucket]:
    """Packs tensors in their order into buckets of at most `size` bytes; a larger module has a bucket of its own.

    Args:
        tensors: (name, tensor), such as `engine.export()`. Each is copied before the next one is asked for: neither the
            next update nor a source that uses its memory again changes a bucket.
        size: Bytes, which are allocated for each bucket when its first tensor comes.

    Yields:
        The buckets, of which the last says so. Where there are no tensors it is empty.

    Raises:
        ValueError: The size is below 1.
    """
    if size < 1:
        raise ValueError(f"The size of a bucket is {size}; it must be a number of bytes above 0.")
    filling, before = _Filling(size), frozenset[str]()
    for name, tensor in tensors:
        of = _modules_of(name)
        if not of & before:
            filling.end_module()
        yield from filling.add(name, tensor)
        before = of
    filling.end_module()
    yield filling.cut(last=True)


def received(arriving: Iterable[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of buckets that arrive, each bucket verified before its first one.

    Args:
        arriving: The buckets of one sequence, in their order.

    Yields:
        (name, tensor), which shares the bucket's memory.

    Raises:
        MismatchError: A bucket differs from what was sent, is missing, or comes twice.
    """
    number, ended = 0, False
    for bucket in arriving:
        if bucket.number != number or ended:
            raise MismatchError(f"Bucket {bucket.number} of the weights has come where number {number} was due.")
        yield from bucket.tensors()
        number, ended = number + 1, bucket.last
    if not number:
        raise MismatchError("No bucket of the weights has come; a sequence has at least one, an empty one too.")
    if not ended:
        raise MismatchError(f"The weights end with bucket {number - 1}, which is not the last one.")


def _modules(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors that follow each other within one module."""
    module: list[tuple[str, Tensor]] = []
    for name, tensor in tensors:
        if module and not _modules_of(name) & _modules_of(module[-1][0]):
            yield module
            module = []
        module.append((name, tensor))
    if module:
        yield module


def _modules_of(name: str) -> frozenset[str]:
    """The modules that a tensor may be of: self_attn of ...self_attn.q_proj.weight, or of its own ...self_attn.sinks.

    Two tensors that may be of one module are taken to be.
    """
    owner = name.rpartition(".")[0]
    return frozenset((owner, owner.rpartition(".")[0]))


class _Filling:
    """The bucket that is being filled: memory, entries, and how much of them is of modules that have ended."""

    def __init__(self, size: int) -> None:
        self.size, self.number = size, 0
        self.data: Tensor | None = None
        self.entries: list[Entry] = []
        self.end = self.whole = self.whole_entries = 0  # bytes, bytes, entries

    def end_module(self) -> None:
        self.whole, self.whole_entries = self.end, len(self.entries)

    def add(self, name: str, tensor: Tensor) -> Iterator[Bucket]:
        """Copies a tensor; yields the bucket of the modules before, where it has no room for this one."""
        entry = Entry(name, tensor.dtype, tuple(tensor.shape))
        if self.whole_entries and self.end + _padded(entry.nbytes) > self.size:
            yield self.cut(last=False)
        begin, self.end = self.end, self.end + _padded(entry.nbytes)
        if self.data is None:
            self.data = _memory(max(self.size, self.end), tensor.device)
        elif self.end > len(self.data):  # a module that is larger than a bucket
            self.data = _moved(self.data[:begin], max(2 * len(self.data), self.end))
        last = begin + entry.nbytes
        self.data[begin:last].view(entry.dtype).view(entry.shape).copy_(tensor.detach())
        self.data[last : self.end] = 0
        self.entries.append(entry)

    def cut(self, *, last: bool) -> Bucket:
        """The bucket of the modules that have ended; what has come of the next one begins the next bucket."""
        data = _memory(0, torch.device("cpu")) if self.data is None else self.data
        entries, self.entries = tuple(self.entries[: self.whole_entries]), self.entries[self.whole_entries :]
        rest, data = data[self.whole : self.end], data[: self.whole]
        self.data = _moved(rest, max(self.size, len(rest))) if self.entries else None
        if 2 * data.nbytes < data.untyped_storage().nbytes():  # pickle writes all of the memory that a view is of
            data = data.clone()
        made = Bucket(self.number, last, entries, data, _checksum(self.number, last, entries, data))
        self.end, self.number = len(rest), self.number + 1
        self.whole = self.whole_entries = 0
        return made


def _memory(nbytes: int, device: torch.device) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _moved(data: Tensor, nbytes: int) -> Tensor:
    memory = _memory(nbytes, data.device)
    memory[: len(data)] = data
    return memory


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _digest(tensor: Tensor) -> bytes:
    found = hashlib.blake2b(f"{tensor.dtype} {list(tensor.shape)}".encode(), digest_size=16)
    found.update(_bytes(tensor).cpu().numpy().data)
    return found.digest()


def _checksum(number: int, last: bool, entries: tuple[Entry, ...], data: Tensor) -> str:
    head = [number, last, *((entry.name, str(entry.dtype), list(entry.shape)) for entry in entries)]
    found = hashlib.blake2b(repr(head).encode(), digest_size=16)
    found.update(data.cpu().numpy().data)
    return found.hexdigest()
