"""Traced losses: functions of one datum's log-probabilities, which are data (the nodes of a graph of allowed calls).

    loss = trace(lambda logprobs, advantages: (..., {"custom/share:mean": ...}), {"logprobs": 1, "advantages": 1})

Nothing in a graph runs but the calls of `traced_calls`, within its bounds, so that a server may take one from a client.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .traced_calls import CALLS, METHODS, Budget, Call, check_keywords

NODES, INPUTS = 2048, 16  # of a loss at most
RANKS = (0, 1, 2)
METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_DTYPES = {str(one).removeprefix("torch."): one for one in (torch.float32, torch.float64, torch.int64, torch.bool)}


@dataclass(frozen=True)
class Node:
    """A step of a graph: op "placeholder", "call_function", "call_method" or "output", as torch.fx has them.

    target: the name of the input, function or method. args, kwargs: in the form of Tinker's `CustomLossNode`.
    """

    op: str
    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class TracedLoss:
    """A loss of one datum: (loss 0-d, {"custom/NAME:sum" or "custom/NAME:mean": 0-d}) from its log-probabilities.

    Args:
        name: For the sentences of errors.
        inputs: (name, rank) of each input, logprobs first; the others are entries of loss_fn_inputs.
        nodes: The graph in order.
    """

    name: str
    inputs: tuple[tuple[str, int], ...]
    nodes: tuple[Node, ...]

    def __call__(self, *inputs: Tensor, budget: Budget | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its metrics, by the values of the inputs. ValueError where a step fails.

        budget: that of all data of a call; None: one for this datum alone.
        """
        given, values = iter(inputs), dict[str, Any]()
        budget = budget or Budget()
        for node, unused in zip(self.nodes, self._last_uses, strict=True):
            if node.op == "placeholder":
                values[node.name] = next(given)
                continue
            try:
                args = [_value(one, values) for one in node.args]
                kwargs = {name: _value(one, values) for name, one in node.kwargs.items()}
                if node.op == "output":
                    return self._checked(args[0], inputs[0].device)
                values[node.name] = Call(node.target, node.op == "call_method", args, kwargs).result(budget)
            except Exception as error:  # whatever a step raises is the fault of the graph
                first = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
                raise ValueError(
                    f"The custom loss {self.name!r} fails at {node.name} ({node.target}): {first}"
                ) from None
            for name in unused:
                del values[name]
        raise ValueError(f"The custom loss {self.name!r} has no output.")

    @cached_property
    def _last_uses(self) -> list[list[str]]:
        """The names of the values that no step after this one reads, of each step."""
        seen, found = set[str](), list[list[str]]()
        for node in reversed(self.nodes):
            names = {node.name, *_references([*node.args, *node.kwargs.values()])}
            found.append(sorted(names - seen))
            seen |= names
        return found[::-1]

    def _checked(self, found: Any, device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
        if not isinstance(found, (tuple, list)) or len(found) != 2 or not isinstance(found[1], dict):
            raise ValueError("it must return (loss, metrics).")
        loss, metrics = found
        if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
            raise ValueError("the loss must be a floating-point tensor without dimensions.")
        if loss.dtype not in _DTYPES.values() or any(
            isinstance(one, Tensor) and one.device != device for one in (loss, *metrics.values())
        ):
            raise ValueError(f"the loss and its metrics must be float32 or float64 on {device}, as the inputs are.")
        for name, value in metrics.items():
            if METRIC.fullmatch(name) is None:
                raise ValueError(f"the metric {name!r} must be named custom/NAME:sum or custom/NAME:mean.")
            if not isinstance(value, Tensor) or value.ndim:
                raise ValueError(f"the metric {name!r} must be a tensor without dimensions.")
        return loss, {name: value.detach() for name, value in metrics.items()}


def _references(given: Any) -> Iterator[str]:
    """The names of the steps that an argument reads."""
    if isinstance(given, list):
        for one in given:
            yield from _references(one)
    elif isinstance(given, dict):
        ((kind, held),) = given.items()
        if kind == "ref":
            yield held
        else:
            yield from _references(list(held.values()) if kind == "dict" else held)


def _value(given: Any, values: Mapping[str, Any]) -> Any:
    """An argument from the form in which it travels."""
    if isinstance(given, list):
        return [_value(one, values) for one in given]
    if not isinstance(given, dict):
        return given
    ((kind, held),) = given.items()
    if kind == "ref":
        return values[held]
    if kind == "tuple":
        return tuple(_value(one, values) for one in held)
    if kind == "dict":
        return {name: _value(one, values) for name, one in held.items()}
    if kind == "slice":
        return slice(*(_value(one, values) for one in held))
    if kind == "float":
        return float(held)
    return ... if kind == "ellipsis" else _DTYPES[held]


def traced_loss(name: str, inputs: Sequence[tuple[str, int]], nodes: Sequence[Node]) -> TracedLoss:
    """The loss of a graph. ValueError for one that calls something else than the allowed, or is of another form."""
    _check_inputs(name, inputs)
    if len(nodes) > NODES:
        raise ValueError(f"The custom loss {name!r} has {len(nodes):,} steps; {NODES:,} are allowed.")
    known, placeholders = set[str](), list[str]()
    for node in nodes:
        for held in (*node.args, *node.kwargs.values()):
            _check_argument(name, node, held, known)
        if node.name in known:
            raise ValueError(f"The custom loss {name!r} has two steps that are named {node.name!r}.")
        if node.op == "placeholder":
            placeholders.append(node.target)
        elif node.op == "call_method":
            _check_call(name, node.target, node.target in METHODS)
        elif node.op == "call_function":
            _check_call(name, node.target, node.target in CALLS or node.target == "getattr")
        elif node.op != "output":
            raise ValueError(
                f"The custom loss {name!r} has a step of the kind {node.op!r}: it may only call functions."
            )
        check_keywords(name, node.target, node.args, node.kwargs)
        known.add(node.name)
    if placeholders != [one for one, _ in inputs] or not nodes or nodes[-1].op != "output" or not nodes[-1].args:
        raise ValueError(f"The graph of the custom loss {name!r} must begin with its inputs and end with its output.")
    return TracedLoss(name, tuple(inputs), tuple(nodes))


def _check_call(name: str, target: str, allowed: bool) -> None:
    if not allowed:
        raise ValueError(f"The custom loss {name!r} calls {target!r}, which custom losses may not call here.")


def _check_inputs(name: str, inputs: Sequence[tuple[str, int]]) -> None:
    names = [one for one, _ in inputs]
    if not names or names[0] != "logprobs" or len(names) > INPUTS or len(set(names)) < len(names):
        raise ValueError(f"The custom loss {name!r} must take logprobs first, and at most {INPUTS} different inputs.")
    for one, rank in inputs:
        if _NAME.fullmatch(one) is None or rank not in RANKS:
            raise ValueError(f"The custom loss {name!r} has the input {one!r} of rank {rank!r}; ranks are 0, 1 and 2.")
    if inputs[0][1] != 1:
        raise ValueError(
            f"logprobs of the custom loss {name!r} have rank {inputs[0][1]}; here they are [T], of rank 1."
        )


def _check_argument(name: str, node: Node, given: Any, known: set[str], depth: int = 0) -> None:
    """ValueError for an argument of another form, or of a step that does not stand before."""
    wrong = f"The custom loss {name!r} has an argument of another form at {node.name!r}"
    if depth > 8:
        raise ValueError(wrong)
    if isinstance(given, list):
        for one in given:
            _check_argument(name, node, one, known, depth + 1)
        return
    if not isinstance(given, dict):
        if given is not None and not isinstance(given, (bool, int, float, str)):
            raise ValueError(wrong)
        if isinstance(given, int) and abs(given) >= 2**63:
            raise ValueError(f"The custom loss {name!r} has an integer beyond 64 bits at {node.name!r}.")
        return
    kind, held = next(iter(given.items())) if len(given) == 1 else ("", None)
    if kind in ("tuple", "slice") and isinstance(held, list):
        _check_argument(name, node, held, known, depth + 1)
    elif kind == "dict" and isinstance(held, dict):
        _check_argument(name, node, list(held.values()), known, depth + 1)
    elif kind == "ref":
        if not isinstance(held, str) or held not in known:
            raise ValueError(f"The custom loss {name!r} reads {held!r} at {node.name!r}, where it is not known yet.")
    elif not (kind == "ellipsis" or (kind == "float" and held in ("inf", "-inf", "nan")) or _is_dtype(kind, held)):
        raise ValueError(wrong)


def _is_dtype(kind: str, held: Any) -> bool:
    return kind == "dtype" and isinstance(held, str) and held in _DTYPES


def trace(function: Callable[..., Any], input_ranks: Mapping[str, int]) -> TracedLoss:
    """The graph of a function of logprobs and entries of loss_fn_inputs, by torch.fx.

    function: (logprobs, *entries) -> (loss, metrics), whose parameters are named for the entries. input_ranks: the rank
    of each. ValueError for a function that torch.fx cannot trace, or that calls something else than the allowed.
    """
    from torch.fx import symbolic_trace

    name = getattr(function, "__name__", type(function).__name__)
    names = list(inspect.signature(function).parameters)
    if sorted(names) != sorted(input_ranks):
        raise ValueError(f"input_ranks has {sorted(input_ranks)}; the custom loss {name!r} takes {names}.")
    try:
        graph = symbolic_trace(function).graph
    except Exception as error:
        raise ValueError(f"torch.fx cannot trace the custom loss {name!r}: {error}") from error
    nodes = []
    for node in graph.nodes:
        target = node.target if isinstance(node.target, str) else _name_of(node.target)
        kwargs = {key: _encoded(name, one) for key, one in node.kwargs.items()}
        nodes.append(Node(node.op, node.name, target, tuple(_encoded(name, one) for one in node.args), kwargs))
    return traced_loss(name, [(one, input_ranks[one]) for one in names], nodes)


def _name_of(function: Callable[..., Any]) -> str:
    """The name of a function in a graph, such as "torch.exp", "operator.add" or "getattr"."""
    if function is getattr:
        return "getattr"
    known = next((name for name, call in CALLS.items() if call is function), None)
    return known or f"{function.__module__}.{function.__name__}"


def _encoded(name: str, given: Any) -> Any:
    """An argument in the form in which it travels."""
    if isinstance(given, torch.fx.Node):
        return {"ref": given.name}
    if isinstance(given, float) and not math.isfinite(given):
        return {"float": str(given)}
    if given is None or isinstance(given, (bool, int, float, str)):
        return given
    if isinstance(given, (list, tuple)):
        values = [_encoded(name, one) for one in given]
        return values if isinstance(given, list) else {"tuple": values}
    if isinstance(given, dict):
        return {"dict": {key: _encoded(name, one) for key, one in given.items()}}
    if isinstance(given, slice):
        return {"slice": [_encoded(name, one) for one in (given.start, given.stop, given.step)]}
    if given is ...:
        return {"ellipsis": True}
    if isinstance(given, torch.dtype):
        return {"dtype": str(given).removeprefix("torch.")}
    raise ValueError(f"The custom loss {name!r} passes a {type(given).__name__}, which no graph can hold.")
