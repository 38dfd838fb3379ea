"""The checks of a checkpoint that read values: redundant copies of a tensor, tables of numbers, NaN and infinities."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import MismatchError
from fnmodels.models.common.family import DecoderConfig, function_of
from fnmodels.models.common.registry import family_of
from fnmodels.models.common.spec import InTurn
from fnmodels.models.common.storage import Stack, disk_name, disk_names
from params.io.safetensors_file import Box, TensorEntry, read_into
from params.quantized.kept import dequantize
from params.quantized.weight import Found, QuantizedWeight

from .read_leaf import Located, read_located
from .shard_index import as_lines
from .tensor_map import StoredLeaf


def check_ties(tied: dict[str, str], found: Found, buffer: Tensor, share: tuple[int, int]) -> None:
    """MismatchError if a redundant tensor on disk (a tied head) is not bit-equal to its original.

    share: (i, n): this is process i of n, which compares the i-th n-th of the bytes.
    """
    for name, twin in tied.items():
        if name in found and not _same(found[name], found[twin], buffer, share):
            raise MismatchError(
                f"{found[name][0].path}: {name} differs from {twin}, but by config.json (tie_word_embeddings, or "
                "num_nextn_predict_layers) they are one tensor."
            )


def _same(one: Located, two: Located, buffer: Tensor, share: tuple[int, int]) -> bool:
    """Whether two tensors of one shape have the same bits in this share: NaN equals itself, and -0 is not 0.

    They are read in chunks rather than mapped: a truncated mapped file would kill the process.
    """
    (file, entry), (other, twin) = one, two
    if entry.dtype != twin.dtype:
        return False
    if isinstance(entry, QuantizedWeight) or isinstance(twin, QuantizedWeight):
        values = [read_located(where, None, buffer, None).contiguous().view(torch.uint8) for where in (one, two)]
        return torch.equal(*values)
    halves, size = buffer.chunk(2), entry.stop - entry.start
    first, last = (size * index // share[1] for index in (share[0], share[0] + 1))
    for begin in range(first, last, len(halves[0])):
        count = min(len(halves[0]), last - begin)
        chunks = [half[:count] for half in halves]
        for chunk, source, tensor in ((chunks[0], file, entry), (chunks[1], other, twin)):
            start = tensor.start + begin
            read_into(chunk, source, TensorEntry(torch.uint8, (count,), start, start + count), buffer)
        if not torch.equal(*chunks):
            return False
    return True


def refuse_wrong_numbers(source: object, leaves: Sequence[StoredLeaf], flat: dict[str, Any]) -> None:
    """MismatchError listing the tables (`InTurn`) with a value that is not one of the numbers which they count from 0.

    They name experts or compressed ids of tokens, and forward passes clamp them. flat: {path: the leaf or a shard}.
    """
    faults = []
    for leaf in leaves:
        if isinstance(leaf.leaf.init, InTurn):
            value, count = flat[leaf.path], leaf.leaf.init.count
            wrong = value[~((value >= 0) & (value < count) & (value == value.round()))]  # NaN is wrong too
            if len(wrong):
                faults.append(
                    f"{leaf.path}, {', '.join(disk_names(leaf.stored))}: holds {float(wrong[0]):.17g}, which is no "
                    f"whole number from 0 to {count - 1} ({len(wrong):,} of {value.numel():,} values)"
                )
    if faults:
        raise MismatchError(f"{source}: numbers of nothing that the model has:{as_lines(faults)}")


def refuse_other_than_stated(
    config: DecoderConfig, leftovers: Iterable[str], prefix: str, found: Found, buffer: Tensor
) -> None:
    """MismatchError listing the leftovers that do not hold what follows from config.json, and others compute with."""
    if function_of(family_of(config), "as_stated") is None:
        return
    values = ((prefix + name, read_located(found[name], None, buffer, None)) for name in leftovers)  # one at a time
    wrong = [name for name, value in values if not is_as_stated(config, name, value)]
    if wrong:
        where = next(iter(found.values()))[0].path.parent
        raise MismatchError(f"{where}: tensors {OTHER_THAN_STATED}:{as_lines(wrong)}")


OTHER_THAN_STATED = "that follow from config.json hold other values, with which this model would not be computed"


def is_as_stated(config: DecoderConfig, name: str, value: Tensor) -> bool:
    """Whether a tensor that is no parameter holds what follows from config.json, where anything does."""
    as_stated = function_of(family_of(config), "as_stated")
    return as_stated is None or value.is_meta or bool(as_stated(config, name, value))


def refuse_non_finite(
    folder: Path, chosen: Sequence[StoredLeaf], boxes: dict[str, Box], flat: dict[str, Tensor], found: Found
) -> None:
    """MismatchError naming every leaf with a NaN or an infinity."""
    faults = []
    for parameter in chosen:
        for name, value in _by_name(parameter, boxes[parameter.path], dequantize(flat[parameter.path])):
            # one pass without a mask as large as the leaf: aminmax propagates NaN
            if value.is_floating_point() and value.numel() and not all(e.isfinite() for e in torch.aminmax(value)):
                count, where = value.numel() - int(value.isfinite().sum()), found[name][0].path.name
                faults.append(f"{name} in {where}: {count:,} of {value.numel():,} values are not finite")
    if faults:
        raise MismatchError(
            f"{folder}: check_finite found NaN or infinities ({len(faults)} tensors):{as_lines(faults)}"
        )


def _by_name(parameter: StoredLeaf, box: Box, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name on disk, values) of the tensors that make up this shard of a parameter."""
    if isinstance(parameter.stored, Stack):
        yield from ((disk_name(single), value[at]) for single, _, at in parameter.stored.places(box[0]))
    else:
        yield disk_name(parameter.stored), value
