"""`remat`: blocks that are computed again in the backward pass, under every transform of torch.func."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fnmodels import tree
from fnmodels.options import Block
from fnmodels.tree import Tree

_TENSOR = object()  # stands for a tensor in the structure of a block's results
Flat = Callable[..., tuple[Tensor, ...]]


def remat(block: Block) -> Block:
    """The block with its inputs saved in place of its activations, which the backward pass computes again (arXiv
    1604.06174).

        loss = functools.partial(train.next_token_loss, config=config, layer_fn=fnmodels.remat)
        torch.func.grad(lambda params: loss(params, batch)[0])(params)

    It is the counterpart of jax.checkpoint, and goes through grad, vmap, jvp and second derivatives. Inside of
    torch.compile it is torch's checkpoint, or the block as it is where a transform is traced too: what such a graph
    keeps is up to the compiler.

    Args:
        block: The block of a kind of layers, (layer, x, mask, freqs, **tensors) -> (x, aux), or another function of
            trees. Tensors that it reads of a global or an attribute, in place of receiving them, get no gradient.

    Returns:
        The wrapped block, which computes the same bits.

    Raises:
        ValueError: The block, or a function of `edits`, closes over a tensor whose gradient may be asked for.
    """

    if not torch.compiler.is_compiling():
        _refuse_closures(block)

    def recomputed(*args: Any, **tensors: Any) -> tuple[Tensor, dict[str, Any]]:
        if torch.compiler.is_compiling():
            from .torch_internals import transforms  # here, for making it imports dynamo

            return block(*args, **tensors) if transforms() else checkpoint(block, *args, use_reentrant=False, **tensors)
        arguments = (args, tensors)
        results: list[Tree] = []

        def flat(*leaves: Tensor) -> tuple[Tensor, ...]:
            called, keywords = filled(given_structure, leaves)
            result = block(*called, **keywords)
            results[:] = [structure(result)]
            return tensors_of(result)

        given_structure = structure(arguments)
        outputs = _Recomputed.apply(flat, *tensors_of(arguments))
        made: tuple[Tensor, dict[str, Any]] = filled(results[0], outputs)
        return made

    return recomputed


def tensors_of(values: Tree) -> tuple[Tensor, ...]:
    """The leaves that are tensors, in the order of the tree."""
    return tuple(leaf for leaf in tree.leaves(values) if isinstance(leaf, Tensor))


def structure(values: Tree) -> Tree:
    """The tree with a marker for each tensor, for `filled`."""
    return tree.map(lambda leaf: _TENSOR if isinstance(leaf, Tensor) else leaf, values)


def filled(marked: Tree, tensors: tuple[Tensor, ...]) -> Tree:
    """The inverse of `structure`."""
    values = iter(tensors)
    return tree.map(lambda leaf: next(values) if leaf is _TENSOR else leaf, marked)


class _Recomputed(torch.autograd.Function):
    """run(*tensors), whose derivatives are those of another call of it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(run: Flat, *tensors: Tensor) -> tuple[Tensor, ...]:
        return run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.run, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.floating = tuple(result.is_floating_point() for result in output)
        ctx.mark_non_differentiable(*(result for result in output if not result.is_floating_point()))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        needed = [i for i, t in enumerate(tensors) if t.is_floating_point() and ctx.needs_input_grad[i + 1]]
        results, pull, *_ = torch.func.vjp(_of(ctx.run, tensors, needed), *(tensors[i] for i in needed))
        of_results = [grad for grad, floating in zip(grads, ctx.floating, strict=True) if floating]
        cotangents = [torch.zeros_like(r) if g is None else g for r, g in zip(results, of_results, strict=True)]
        gradients = dict(zip(needed, pull(tuple(cotangents)), strict=True))
        return None, *(gradients.get(i) for i in range(len(tensors)))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        moved = [i for i, tangent in enumerate(tangents[1:]) if tangent is not None]
        primals, directions = tuple(tensors[i] for i in moved), tuple(tangents[i + 1] for i in moved)
        changes = iter(torch.func.jvp(_of(ctx.run, tensors, moved), primals, directions)[1])
        return tuple(next(changes) if floating else None for floating in ctx.floating)


def _of(run: Flat, tensors: tuple[Tensor, ...], indices: list[int]) -> Flat:
    """`run` as a function of these tensors alone, with the results that are floating."""

    def call(*some: Tensor) -> tuple[Tensor, ...]:
        chosen = dict(zip(indices, some, strict=True))
        results = run(*(chosen.get(i, tensor) for i, tensor in enumerate(tensors)))
        return tuple(result for result in results if result.is_floating_point())

    return call


def _closed_over(function: Any, depth: int = 3) -> Iterator[tuple[str, Tensor]]:
    """(name of the variable, tensor) of what a function, and the functions that it closes over, close over."""
    while isinstance(function, functools.partial):
        function = function.func
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
        if isinstance(value, (Tensor, dict, list, tuple)):
            yield from ((name, leaf) for leaf in tensors_of(value))
        elif depth and callable(value):
            yield from _closed_over(value, depth - 1)


def _may_have_gradient(tensor: Tensor) -> bool:
    return tensor.requires_grad or torch.func.debug_unwrap(tensor) is not tensor


def _refuse_closures(block: Callable[..., Any]) -> None:
    """ValueError for an edit that closes over a tensor of which a gradient may be taken, which would be lost."""
    for name, value in _closed_over(block):
        if _may_have_gradient(value):
            raise ValueError(
                f"The function of remat closes over the tensor {name!r}, whose gradient would be lost: pass the tensor "
                "as an argument."
            )
    edits = block.keywords.get("edits", ()) if isinstance(block, functools.partial) else ()
    for edit in edits:
        if not inspect.isfunction(edit.function):
            continue
        variables = inspect.getclosurevars(edit.function)
        for name, value in (*_closed_over(edit.function), *variables.globals.items()):
            if isinstance(value, Tensor) and _may_have_gradient(value):
                raise ValueError(
                    f"The edit of {edit.name!r} closes over the tensor {name!r}, whose gradient remat would lose: pass "
                    f"functools.partial(function, {name}={name}) with a function (value, name, {name})."
                )
