"""The batch shard of a rank: its rows and sequence positions, from the global batch or from its own rows.

The only communication is the check in `agreement`: all ranks reject a batch that the mesh cannot shard, before one
waits for another.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from fnmodels import tree
from train.batch import FULL_ROWS, PLACES, Batches, Entries, check_entries, microbatches
from train.losses.batch_checks import check_batch
from train.parallel.context.api import shard_batch

from .agreement import agreed, ready_with_same
from .mesh import ROWS, Mesh, Strategy, mesh_of, whole_groups
from .padding import check_shapes, clear_length, padded
from .placement import Placed

IN_ORDER = Strategy(order=None)  # the positions of a rank are consecutive


def own_parts(
    batch: Batches,
    placed: Placed,
    accumulate: int = 1,
    *,
    check: Callable[[Entries], object] = lambda part: None,
    places: bool = False,
    rows: bool = False,
) -> list[Entries]:
    """This rank's microbatches of the batch that it is given; see `Strategy.rows`. ValueError on all ranks alike.

    check: raises for rows that the loss cannot use. places: adds the entry PLACES to each microbatch. rows: adds the
    entry FULL_ROWS.
    """
    strategy, devices, config = placed.strategy, placed.devices, placed.config

    if strategy.rows == "whole":

        def own() -> list[Entries]:
            many = isinstance(batch, (list, tuple))
            mine = [own_rows(one, devices) for one in batch] if many else own_rows(batch, devices)
            for part in microbatches(mine, accumulate):
                check(part)
            cut = _own_part(_with_places(batch) if places else batch, devices, strategy, config, rows)
            if devices["pp"].size() > 1 and not many:
                _check_rows(cut, mesh_of(devices), accumulate)
            return microbatches(cut, accumulate)

        return ready_with_same(batch, own, devices, whole_groups(devices))
    if strategy.rows != "own":
        raise ValueError(f'rows is {strategy.rows!r}; it must be "whole" or "own".')

    needed = ("tokens", "positions", "segment_ids") if devices["pp"].size() > 1 else ("tokens",)

    def cut(parts: Sequence[Entries]) -> list[Entries]:
        # All checks come first: a later error would be raised on this rank alone.
        for part in parts:
            check_entries(part, *needed)
            check_shapes(part)
            check(part)
        given = _with_places(parts) if places else parts
        return [_with_rows(own_positions, part, devices, strategy, config, rows) for part in given]

    whole = functools.partial(microbatches, batch, accumulate)
    return agreed(whole, cut, devices, _row_of(devices)[0], whole_groups(devices))


def _with_places(batch: Any) -> Any:
    """The batch, or each one in a list, with PLACES: the index of every token in its row, [B, S]."""
    if isinstance(batch, (list, tuple)):
        return [_with_places(part) for part in batch]
    check_entries(batch, "tokens")
    tokens = batch["tokens"]
    return {**batch, PLACES: torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])}


def _check_rows(own: Entries, mesh: Mesh, accumulate: int) -> None:
    """ValueError if the rows are no multiple of `accumulate`: the pipeline would compute padding instead."""
    rows = len(next(iter(own.values())))
    if rows % accumulate:
        raise ValueError(
            f"The batch has {rows * mesh.rows} rows, which {accumulate} microbatches over the mesh {mesh} do not "
            f"divide: give a multiple of {mesh.rows * accumulate}, or a list of microbatches, whose smaller ones are "
            "padded."
        )


def own_part(
    batch: Any, devices: DeviceMesh, strategy: Strategy = IN_ORDER, config: Any = None, rows: bool = False
) -> Any:
    """`own_positions` of `own_rows` of the global batch, or of each microbatch in a list.

    ValueError, on all ranks alike, for numbers that a model of `config` does not have.
    """
    if config is not None:
        for part in batch if isinstance(batch, (list, tuple)) else [batch]:
            check_batch(part, config)
    return _own_part(batch, devices, strategy, config, rows)


def _own_part(batch: Any, devices: DeviceMesh, strategy: Strategy, config: Any, rows: bool) -> Any:
    if isinstance(batch, (list, tuple)):
        return [_own_part(part, devices, strategy, config, rows) for part in batch]
    return _with_rows(own_positions, own_rows(batch, devices), devices, strategy, config, rows)


def _with_rows(
    cut: Callable[..., Entries], part: Entries, devices: DeviceMesh, strategy: Strategy, config: Any, rows: bool
) -> Any:
    """cut(part, ...), with the entry FULL_ROWS beside it where asked."""
    own = cut(part, devices, strategy, config)
    return {**own, FULL_ROWS: {name: x for name, x in part.items() if name != PLACES}} if rows else own


def own_positions(rows: Entries, devices: DeviceMesh, strategy: Strategy, config: Any = None) -> Entries:
    """This rank's positions of its rows. ValueError if cp does not divide the sequence length.

    With strategy.sequence, by which tp shards them too, rows are padded to a multiple of cp x tp, also where tp is 1.
    """
    mesh = mesh_of(devices)
    if strategy.sequence and mesh.cp * mesh.tp > 1 and "tokens" in rows:
        # Before cp shards positions: padding between two ranks' positions would split documents.
        rows = _divisible(rows, mesh.cp * mesh.tp, config)
    if mesh.cp == 1:
        return rows
    # A rank could not derive positions and segments from its shard of the sequence.
    check_entries(rows, "tokens", "positions", *(("segment_ids",) if strategy.order in ("auto", "mask") else ()))
    return shard_batch(rows, devices.get_local_rank("cp"), mesh.cp, order=strategy.order, config=config)


def _divisible(rows: Entries, ranks: int, config: Any) -> Entries:
    length = rows["tokens"].shape[1]
    missing = -length % ranks
    if missing and "segment_ids" not in rows:
        raise ValueError(
            f"sequence=True pads rows of {length} tokens to what cp x tp = {ranks} divide, and the batch has no "
            "segment_ids to say what padding is: give it these, or rows of a multiple."
        )
    return padded(rows, length + missing if config is None or not missing else clear_length(length, ranks, config))


def own_rows(batch: Any, devices: DeviceMesh) -> Any:
    """This rank's rows of the global batch. ValueError if the number of ranks does not divide the rows."""
    index, number = _row_of(devices)
    for path, tensor in tree.flatten(batch).items():
        if not tensor.ndim or tensor.shape[0] % number:
            rows = f"{tensor.shape[0]} rows" if tensor.ndim else "no rows"
            raise ValueError(
                f"The batch's {path!r} has {rows}, and the mesh {mesh_of(devices)} takes them in {number} equal parts: "
                f"give a multiple of {number}."
            )
    return tree.map(lambda tensor: tensor.chunk(number)[index], batch)


def _row_of(devices: DeviceMesh) -> tuple[int, int]:
    """(index of this rank's row shard, number of row shards)."""
    index, number = 0, 1
    for name, size in mesh_of(devices).sizes.items():
        if name in ROWS and size > 1:
            index, number = index * size + devices.get_local_rank(name), number * size
    return index, number
