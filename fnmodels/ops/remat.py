"""`remat`: blocks that are computed again in the backward pass, under every transform of torch.func."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fnmodels import tree
from fnmodels.options import Block
from fnmodels.tree import Tree

from .torch_internals import undisturbed

_TENSOR = object()  # stands for a tensor in the structure of a block's results
_OTHERS = sys.stdlib_module_names | {"torch", "numpy"}  # packages whose objects hold no tensors of the caller
_PACKAGES = _OTHERS | {"fnmodels", "params", "train"}  # and whose modules hold none
_REGISTERED = ("_parameters", "_buffers", "_modules")  # of torch modules
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
            trees. Tensors in a functools.partial are arguments as well.

    Returns:
        The wrapped block, which computes the same bits. Its call raises ValueError where the block, or a function of
        `edits`, holds a tensor whose gradient may be asked for: of a variable of an outer function or of the module, a
        default, or an attribute. It raises ValueError too where the block draws from a generator of torch, since its
        recomputation would draw other numbers; those of numpy and of Python are not seen.
    """
    function, bound = _unbound(block)

    def recomputed(*args: Any, **tensors: Any) -> tuple[Tensor, dict[str, Any]]:
        if torch.compiler.is_compiling():
            from .torch_internals import transforms  # here, for making it imports dynamo

            return block(*args, **tensors) if transforms() else checkpoint(block, *args, use_reentrant=False, **tensors)
        held = _refuse_held(function)  # in every call, since what its variables hold may change
        arguments = ((*bound[0], *args), bound[1] | tensors)
        results: list[Tree] = []

        def flat(*leaves: Tensor) -> tuple[Tensor, ...]:
            called, keywords = filled(given_structure, leaves)
            result = function(*called, **keywords)
            results[:] = [structure(result)]
            return tensors_of(result)

        given_structure, leaves = structure(arguments), tensors_of(arguments)
        drawn_from = (*held, *generators_in(arguments), *_default_generators(leaves))
        with refusing_draws(drawn_from):
            outputs = _Recomputed.apply(flat, *leaves)
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


def _unbound(block: Block) -> tuple[Callable[..., Any], tuple[tuple[Any, ...], dict[str, Any]]]:
    """(a function, the arguments and keywords of its partial), if there are tensors among these; else (block, none)."""
    if isinstance(block, functools.partial) and tensors_of((block.args, block.keywords)):
        return block.func, (block.args, dict(block.keywords))
    return block, ((), {})


def generators_in(values: Tree) -> list[torch.Generator]:
    """The leaves that are generators."""
    return [leaf for leaf in tree.leaves(values) if isinstance(leaf, torch.Generator)]


def generators_held(block: Callable[..., Any]) -> list[torch.Generator]:
    """The generators that a block, and functions of its edits, hold as `remat` looks for tensors."""
    functions = (block, *(edit.function for edit in _edits(block)))
    held = (value for each in functions for _, value in _held(each, "", set()))
    return [value for value in held if isinstance(value, torch.Generator)]


def _default_generators(tensors: tuple[Tensor, ...]) -> list[torch.Generator]:
    """Those of the CPU and of the tensors' GPUs, of which operations without a generator draw."""
    gpus = {tensor.device.index for tensor in tensors if tensor.is_cuda}
    return [torch.default_generator, *(torch.cuda.default_generators[index] for index in gpus)]


@contextlib.contextmanager
def refusing_draws(generators: Iterable[torch.Generator]) -> Iterator[None]:
    """ValueError after it where one of the generators has another state than before.

    Not while a CUDA graph is captured, where states cannot be read; the runs before the capture have been checked.
    """
    read = () if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing() else tuple(generators)
    before = [generator.get_state() for generator in read]
    yield
    for generator, state in zip(read, before, strict=True):
        if not undisturbed(torch.equal, generator.get_state(), state):
            raise ValueError(
                "The function of remat draws random numbers, and its recomputation would draw others, of which wrong "
                "gradients follow: pass the numbers as an argument, or drop out by keys of noise (`rng` of "
                "fnmodels.prepare)."
            )


def _held(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor | torch.Generator]]:
    """(name of the variable that holds it, else of an attribute; tensor or generator) of all that a function or an
    object reaches.

    Objects of torch and of the standard library hold no tensors of the caller, modules of torch aside.
    """
    if isinstance(value, (str, int, float, type, types.ModuleType, type(None))) or id(value) in seen:
        return
    seen.add(id(value))
    inside: Iterable[tuple[str, Any]] = ()
    if isinstance(value, (Tensor, torch.Generator)):
        yield name, value
    elif isinstance(value, dict):
        inside = ((name, entry) for entry in value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = ((name, entry) for entry in value)
    elif isinstance(value, functools.partial):
        inside = ((name, entry) for entry in (value.func, value.args, value.keywords))
    elif inspect.ismethod(value):
        inside = ((name, value.__func__), ("self", value.__self__))
    elif inspect.isfunction(value):
        inside = _variables(value)
    elif isinstance(value, torch.nn.Module):
        registered = (*value.named_parameters(), *value.named_buffers())
        plain = (entry for module in value.modules() for entry in vars(module).items() if entry[0] not in _REGISTERED)
        inside = ((name or each, entry) for each, entry in (*registered, *plain))
    elif type(value).__module__.partition(".")[0] not in _OTHERS:
        slots = [each for kind in type(value).__mro__ for each in getattr(kind, "__slots__", ())]
        fields = {each: getattr(value, each, None) for each in slots} | getattr(value, "__dict__", {})
        inside = ((name or each, entry) for each, entry in fields.items())
    for each, entry in inside:
        yield from _held(entry, each, seen)


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """(name, value) of the variables of outer functions and of the module that it reads, and defaults."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            yield name, cell.cell_contents
    if (function.__module__ or "").partition(".")[0] not in _PACKAGES:
        yield from ((name, function.__globals__.get(name)) for name in _globals(function.__code__))
    code, defaults = function.__code__, function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    yield from zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _globals(code: types.CodeType) -> Iterator[str]:
    """The names of variables of the module that a function and the functions inside of it read."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals(constant)


def _refuse_held(block: Callable[..., Any]) -> list[torch.Generator]:
    """The generators that a block and its edits hold.

    ValueError for a tensor of which a gradient may be taken, or which a vmap maps, since its gradient would be lost.
    """
    generators: list[torch.Generator] = []
    for edit in _edits(block):
        for name, value in _held(edit.function, "", set()):
            if isinstance(value, torch.Generator):
                generators.append(value)
            elif _is_differentiated(value):
                raise ValueError(
                    f"The edit of {edit.name!r} closes over the tensor {name!r}, whose gradient remat would lose: pass "
                    f"functools.partial(function, {name}={name}) with a function (value, name, {name})."
                )
    for name, value in _held(block, "", set()):
        if isinstance(value, torch.Generator):
            generators.append(value)
        elif _is_differentiated(value):
            raise ValueError(
                f"The function of remat closes over the tensor {name!r}, whose gradient would be lost: pass the tensor "
                "as an argument."
            )
    return generators


def _edits(block: Callable[..., Any]) -> Iterable[Any]:
    return block.keywords.get("edits", ()) if isinstance(block, functools.partial) else ()


def _is_differentiated(tensor: Tensor) -> bool:
    """Whether a gradient may be taken of it, or a vmap maps it."""
    return tensor.requires_grad or torch.func.debug_unwrap(tensor) is not tensor
