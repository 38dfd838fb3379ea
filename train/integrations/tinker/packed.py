"""Data of Tinker in packed rows, the results of rows as Tinker's, and saved states."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fnmodels.inputs.packing import IGNORE
from train import checkpoint
from train.data.token_budget import PackedRow, unpacked

from . import types
from .base import Base
from .images import InputReader, InputTokens, packed_rows
from .losses import LOSSES, PREFIX, LossFunction, NamedLoss
from .targets import TARGETS
from .traced import TracedLoss

NAME, PATH = 200, 1000  # bytes of the name of a folder, and characters of one with those above it


ROUTING = "routing"  # entry [T, layers with experts, k]: the experts of each token, which the pass replays


def named_loss(name: str) -> NamedLoss:
    """ValueError for an unknown name."""
    if name not in LOSSES:
        raise ValueError(f"There is no loss {name!r}; there are {', '.join(LOSSES)}, and forward_backward_custom.")
    return LOSSES[name]


def function_of(name: str, numbers: Mapping[str, float] | None) -> LossFunction:
    """The loss of a name and its numbers. ValueError for wrong ones."""
    loss = named_loss(name)
    return loss.make(loss.numbers(name, numbers))


def packed_data(data: Sequence[Any], loss_fn: str | None, base: Base) -> list[PackedRow]:
    """The data in packed rows, with the inputs of the loss as entries. ValueError for a datum of another form.

    Where a datum has several targets at a token, all have as many columns, of which those that a datum lacks are -100.
    """
    loss = None if loss_fn is None else named_loss(loss_fn)
    read, names = _read(data, base)
    optional = [name for name in (*(loss.per_token if loss else ()), ROUTING) if _any_has(data, name)]
    reader = f"the loss {loss_fn!r}"
    columns = _columns(data) if loss is None or loss.several else None
    entries: dict[str, list[Tensor]] = {"labels": []}
    for number, (datum, tokens) in enumerate(zip(data, (one.tokens for one in read), strict=True)):
        rank = 1 if columns is None else _rank(datum)
        targets = _entry(datum, number, "target_tokens", len(tokens), reader, rank).long()
        needed = loss.inputs if loss else ()
        inputs = {name: _entry(datum, number, name, len(tokens), reader, rank).float() for name in needed}
        if columns is not None:
            for name, values in inputs.items():
                if values.shape != targets.shape:
                    raise ValueError(
                        f"{name!r} of datum {number} has the shape {list(values.shape)} beside 'target_tokens' "
                        f"{list(targets.shape)}; both must have the same."
                    )
            inputs = {name: _in_columns(values, columns) for name, values in inputs.items()}
            entries.setdefault(TARGETS, []).append(_in_columns(targets, columns, IGNORE))
            targets = entries[TARGETS][-1].max(1).values  # which says of a token whether it has a target
        entries["labels"].append(targets)
        for name, values in inputs.items():
            entries.setdefault(name, []).append(values)
        for name in optional:
            values = _entry(datum, number, name, len(tokens), "other data have")
            entries.setdefault(name, []).append(values.long() if name == ROUTING else values.float())
        if "sequence_ratio_mask" in entries and not entries["sequence_ratio_mask"][-1].any():
            raise ValueError(f"'sequence_ratio_mask' of datum {number} marks no token; the ratio needs one at least.")
    return packed_rows(base, entries, read, names)


def packed_inputs(data: Sequence[Any], loss: TracedLoss, base: Base) -> list[PackedRow]:
    """The data in packed rows, with the inputs of a traced loss as entries. ValueError for a datum of another form.

    A number becomes an entry with that number at each token.
    """
    read, names = _read(data, base)
    entries: dict[str, list[Tensor]] = {"labels": []}
    reader, wanted = f"the custom loss {loss.name!r}", loss.inputs[1:]
    routed = _any_has(data, ROUTING)
    for number, (datum, tokens) in enumerate(zip(data, (one.tokens for one in read), strict=True)):
        entries["labels"].append(_entry(datum, number, "target_tokens", len(tokens), reader).long())
        if routed:
            values = _entry(datum, number, ROUTING, len(tokens), "other data have")
            entries.setdefault(ROUTING, []).append(values.long())
        for name, rank in wanted:
            values = _entry(datum, number, name, len(tokens), reader, rank)
            values = values if rank else values.expand(len(tokens))
            entries.setdefault(PREFIX + name, []).append(values)
    for name, rank in wanted:
        if len({values.shape[1:] for values in entries[PREFIX + name]}) > 1:
            raise ValueError(f"{name!r}, of rank {rank}, must have as many columns in all data.")
    return packed_rows(base, entries, read, names)


def _rank(datum: Any) -> int:
    """The rank of a datum's targets: 2 where there are several at a token."""
    targets = datum.loss_fn_inputs.get("target_tokens")
    return 1 if targets is None or targets.to_torch().ndim != 2 else 2


