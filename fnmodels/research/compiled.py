"""Blocks compiled for second derivatives: one set of graphs per kind of layer, shared by all layers.

torch compiles no second derivative. So a block's gradient is a compiled function of its own, which runs the block again
and has an ordinary compiled backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.inputs.mask import MaskLike
from fnmodels.options import Block, ForwardOptions
from fnmodels.run_params import RunParams
from fnmodels.tree import Tree


@dataclass(frozen=True)
class CompiledBlocks:
    """A `fnmodels.run_params.Run` whose blocks are compiled with a backend of torch.compile, once per kind of layer."""

    backend: str
    made: dict[Any, Block] = field(default_factory=dict)
    stage = None

    def __call__(self, function: Callable[[Tree, Any], Tensor], params: Tree, batch: Any) -> Tensor:
        """function(params, batch) with compiled blocks. ValueError where it runs no blocks of these params."""
        value = function(RunParams(params, self), batch)
        if not self.made:
            raise ValueError(
                "compile= compiles the blocks that fnmodels.forward runs, and none ran: the function must pass on the "
                "params it is given, not a copy."
            )
        return value

    def prepare(
        self,
        config: Any,
        inputs: Tree,
        masks: Mapping[str, MaskLike],
        freqs_cis: Mapping[str, Tensor],
        options: ForwardOptions,
    ) -> tuple[Mapping[str, Tensor], ForwardOptions]:
        if options.layer_fn is not None:
            raise ValueError("compile= compiles the blocks itself: leave layer_fn out of the function.")
        return freqs_cis, replace(options, layer_fn=self._compiled)

    def _compiled(self, block: Block) -> Block:
        key: Any = block
        if isinstance(block, functools.partial):
            key = (block.func, block.args, tuple(sorted(block.keywords.items(), key=lambda item: item[0])))
        if key not in self.made:
            compiled = functools.partial(torch.compile, fullgraph=True, backend=self.backend)
            self.made[key] = functools.partial(_run, compiled(_outputs), compiled(_gradients), block)
        return self.made[key]


@dataclass(frozen=True)
class _Call:
    """A call of a block: a tree of the form of its arguments, and its leaves, None where they are differentiated."""

    block: Block
    form: Tree
    fixed: list[Any]


def _run(outputs: Callable[..., Any], gradients: Callable[..., Any], block: Block, *args: Any, **more: Any) -> Any:
    leaves = tree.leaves((args, more))
    moves = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
    fixed = [None if moving else leaf for leaf, moving in zip(leaves, moves, strict=True)]
    values = [leaf for leaf, moving in zip(leaves, moves, strict=True) if moving]
    found: list[Tree] = []  # the form of the outputs
    call = _Call(block, _form((args, more)), fixed)
    flat = iter(_Block.apply(outputs, gradients, call, found, *values))
    return tree.map(lambda _: next(flat), found[0])


def _form(given: Tree) -> Tree:
    return tree.map(lambda _: 0, given)


def _outputs(block: Block, form: Tree, fixed: list[Any], values: tuple[Tensor, ...]) -> tuple[list[Any], Tree]:
    """(leaves of the outputs, their form)."""
    given = iter(values)
    leaves = iter([next(given) if leaf is None else leaf for leaf in fixed])
    args, more = tree.map(lambda _: next(leaves), form)
    result = block(*args, **more)
    return tree.leaves(result), _form(result)


def _refuse(transform: str) -> NoReturn:
    raise NotImplementedError(f"Blocks compiled for curvature have no rule for {transform}: leave out compile=.")


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _gradients(
    block: Block, form: Tree, fixed: list[Any], values: tuple[Tensor, ...], grads: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The gradients of the values for those of the floating outputs."""

    def floating(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(x for x in _outputs(block, form, fixed, values)[0] if _is_floating(x))

    results: tuple[Tensor, ...] = torch.func.vjp(floating, *values)[1](grads)
    return results


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        outputs: Callable[..., Any], gradients: Callable[..., Any], call: _Call, found: list[Any], *values: Tensor
    ) -> tuple[Tensor, ...]:
        flat, form = outputs(call.block, call.form, call.fixed, values)
        found.append(form)
        return tuple(flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        _, ctx.gradients, ctx.call, _, *values = inputs
        ctx.save_for_backward(*values)
        ctx.floating = [_is_floating(x) for x in output]
        ctx.mark_non_differentiable(*(x for x in output if isinstance(x, Tensor) and not _is_floating(x)))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> NoReturn:
        _refuse("vmap")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        _refuse("forward-mode differentiation")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call, given = ctx.call, tuple(grad for grad, floats in zip(grads, ctx.floating, strict=True) if floats)
        results = ctx.gradients(call.block, call.form, call.fixed, ctx.saved_tensors, given)
        return (None, None, None, None, *results)
