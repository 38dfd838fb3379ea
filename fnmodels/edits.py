"""Edits of activations: pure functions, or tensors, applied where the tap of a name is read.

    forward(..., edits={"layers.3.mlp": f})                        # f(value, name) -> value of its shape and dtype
    forward(..., edits={"layers.*.output": functools.partial(steer, vector=v)})      # steer(value, name, vector=v)
    forward(..., edits={"layers.0.attention.z": z})                # this tensor replaces the value

Functions are static: a compiled block has a graph for each function, and for each layer where the function reads its
name. The tensors that replace values, and those among the keywords of a functools.partial, are arguments of the block's
call: other values, and vmap over them, need no new graph.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .options import Edit

_REPLACEMENT = ""  # the keyword under which the tensor that replaces a value travels


@dataclass(frozen=True)
class BoundEdit:
    """The static part of an edit at one tap. function: None where a tensor replaces the value.

    tap: the name in the layer, or of an end. name: what the function receives, and what errors name. settings: the
    keywords of a partial that are no tensors.
    """

    tap: str
    name: str
    function: Callable[..., Any] | None
    settings: tuple[tuple[str, Any], ...] = ()

    def __call__(self, value: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """The edited value. TypeError and ValueError unless it is a tensor of the value's shape and dtype."""
        if self.function is None:
            edited: Any = tensors[_REPLACEMENT]
        else:
            edited = self.function(value, self.name, **dict(self.settings), **tensors)
        if not isinstance(edited, Tensor):
            raise TypeError(f"The edit of {self.name!r} returned a {type(edited).__name__}; it returns a tensor.")
        if edited.shape != value.shape or edited.dtype != value.dtype:
            raise ValueError(
                f"The edit of {self.name!r} gives {str(edited.dtype).removeprefix('torch.')} {list(edited.shape)}; the "
                f"value there is {str(value.dtype).removeprefix('torch.')} {list(value.shape)}, and must stay so."
            )
        return edited


BoundEdits = tuple[BoundEdit, ...]


def bound(tap: str, name: str, edit: Edit) -> tuple[BoundEdit, dict[str, Tensor]]:
    """(static part, tensors) of an edit; TypeError if it is neither a function nor a tensor."""
    if isinstance(edit, Tensor):
        # The same static part in every layer, so that one graph serves all of them.
        return BoundEdit(tap, tap, None), {_REPLACEMENT: edit}
    if not callable(edit):
        raise TypeError(
            f"The edit of {name!r} is a {type(edit).__name__}; an edit is a function (value, name) -> value, or a "
            "tensor that replaces the value."
        )
    if not isinstance(edit, functools.partial) or edit.args:
        return BoundEdit(tap, name, edit), {}
    tensors = {key: value for key, value in edit.keywords.items() if isinstance(value, Tensor)}
    settings = tuple((key, edit.keywords[key]) for key in sorted(edit.keywords) if key not in tensors)
    return BoundEdit(tap, name, edit.func, settings), tensors


def check_call(name: str, edit: Edit) -> None:
    """TypeError, naming the tap, for a function that cannot be called with a value and the name of a tap."""
    if torch.compiler.is_compiling() or not callable(edit):
        return
    try:
        signature = inspect.signature(edit)
    except ValueError:  # a builtin without one
        return
    try:
        signature.bind(None, name)
    except TypeError as error:
        raise TypeError(
            f"The edit of {name!r} cannot be called as edit(value, name): {error}. An edit is a function (value, name) "
            f"-> value, and this one takes {signature}."
        ) from None


def edit_end(edits: Mapping[str, Edit] | None, name: str, value: Tensor) -> Tensor:
    """The value at one of the model's ends ("embed", "hidden", "final.norm"), edited if `edits` names it."""
    if not edits or name not in edits:
        return value
    check_call(name, edits[name])
    static, tensors = bound(name, name, edits[name])
    return static(value, tensors)


def edits_of_layers(edits: Mapping[str, Edit], ends: tuple[str, ...], layers: int, run: range) -> dict[int, Any]:
    """{layer: {tap: (static part, tensors)}} of the layers in `run`, out of `layers` in the model.

    ValueError for a name that is neither one of `ends` nor layers.N.NAME, for a layer that does not run here, and for
    two edits of one tap.
    """
    by_layer: dict[int, dict[str, tuple[BoundEdit, dict[str, Tensor]]]] = {}
    for name, edit in edits.items():
        head, _, rest = name.partition(".")
        number, _, tap = rest.partition(".")
        if head != "layers" or not tap or not (number == "*" or number.isdigit()):
            if name in ends:
                continue
            raise ValueError(
                f"The edit {name!r} is of no tap: there are {', '.join(ends)} and layers.N.NAME with N a layer or *."
            )
        if number != "*" and int(number) not in run:
            raise ValueError(
                f"The edit {name!r} is of a layer that does not run here: these are {run.start} to {run.stop - 1} of "
                f"{layers}."
            )
        check_call(name, edit)
        for index in run if number == "*" else (int(number),):
            here = by_layer.setdefault(index, {})
            if tap in here:
                raise ValueError(f"Two edits are of layer {index}'s {tap!r}, by its number and by *: give one.")
            here[tap] = bound(tap, f"layers.{index}.{tap}", edit)
    return by_layer


def missed(names: Iterable[str], passed: set[tuple[int, str]]) -> list[str]:
    """The names, of edits or taps of layers, that nothing passed. passed: (layer, tap)."""
    everywhere = {tap for _, tap in passed}
    out = []
    for name in names:
        head, _, rest = name.partition(".")
        number, _, tap = rest.partition(".")
        if head == "layers" and not (tap in everywhere if number == "*" else (int(number), tap) in passed):
            out.append(name)
    return out


def edits_of_stage(edits: Mapping[str, Edit] | None, names: Iterable[str], layers: range) -> dict[str, Edit] | None:
    """The edits of `layers`, each under the name of one layer. names: those of all taps of the model.

    ValueError, on every stage alike, for an edit of which `names` has none.
    """
    stage_edits: dict[str, Edit] = {}
    known = list(names)
    for name, edit in (edits or {}).items():
        inner = name.removeprefix("layers.*.")
        matching = [n for n in known if n == name or (inner != name and n.split(".", 2)[2:] == [inner])]
        if not matching:
            raise ValueError(f"Nothing passes the edit {name!r}. There are {', '.join(known)}.")
        stage_edits |= {n: edit for n in matching if n.startswith("layers.") and int(n.split(".", 2)[1]) in layers}
    return stage_edits or None