def _columns(data: Sequence[Any]) -> int | None:
    """The most targets that a datum has at a token; None: all have one. ValueError for none."""
    several = [datum.loss_fn_inputs["target_tokens"].to_torch().shape[1] for datum in data if _rank(datum) == 2]
    if several and not min(several):
        raise ValueError("'target_tokens' of a datum has no column; it needs a target at each token at least.")
    return max(several, default=None)


def _in_columns(values: Tensor, columns: int, fill: float = 0) -> Tensor:
    """[T, columns] of values [T] or [T, K], filled up."""
    values = values if values.ndim == 2 else values[:, None]
    return pad(values, (0, columns - values.shape[1]), value=fill)


def of_targets(rows: Sequence[PackedRow], values: Sequence[Tensor], data: Sequence[Any]) -> list[Tensor]:
    """The values of each datum in the shape of its targets."""
    found = []
    for own, datum in zip(unpacked(rows, values).values(), data, strict=True):
        shape = datum.loss_fn_inputs["target_tokens"].to_torch().shape
        found.append(own if own.ndim == 1 else own[:, : shape[1] if len(shape) == 2 else 1].reshape(shape))
    return found


def add_gradients(rows: Sequence[PackedRow], logps: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Adds the gradient by each datum's log-probabilities as an entry of the rows; None: 0, for nothing reads them."""
    each = [torch.zeros_like(logp) if grad is None else grad for grad, logp in zip(gradients, logps, strict=True)]
    for row in rows:
        own = [each[number] for number in row.sequences]
        if TARGETS in row.batch:
            own = [_in_columns(one, row.batch[TARGETS].shape[-1]) for one in own]
        row.batch["gradient"] = torch.cat(own)[None]


def _read(data: Sequence[Any], base: Base) -> tuple[list[InputTokens], list[str]]:
    """(the tokens and images of each datum, what sentences call it). ValueError for none, and for a wrong chunk."""
    if not data:
        raise ValueError("There is no datum: data is empty.")
    reader, names = InputReader(base), [f"datum {number}" for number in range(len(data))]
    return [reader.read(datum.model_input, name) for datum, name in zip(data, names, strict=True)], names


def _any_has(data: Sequence[Any], name: str) -> bool:
    return any(name in datum.loss_fn_inputs for datum in data)


def _entry(datum: Any, number: int, name: str, length: int, reader: str, rank: int = 1) -> Tensor:
    """An entry of a datum. ValueError where it is missing, or is not of so many tokens.

    reader: who needs it, or "other data have". rank: its dimensions, of which the first are the tokens.
    """
    if name not in datum.loss_fn_inputs:
        given, needs = sorted(datum.loss_fn_inputs), "" if reader.startswith("other") else " needs"
        raise ValueError(f"Datum {number} has no {name!r}, which {reader}{needs}; it has {given}.")
    values: Tensor = datum.loss_fn_inputs[name].to_torch()
    if name == ROUTING:
        if values.ndim != 3 or len(values) != length or values.is_floating_point():
            raise ValueError(
                f"{name!r} of datum {number} has the shape {list(values.shape)}; it needs integers [{length}, layers "
                "with experts, experts of a token]."
            )
    elif rank == 0 and values.numel() == 1:  # a message has the same shape for a number and for a list of one
        return values.reshape(())
    elif values.ndim != rank:
        raise ValueError(f"{name!r} of datum {number} has the shape {list(values.shape)}; its rank must be {rank}.")
    elif rank and len(values) != length:
        row = "(a row of them) " if rank > 1 else ""
        raise ValueError(
            f"{name!r} of datum {number} has the shape {list(values.shape)}; it needs one number {row}for each of "
            f"the {length} tokens."
        )
    return values


def output_of(
    rows: Sequence[PackedRow], logps: Sequence[Tensor], total: float, data: Sequence[Any]
) -> types.ForwardBackwardOutput:
    each = of_targets(rows, [logp.detach() for logp in logps], data)
    outputs = [{"logprobs": types.TensorData.from_torch(logp)} for logp in each]
    return types.ForwardBackwardOutput("TorchLossReturn", outputs, {"loss:sum": total})


def saved_place(folder: Path, name: str) -> Path:
    """The folder of a name inside of a folder. ValueError for a name that leads out of it, or that no folder can have.

    folder: of one kind of saves of a client.
    """
    if "\0" in name or any(len(part.encode()) > NAME for part in name.split("/")) or len(name) > PATH:
        raise ValueError(f"The name {name[:40]!r} must be that of a folder: without NUL, of at most {NAME} bytes.")
    place = folder / name
    if folder.resolve() not in place.resolve().parents:
        raise ValueError(f"The name {name!r} leads out of the client's folder; it must be that of a folder in it.")
    return place


def saved_state(path: str | os.PathLike[str]) -> checkpoint.Checkpoint:
    """The newest state in a folder. FileNotFoundError where there is none."""
    found = checkpoint.latest(Path(path))
    if found is None:
        raise FileNotFoundError(f"{path} holds no saved state; TrainingClient.save_state makes one.")
    return found
