"""Weights in buckets of so many bytes, for a sampler in another process, with checksums that the receiver verifies.

    has = {}                                                      # digests of what the receiver has
    for bucket in buckets(changed(engine.export(), has), 256 << 20):
        send(bucket)                                              # the first time all tensors, then those that differ
    ...
    for name, tensor in received(arriving): ...             # in the other process

The loaders of vLLM and SGLang take the pairs (name, tensor) of one bucket at a time: `load_weights(bucket.tensors())`.
SGLang joins some tensors of a module (q_a_proj and kv_a_proj_with_mqa of DeepSeek-V3) within one such call and leaves
one that comes alone unread, without an error; so tensors of a module that follow each other travel together.
"""

import hashlib
import itertools
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
    for module in _modules(tensors):
        digests = {name: _digest(tensor) for name, tensor in module}
        if any(has.get(name) != digest for name, digest in digests.items()):
            has.update(digests)
            yield from module


def buckets(tensors: Iterable[tuple[str, Tensor]], size: int) -> Iterator[Bucket]:
    """Packs tensors in their order into buckets of at most `size` bytes; a larger module has a bucket of its own.

    Args:
        tensors: (name, tensor), such as `engine.export()`. They are copied: the next update changes no bucket.
        size: Bytes.

    Yields:
        The buckets, of which the last says so. Where there are no tensors it is empty.

    Raises:
        ValueError: The size is below 1.
    """
    if size < 1:
        raise ValueError(f"The size of a bucket is {size}; it must be a number of bytes above 0.")
    number, total = 0, 0
    held: list[tuple[str, Tensor]] = []
    for module in _modules(tensors):
        nbytes = sum(_padded(tensor.nbytes) for _, tensor in module)
        if held and total + nbytes > size:
            yield _packed(number, held, last=False)
            number, total, held = number + 1, 0, []
        held += module
        total += nbytes
    yield _packed(number, held, last=True)


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
    if not ended:
        raise MismatchError(f"The weights end with bucket {number - 1}, which is not the last one.")


def _modules(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors that follow each other within one module: model.layers.0.self_attn of ...q_proj.weight."""
    for _, module in itertools.groupby(tensors, lambda named: named[0].rpartition(".")[0].rpartition(".")[0]):
        yield list(module)


def _packed(number: int, held: list[tuple[str, Tensor]], *, last: bool) -> Bucket:
    entries = tuple(Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in held)
    device = held[0][1].device if held else torch.device("cpu")
    data = torch.zeros(sum(_padded(entry.nbytes) for entry in entries), dtype=torch.uint8, device=device)
    begin = 0
    for entry, (_, tensor) in zip(entries, held, strict=True):
        data[begin : begin + entry.nbytes] = _bytes(tensor).to(device)
        begin += _padded(entry.nbytes)
    return Bucket(number, last, entries, data, _checksum(number, last, entries, data))


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
