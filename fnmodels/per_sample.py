"""Per-sample gradients at the cost of one batched backward pass: the result of `vmap(grad(loss))` without torch.func.

The gradient of a linear layer's weight for one row is one term of the sum that is the batch's gradient. So one ordinary
backward pass over the full batch, without that sum, gives all of them: each operation on a parameter needs only its
input and the gradient of its output (arXiv 1510.01799). The largest remaining cost is allocating B elements per
parameter, which `out` avoids.
"""

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
from .ops.cpu.linear import gains_alone, uses_onednn
from .ops.cpu.onednn import product
from .ops.linear import linear
from .tree import Tree

# (per-row gradients [B, *shape] of a parameter, gradient of the operation's output, 0 to overwrite or 1 to accumulate)
Write = Callable[[Tensor, Tensor, int], None]
LeafWrites = list[tuple[Tensor, Write]]


def per_sample_gradients(
    loss_fn: Callable[[Tree, Tree], Tensor], params: Tree, batch: Tree, *, out: Tree | None = None
) -> tuple[Tree, Tensor]:
    """The gradient of every row's loss in one pass, such as for differential privacy.

    For adapters alone (DP-LoRA), params are `params.lora.adapters(...)` and the loss attaches them to the weights.

    Parameters may be read by F.linear, F.embedding, F.rms_norm, F.layer_norm, and products, sums and differences with
    activations, and so may exp, negatives, unflattened forms, slices and concatenations of parameters; any other
    operation raises NotImplementedError (use `torch.func.vmap(torch.func.grad(...))` over `fnmodels.rows`). Attention
    sinks therefore need kernel="math". Activations there must have the rows in dimension 0. Only its size can be
    checked: a size other than B raises too. Another dimension that happens to be B is taken for the rows and silently
    gives wrong gradients: time-major activations of B tokens, or a table of B entries that belongs to no row.

    Args:
        loss_fn: (params, batch) -> 0-d tensor, the SUM of the rows' losses, each of which depends on its row alone. It
            sees the full batch, so every kernel works and a `layout` is that of the batch.
        params: The tree of parameters.
        batch: A tree of tensors [B, ...].
        out: An earlier result to overwrite; None: new memory of B elements per parameter is allocated and cleared.

    Returns:
        Gradients [B, *shape] for every parameter, where entry b is that of row b's loss, and the loss, 0-d; both
        detached.

    Raises:
        ValueError: A tensor of the batch has other rows, or the loss is no single number or does not depend on the
            parameters.
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
    edges = recorder.deepest_edges(loss)
    if edges and rows:
        torch.autograd.grad(loss, edges)  # runs the hooks
        recorder.write_forms()
    for path, buffer in recorder.buffers.items():
        if path not in recorder.written:
            buffer.zero_()
    return out, loss.detach()


_ALTERNATIVE = "torch.func.vmap(torch.func.grad(loss)) over fnmodels.rows(batch) differentiates everything"


class _Recorder(TorchFunctionMode):
    """Intercepts the operations of the forward pass and adds gradient-writing hooks to those that read a parameter."""

    def __init__(self, flat: dict[str, Tensor], buffers: dict[str, Tensor], rows: int) -> None:
        super().__init__()
        self.paths = {id(leaf): path for path, leaf in flat.items()}
        self.guarded = {
            get_gradient_edge(leaf).node: path for path, leaf in flat.items()
        }  # their gradient accumulators
        self.known: set[Node] = set()  # nodes of intercepted operations, which may lead there
        self.derived: list[Tensor] = []  # parameters after a cast or `1 + weight`; kept alive so that ids stay unique
        self.buffers, self.rows = buffers, rows
        self.leaves = flat
        self.forms: dict[str, tuple[Tensor, set[str]]] = {}  # {own name: (a function of parameters alone, their paths)}
        self.hooked: dict[Node, GradientEdge] = {}
        self.written: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        nodes = [kind for kind in types if not issubclass(kind, Tensor)]
        if nodes:  # as of params.lora: what it is made of is seen
            with self:
                return nodes[0].__torch_function__(func, types, args, kwargs)
        inputs = [x for arg in (*args, *kwargs.values()) for x in (arg if isinstance(arg, (list, tuple)) else [arg])]
        params = {id(x): self.paths[id(x)] for x in inputs if id(x) in self.paths}
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if not params:
            return (_frozen_linear if func is F.linear else func)(*args, **kwargs)
        if func in (Tensor.to, Tensor.float) or (func is Tensor.add and not isinstance(args[-1], Tensor)):
            return self._derived(func(*args, **kwargs), *params.values())
        if func in FORMS and all(id(x) in params for x in inputs if isinstance(x, Tensor)):
            return self._form(func(*args, **kwargs), set(params.values()))
        rule = RULES[func](*args, **kwargs) if func in RULES else []
        if {id(param) for param, _ in rule} != params.keys():
            result = func(*args, **kwargs)
            outputs = result if isinstance(result, (list, tuple)) else [result]
            if id(result) in self.paths or not any(isinstance(x, Tensor) and x.requires_grad for x in outputs):
                return result
            raise NotImplementedError(
                f"{resolve_name(func)} reads the parameters {list(params.values())}; {_ALTERNATIVE}."
            )
        run = _hooked_linear if func is F.linear else func
        result = run(*map(self._mark, args), **{name: self._mark(x) for name, x in kwargs.items()})
        if result.shape[0] != self.rows:
            raise NotImplementedError(
                f"{resolve_name(func)} with {list(params.values())} gives {list(result.shape)}, which does not have "
                f"the {self.rows} rows in dimension 0; {_ALTERNATIVE}."
            )
        edge = get_gradient_edge(result)  # not the tensor, which may be overwritten and need not be kept alive
        self.hooked[edge.node] = edge
        for param, write in rule:
            self._add_hook(result, params[id(param)], write)
        return result

    def _derived(self, result: Tensor, path: str) -> Tensor:
        """Register `result` as a form of the parameter `path`: later reads of it count as reads of the parameter."""
        if id(result) not in self.paths and result.grad_fn is not None:
            self.paths[id(result)] = self.guarded[result.grad_fn] = path
            self.derived.append(result)
            self.known.add(result.grad_fn)
        return result

    def _form(self, result: Tensor, of: set[str]) -> Tensor:
        """Registers `result`, a function of the parameters and forms `of` alone, as a parameter of its own."""
        paths = {path for name in of for path in (self.forms[name][1] if name in self.forms else (name,))}
        name = f"{' and '.join(sorted(paths))} ({len(self.forms)})"
        self.forms[name] = result, paths
        return self._derived(result, name)

    def write_forms(self) -> None:
        """Adds the gradients of forms to those of their parameters, by a backward pass through each form."""
        for name in self.forms.keys() & self.written:
            form, paths = self.forms[name]
            leaves, written = [self.leaves[path] for path in paths], self.buffers.pop(name)
            grads = torch.autograd.grad(form, leaves, written, retain_graph=True, is_grads_batched=True)
            for path, grad in zip(paths, grads, strict=True):
                _store(self.buffers[path], grad, int(path in self.written))
                self.written.add(path)

    def _mark(self, value: Any) -> Any:
        """A view of a parameter, whose node marks the read as intercepted; other values unchanged."""
        if id(value) not in self.paths:
            return value
        marked = value.view_as(value)
        self.known.add(marked.grad_fn)
        return marked

    def deepest_edges(self, loss: Tensor) -> list[GradientEdge]:
        """The edges of the hooked operations that have no other hooked operation below them in the graph.

        Differentiating with respect to them runs every hook, without the gradient of any parameter or of the caller's
        graph below. NotImplementedError if an operation that the mode cannot intercept (inside an autograd.Function or
        compiled code) reads a parameter, because its gradient would be missing.
        """
        below: dict[Node, list[Node]] = {}
        waiting: list[Node] = [] if loss.grad_fn is None else [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node in below:
                continue
            below[node] = []
            if node in self.guarded:  # below are parameters alone
                continue
            below[node] += [reached for reached, _ in node.next_functions if reached is not None]
            for reached in below[node]:
                if reached in self.guarded and node not in self.known:
                    raise NotImplementedError(
                        f"{self.guarded[reached]!r} is read by an operation that cannot be seen ({node.name()}); "
                        f"{_ALTERNATIVE}."
                    )
            waiting += below[node]
        found: list[GradientEdge] = []
        leading: set[Node] = set()  # nodes from which a hooked operation can be reached
        for node in TopologicalSorter(below).static_order():
            if leading.intersection(below[node]):
                leading.add(node)
            elif node in self.hooked:
                leading.add(node)
                found.append(self.hooked[node])
        return found

    def _add_hook(self, result: Tensor, path: str, write: Write) -> None:
        def hook(grad_output: Tensor) -> None:
            if path not in self.buffers:  # of a form
                form = self.forms[path][0]
                self.buffers[path] = form.new_empty(self.rows, *form.shape)
            write(self.buffers[path], grad_output, int(path in self.written))
            self.written.add(path)

        result.register_hook(hook)


def _flat(x: Tensor) -> Tensor:
    """[B, ..., D] -> [B, T, D]."""
    return x.reshape(x.shape[0], -1, x.shape[-1])


def _store(rows: Tensor, value: Tensor, accumulate: int) -> None:
    if accumulate:
        rows.add_(value)
    else:
        rows.copy_(value)


# The parameter names of the rules are torch's, because callers may pass them as keywords.


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> LeafWrites:
    x = input.detach()

    def write_weight(rows: Tensor, grad_output: Tensor, accumulate: int) -> None:
        factors = _flat(grad_output).mT, _flat(x)
        if gains_alone(factors[0][0], factors[1][0].t()):
            for row, left, right in zip(rows, *factors, strict=True):
                _store(row, product(left, right.t(), None), accumulate)
        elif rows.dtype == grad_output.dtype:
            rows.baddbmm_(*factors, beta=accumulate)  # in place: writing a product first would go through memory twice
        else:
            _store(rows, torch.bmm(*factors), accumulate)

    def write_bias(rows: Tensor, grad_output: Tensor, accumulate: int) -> None:
        _store(rows, _flat(grad_output).sum(1), accumulate)

    return [(weight, write_weight)] if bias is None else [(weight, write_weight), (bias, write_bias)]


def _frozen_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear by the library that is faster here, as the model calls it outside of the mode."""
    return linear(input, weight, bias)


