"""Per-sample gradients at the price of a batch's: what `vmap(grad(loss))` computes, without torch.func.

The gradient of a linear layer's weight for one row is one term of a sum that the batch's gradient takes anyway. So one
ordinary backward pass over the whole batch, with that sum left out, gives them all: of each operation on a parameter
its input and the gradient of its output are enough (arXiv 1510.01799). What then costs most is fresh memory for B
numbers per parameter, which is what `out` is for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from graphlib import TopologicalSorter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode, resolve_name

from . import tree
from .tree import Tree

# (the rows' gradients [B, *shape] of one parameter, the gradient of the operation's output, 0 to overwrite or 1 to add)
Write = Callable[[Tensor, Tensor, int], None]
Rule = list[tuple[Tensor, Write]]


def per_sample_gradients(
    loss_fn: Callable[[Tree, Tree], Tensor], params: Tree, batch: Tree, *, out: Tree | None = None
) -> tuple[Tree, Tensor]:
    """(gradients, loss): for every parameter [B, *shape], whose row b is the gradient of row b's part of the loss.

    loss_fn(params, batch) -> 0-d tensor, the SUM of the rows' losses, each of which depends on its own row alone. The
    batch stays whole, so every kernel works and a `layout` is that of the batch. batch: a tree of tensors [B, ...].
    out: an earlier result to write over; without it the operating system has to clear B numbers per parameter anew.

    Parameters may be read by F.linear, F.embedding, F.rms_norm, F.layer_norm, and products and sums with activations;
    any other operation raises NotImplementedError, and `torch.func.vmap(torch.func.grad(...))` over `fnmodels.rows`
    does it. Activations there must have the rows in dimension 0. Of that only the size can be seen: one that is not B
    raises too, but another dimension that happens to be B (time-major activations of B tokens, a table of B entries
    that belongs to no row) is taken for the rows and gives wrong numbers without a word. The result is data and not
    part of a graph.
    """
    sizes = {tensor.shape[0] if tensor.ndim else None for tensor in tree.leaves(batch)}
    if len(sizes) != 1 or None in sizes:
        raise ValueError(
            "Every tensor of the batch must have the rows in dimension 0; the sizes are "
            f"{sorted(sizes, key=str)}, where None is a tensor without dimensions."
        )
    rows = next(size for size in sizes if size is not None)
    leaves = tree.map(lambda leaf: leaf.detach().requires_grad_(), params)
    flat = tree.flatten(leaves)
    if out is None:
        out = tree.map(lambda leaf: torch.empty((rows, *leaf.shape), dtype=leaf.dtype, device=leaf.device), params)
    recorder = _Recorder(flat, tree.flatten(out), rows)
    with torch.enable_grad(), recorder:
        loss = loss_fn(leaves, batch)
    if loss.ndim:
        raise ValueError(f"The loss must be one number, the sum over the rows; its shape is {tuple(loss.shape)}.")
    if not loss.requires_grad:
        raise ValueError("The loss does not depend on the parameters in a way that has a gradient.")
    ends = recorder.ends(loss)
    if ends and rows:
        torch.autograd.grad(loss, ends)  # for the hooks on the way
    for path, buffer in recorder.buffers.items():
        if path not in recorder.written:
            buffer.zero_()
    return out, loss.detach()


_INSTEAD = "torch.func.vmap(torch.func.grad(loss)) over fnmodels.rows(batch) differentiates everything"


class _Recorder(TorchFunctionMode):
    """Sees every operation of the forward pass, and hangs on those that read a parameter what makes its gradients."""

    def __init__(self, flat: dict[str, Tensor], buffers: dict[str, Tensor], rows: int) -> None:
        super().__init__()
        self.paths = {id(leaf): path for path, leaf in flat.items()}
        self.guarded = {get_gradient_edge(leaf).node: path for path, leaf in flat.items()}  # where their gradients end
        self.known: set[Node] = set()  # and what may lead there
        self.same: list[Tensor] = []  # parameters after a cast or `1 + weight`: kept, for an id is one only while alive
        self.buffers, self.rows = buffers, rows
        self.hooked: dict[Node, GradientEdge] = {}
        self.written: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for arg in (*args, *kwargs.values()) for x in (arg if isinstance(arg, (list, tuple)) else [arg])]
        params = {id(x): self.paths[id(x)] for x in given if id(x) in self.paths}
        if not params or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func in (Tensor.to, Tensor.float) or (func is Tensor.add and not isinstance(args[-1], Tensor)):
            return self._derived(func(*args, **kwargs), *params.values())
        rule = RULES[func](*args, **kwargs) if func in RULES else []
        if {id(param) for param, _ in rule} != params.keys():
            result = func(*args, **kwargs)
            made = result if isinstance(result, (list, tuple)) else [result]
            if id(result) in self.paths or not any(isinstance(x, Tensor) for x in made):
                return result
            raise NotImplementedError(f"{resolve_name(func)} reads the parameters {list(params.values())}; {_INSTEAD}.")
        result = func(*map(self._mark, args), **{name: self._mark(x) for name, x in kwargs.items()})
        if result.shape[0] != self.rows:
            raise NotImplementedError(
                f"{resolve_name(func)} with {list(params.values())} gives {list(result.shape)}, which does not have "
                f"the {self.rows} rows in dimension 0; {_INSTEAD}."
            )
        edge = get_gradient_edge(result)  # and not the tensor, which may be written over and need not be kept
        self.hooked[edge.node] = edge
        for param, write in rule:
            self._hang(result, params[id(param)], write)
        return result

    def _derived(self, result: Tensor, path: str) -> Tensor:
        """A parameter in another form, which counts as it from here on."""
        if id(result) not in self.paths and result.grad_fn is not None:
            self.paths[id(result)] = self.guarded[result.grad_fn] = path
            self.same.append(result)
            self.known.add(result.grad_fn)
        return result

    def _mark(self, given: Any) -> Any:
        """A parameter behind an identity, by which `check` knows an operation that was seen; all else as it is."""
        if id(given) not in self.paths:
            return given
        marked = given.view_as(given)
        self.known.add(marked.grad_fn)
        return marked

    def ends(self, loss: Tensor) -> list[GradientEdge]:
        """The hooked operations below which there is no other.

        Asked for their gradients, autograd passes every hook, and takes the gradient of no parameter and of nothing
        that the caller's own graph holds below. NotImplementedError if the graph reads a parameter in an operation that
        no mode sees, as an autograd.Function or compiled code does with its arguments: its share would miss.
        """
        below: dict[Node, list[Node]] = {}
        waiting: list[Node] = [] if loss.grad_fn is None else [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node in below:
                continue
            below[node] = [reached for reached, _ in node.next_functions if reached is not None]
            for reached in below[node]:
                if reached in self.guarded and node not in self.known:
                    raise NotImplementedError(
                        f"{self.guarded[reached]!r} is read by an operation that cannot be seen ({node.name()}); "
                        f"{_INSTEAD}."
                    )
            waiting += below[node]
        found: list[GradientEdge] = []
        leading: set[Node] = set()  # to a hooked operation
        for node in TopologicalSorter(below).static_order():
            if leading.intersection(below[node]):
                leading.add(node)
            elif node in self.hooked:
                leading.add(node)
                found.append(self.hooked[node])
        return found

    def _hang(self, result: Tensor, path: str, write: Write) -> None:
        def hook(slope: Tensor) -> None:
            write(self.buffers[path], slope, int(path in self.written))
            self.written.add(path)

        result.register_hook(hook)


def _flat(x: Tensor) -> Tensor:
    """[B, ..., D] -> [B, T, D]."""
    return x.reshape(x.shape[0], -1, x.shape[-1])


def _store(rows: Tensor, value: Tensor, keep: int) -> None:
    if keep:
        rows.add_(value)
    else:
        rows.copy_(value)


# The rules take their arguments by torch's names, since callers may.


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Rule:
    x = input.detach()

    def of_weight(rows: Tensor, slope: Tensor, keep: int) -> None:
        factors = _flat(slope).mT, _flat(x)
        if rows.dtype == slope.dtype:
            rows.baddbmm_(*factors, beta=keep)  # straight into place: a product first would go through memory twice
        else:
            _store(rows, torch.bmm(*factors), keep)

    def of_bias(rows: Tensor, slope: Tensor, keep: int) -> None:
        _store(rows, _flat(slope).sum(1), keep)

    return [(weight, of_weight)] if bias is None else [(weight, of_weight), (bias, of_bias)]


def _embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> Rule:
    if padding_idx is not None or any(args) or any(v for k, v in kwargs.items() if k != "norm_type"):
        return []

    def write(rows: Tensor, slope: Tensor, keep: int) -> None:
        if not keep:
            rows.zero_()
        first = torch.arange(rows.shape[0], device=input.device) * rows.shape[1]
        index = (input.flatten(1) + first[:, None]).flatten()
        rows.flatten(0, 1).index_add_(0, index, slope.reshape(-1, slope.shape[-1]).to(rows.dtype))

    return [(weight, write)]


def _scaled(make: Callable[[], Tensor], weight: Tensor) -> Rule:
    """Of make() * weight, with weight in the last dimensions."""

    def write(rows: Tensor, slope: Tensor, keep: int) -> None:
        product = slope * make()
        between = range(1, product.ndim - weight.ndim)
        _store(rows, product.flatten(1, between[-1]).sum(1) if between else product, keep)

    return [(weight, write)]


def _operands(x: Any, y: Any) -> tuple[Tensor, Tensor] | None:
    """(activation, parameter), if the one has the other's shape in its last dimensions, and more."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return None
    x, y = (x, y) if x.ndim >= y.ndim else (y, x)
    return (x, y) if 0 < y.ndim < x.ndim and y.shape == x.shape[-y.ndim :] else None


def _product(input: Any, other: Any) -> Rule:
    pair = _operands(input, other)
    return [] if pair is None else _scaled(pair[0].detach, pair[1])


def _sum(input: Any, other: Any, *, alpha: float = 1) -> Rule:
    pair = _operands(input, other)
    return [] if pair is None or alpha != 1 else _scaled(functools.partial(torch.ones_like, pair[0]), pair[1])


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Rule:
    x = input.detach()
    return [] if weight is None else _scaled(lambda: F.rms_norm(x, normalized_shape, None, eps), weight)


def _layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Rule:
    x = input.detach()
    rule = [] if weight is None else _scaled(lambda: F.layer_norm(x, normalized_shape, None, None, eps), weight)
    return rule if bias is None else [*rule, *_scaled(lambda: torch.ones_like(x), bias)]


RULES: dict[Any, Callable[..., Rule]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    F.rms_norm: _rms_norm,
    F.layer_norm: _layer_norm,
    torch.mul: _product,
    Tensor.mul: _product,
    Tensor.add: _sum,
}
