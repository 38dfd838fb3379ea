"""Changes of weights since they were last handed to a rollout.

held = {name: tensor.bfloat16() for name, tensor in engine.export(copy=True)}  # what the receiver has
engine.optim_step()
train.apply_deltas(train.deltas(engine.export(), held), receiver)
"""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fnmodels.errors import MismatchError

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Delta:
    """The elements of a tensor that have changed.

    Args:
        indices: int64 [n], places in the flattened tensor.
        values: [n], the new values.
    """

    indices: Tensor
    values: Tensor


def deltas(tensors: Iterable[tuple[str, Tensor]], held: MutableMapping[str, Tensor]) -> Iterator[tuple[str, Delta]]:
    """The changed elements of exported weights, for a receiver that has an older copy.

    Small updates leave most elements of a bf16 copy as they are. Elements are compared by bits.

    Args:
        tensors: (name, tensor) of the new weights, such as `engine.export()`.
        held: {name: what the receiver has}, on any device; it must own its memory (`engine.export(copy=True)`), and is
            updated. Deltas have its dtypes.

    Yields:
        (name, `Delta`) of each tensor that differs.

    Raises:
        MismatchError: `held` lacks a name, or has it in another shape.
        ValueError: A tensor of `held` shares memory with the exported one.
    """
    for name, tensor in tensors:
        if name not in held or held[name].shape != tensor.shape:
            has = f"{list(held[name].shape)} of it" if name in held else "none"
            raise MismatchError(f"{name} is {list(tensor.shape)} and the receiver has {has}.")
        before = held[name]
        now = tensor.detach().to(before)
        if now.numel() and now.data_ptr() == before.data_ptr():
            raise ValueError(f"held[{name!r}] is the live parameter, which is always equal: hold a copy of it.")
        indices = (_bits(now) != _bits(before)).flatten().nonzero()[:, 0]
        if len(indices):
            delta = Delta(indices, now.flatten()[indices])
            _write(before, delta)
            yield name, delta


def apply_deltas(found: Iterable[tuple[str, Delta]], weights: Mapping[str, Tensor]) -> None:
    """Writes changed elements into the receiver's tensors, in place.

    Args:
        found: (name, `Delta`), as `deltas` yields them.
        weights: {name: the receiver's tensor}, contiguous.
    """
    for name, delta in found:
        _write(weights[name], delta)


def _write(tensor: Tensor, delta: Delta) -> None:
    with torch.no_grad():
        tensor.put_(delta.indices.to(tensor.device), delta.values.to(tensor))


def _bits(tensor: Tensor) -> Tensor:
    """The elements as integers of their size."""
    return tensor.contiguous().view(INTEGERS[tensor.itemsize])