def _hooked_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same of parameters whose gradients a hook writes: the backward pass must not sum them over the rows too.

    It would, by a custom Function. F.linear does not, and a checkpoint's second pass, outside of the mode, has to save
    what it saves here.
    """
    if input.requires_grad and uses_onednn(input, weight, bias):
        weight, bias = weight.detach(), None if bias is None else bias.detach()
    return linear(input, weight, bias)


def _embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> LeafWrites:
    if padding_idx is not None or any(args) or any(v for k, v in kwargs.items() if k != "norm_type"):
        return []

    def write(rows: Tensor, grad_output: Tensor, accumulate: int) -> None:
        if not accumulate:
            rows.zero_()
        first = torch.arange(rows.shape[0], device=input.device) * rows.shape[1]
        index = (input.flatten(1) + first[:, None]).flatten()
        rows.flatten(0, 1).index_add_(0, index, grad_output.reshape(-1, grad_output.shape[-1]).to(rows.dtype))

    return [(weight, write)]


def _scaled(make: Callable[[], Tensor], weight: Tensor) -> LeafWrites:
    """The rule of make() * weight, where weight has the last dimensions of the product, or 1 in place of some."""

    def write(rows: Tensor, grad_output: Tensor, accumulate: int) -> None:
        product = grad_output * make()
        between = range(1, product.ndim - weight.ndim)
        product = product.flatten(1, between[-1]).sum(1) if between else product
        ones = [dim for dim in range(1, product.ndim) if product.shape[dim] != rows.shape[dim]]
        _store(rows, product.sum(ones, keepdim=True) if ones else product, accumulate)

    return [(weight, write)]


def _operands(x: Any, y: Any) -> tuple[Tensor, Tensor] | None:
    """(activation, parameter) if the parameter broadcasts over the activation's first dimensions; else None."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return None
    x, y = (x, y) if x.ndim >= y.ndim else (y, x)
    fits = all(n == m or 1 in (n, m) for n, m in zip(y.shape, x.shape[x.ndim - y.ndim :], strict=True))
    return (x, y) if y.ndim < x.ndim and fits else None


