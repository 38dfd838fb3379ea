"""One warning where positions go past the range that a model's rotary tables are for: there they extrapolate."""

import warnings
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.errors import PositionWarning
from fnmodels.inputs.values import has_values, host_reads
from fnmodels.tree import Tree

from .rotary import Rope
from .torch_internals import traced

_KEPT = 64  # models whose first number is remembered
_first: dict[Any, int] = {}  # {config: the number of positions of its first warning}


def position_range(config: Any) -> int | None:
    """The number of positions that rotary tables of this config are for; None for a config without a `Rope`.

    It is max_position_embeddings, or factor times original_max_position_embeddings of a scaling, where that is more.
    """
    most = getattr(config, "max_position_embeddings", None)
    if most is None:
        return None
    ropes = [value for value in vars(config).values() if isinstance(value, Rope)]
    for rope in ropes:
        most = max(most, int(rope.factor * rope.original_max_position_embeddings))
    return most if ropes else None


def check_positions(config: Any, tables: Tree, positions: Tensor, valid: Tensor, *, count: int | None) -> None:
    """`check_count` of positions [B, S] or [B, S, axes], where the host can tell; under vmap too.

    valid: [B, S], False on padding, whose positions nothing reads. count: their number where it is known, so that no
    values need be read; otherwise those on the CPU are.
    """
    if not host_reads() or traced() or not positions.numel():
        return
    if (most := position_range(config)) is None:
        return
    if count is None and positions.device.type == "cpu":  # elsewhere a read would wait for the device
        highest = positions[..., -3:].amax(-1) if positions.ndim == 3 else positions
        if has_values(known := torch.func.debug_unwrap(highest)) and int(known.max()) >= most:
            count = int(torch.func.debug_unwrap(highest.where(valid, 0)).max()) + 1
    if count is not None and count > most:
        check_count(config, tables, count)


def check_count(config: Any, tables: Tree, count: int) -> None:
    """`PositionWarning` where a row has more positions than `position_range`; the same text for each call of a config.

    So Python's filters show it once; as an error ("error" in a filter) it has the number of its own call. tables: of
    any positions, by `prepare`; a model whose layers rotate nothing may have any number of positions.
    """
    most = position_range(config)
    if most is None or count <= most:
        return
    if not any(table.ndim == 4 and table.shape[2] for table in tree.leaves(tables)):  # [B, S, R/2, 2]
        return
    if config not in _first and len(_first) >= _KEPT:
        del _first[next(iter(_first))]
    shown = _first.setdefault(config, count)
    text = (
        "Positions reach {count}, and this model's rotary tables are for {most} (max_position_embeddings, or what a "
        "rope scaling makes of it): beyond them they extrapolate. A rope scaling in the config, or shorter rows, would "
        "be right."
    )
    try:
        warnings.warn(text.format(count=shown, most=most), PositionWarning, stacklevel=1)
    except PositionWarning:
        raise PositionWarning(text.format(count=count, most=most)) from None
