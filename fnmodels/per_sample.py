"""Per-sample gradients at the price of a batch's: what `vmap(grad(loss))` computes, without torch.func.

The gradient of a linear layer's weight for one row is one term of a sum that the batch's gradient takes anyway. So one
ordinary backward pass over the whole batch, with that sum left out, gives them all: of each operation on a parameter
its input and the gradient of its output are enough (arXiv 1510.01799). What then costs most is fresh memory for B
numbers per parameter, which is what `out` is for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
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

    Parameters may be read by F.linear, F.embedding, F.rms_norm, F.layer_norm, and products and sums with activations,
    which have the rows in dimension 0; anything else raises NotImplementedError, and
    `torch.func.vmap(torch.func.grad(...))` over `fnmodels.rows` does it. The result is data and not part of a graph.
    """
    sizes = {tensor.shape[0] if tensor.ndim else 0 for tensor in tree.leaves(batch)}
    if len(sizes) != 1:
        raise ValueError(f"Every tensor of the batch must have the rows in dimension 0; the sizes are {sorted(sizes)}.")
    (rows,) = sizes
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
    recorder.check(loss)
    # Asked for are the first activations: every hook lies on the way there, and no weight's summed gradient is made.
    if recorder.first:
        torch.autograd.grad(loss, recorder.first, allow_unused=True)
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
        self.first: list[Tensor] = []
        self.written: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for arg in (*args, *kwargs.values()) for x in (arg if isinstance(arg, (list, tuple)) else [arg])]
        params = {id(x): self.paths[id(x)] for x in given if id(x) in self.paths}
        if not params or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func in (Tensor.to, Tensor.float) or (func is Tensor.add and not isinstance(args[1], Tensor)):
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
        if not any(isinstance(x, Tensor) and x.requires_grad and id(x) not in params for x in given):
            self.first.append(result)
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

    def check(self, loss: Tensor) -> None:
        """NotImplementedError if the graph reads a parameter in an operation that no mode sees: its share would miss.

        That is what an autograd.Function, or compiled code, does with its arguments.
        """
        waiting: list[Node] = [] if loss.grad_fn is None else [loss.grad_fn]
        met = set(waiting)
        while waiting:
            node = waiting.pop()
            for below, _ in node.next_functions:
                if below in self.guarded and node not in self.known:
                    raise NotImplementedError(
                        f"{self.guarded[below]!r} is read by an operation that cannot be seen ({node.name()}); "
                        f"{_INSTEAD}."
                    )
                if below is not None and below not in met:
                    met.add(below)
                    waiting.append(below)

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


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Rule:
    x = x.detach()

    def of_weight(rows: Tensor, slope: Tensor, keep: int) -> None:
        factors = _flat(slope).mT, _flat(x)
        if rows.dtype == slope.dtype:
            rows.baddbmm_(*factors, beta=keep)  # straight into place: a product first would go through memory twice
        else:
            _store(rows, torch.bmm(*factors), keep)

    def of_bias(rows: Tensor, slope: Tensor, keep: int) -> None:
        _store(rows, _flat(slope).sum(1), keep)

    return [(weight, of_weight)] if bias is None else [(weight, of_weight), (bias, of_bias)]


def _embedding(tokens: Tensor, table: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> Rule:
    if padding_idx is not None or any(args) or any(v for k, v in kwargs.items() if k != "norm_type"):
        return []

    def write(rows: Tensor, slope: Tensor, keep: int) -> None:
        if not keep:
            rows.zero_()
        first = torch.arange(rows.shape[0], device=tokens.device) * rows.shape[1]
        index = (tokens.flatten(1) + first[:, None]).flatten()
        rows.flatten(0, 1).index_add_(0, index, slope.reshape(-1, slope.shape[-1]).to(rows.dtype))

    return [(table, write)]


def _scaled(make: Callable[[], Tensor], weight: Tensor) -> Rule:
    """Of make() * weight, with weight in the last dimensions."""

    def write(rows: Tensor, slope: Tensor, keep: int) -> None:
        product = slope * make()
        between = range(1, product.ndim - weight.ndim)
        _store(rows, product.flatten(1, between[-1]).sum(1) if between else product, keep)

    return [(weight, write)]


def _product(x: Tensor, y: Tensor) -> Rule:
    x, y = (x, y) if x.ndim >= y.ndim else (y, x)
    fits = 0 < y.ndim < x.ndim and y.shape == x.shape[-y.ndim :]
    return _scaled(x.detach, y) if fits else []


def _sum(x: Tensor, y: Tensor, *, alpha: float = 1) -> Rule:
    x, y = (x, y) if x.ndim >= y.ndim else (y, x)
    fits = alpha == 1 and 0 < y.ndim < x.ndim and y.shape == x.shape[-y.ndim :]
    return _scaled(lambda: torch.ones_like(x), y) if fits else []


def _rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float | None = None) -> Rule:
    x = x.detach()
    return _scaled(lambda: F.rms_norm(x, shape, None, eps), weight)


def _layer_norm(x: Tensor, shape: Any, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Rule:
    x = x.detach()
    rule = _scaled(lambda: F.layer_norm(x, shape, None, None, eps), weight)
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