def _product(input: Any, other: Any) -> LeafWrites:
    pair = _operands(input, other)
    return [] if pair is None else _scaled(pair[0].detach, pair[1])


def _sum(input: Any, other: Any, *, alpha: float = 1) -> LeafWrites:
    pair = _operands(input, other)
    return [] if pair is None or alpha != 1 else _scaled(functools.partial(torch.ones_like, pair[0]), pair[1])


def _difference(input: Any, other: Any, *, alpha: float = 1) -> LeafWrites:
    pair = _operands(input, other)
    sign = 1 if pair is not None and pair[1] is input else -1
    return [] if pair is None or alpha != 1 else _scaled(lambda: torch.full_like(pair[0], sign), pair[1])


def _product_added(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> LeafWrites:
    return _product(tensor1, tensor2) if value == 1 else []


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> LeafWrites:
    x = input.detach()
    return [] if weight is None else _scaled(lambda: F.rms_norm(x, normalized_shape, None, eps), weight)


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> LeafWrites:
    x = input.detach()
    rule = [] if weight is None else _scaled(lambda: F.layer_norm(x, normalized_shape, None, None, eps), weight)
    return rule if bias is None else [*rule, *_scaled(lambda: torch.ones_like(x), bias)]


RULES: dict[Any, Callable[..., LeafWrites]] = {
    F.linear: _linear,
    F.embedding: _embedding,
    F.rms_norm: _rms_norm,
    F.layer_norm: _layer_norm,
    torch.mul: _product,
    Tensor.mul: _product,
    Tensor.add: _sum,
    Tensor.sub: _difference,
    torch.addcmul: _product_added,
}
# Functions whose result, if it is of parameters alone, counts as a parameter.
FORMS = (Tensor.exp, Tensor.neg, Tensor.__getitem__, Tensor.unflatten, torch.cat, F.softplus)
