"""Wrappers for rematerialization (recomputing activations in the backward pass) and compilation.

Nothing is patched: a wrapper is the argument `layer_fn` of the forward pass.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fnmodels.ops.remat import generators_held, refusing_draws, remat
from fnmodels.ops.torch_compilation import full_graph
from fnmodels.ops.torch_internals import costly_operators, transformed
from fnmodels.options import Block, LayerFn

from .remat_budget import budget_of, within


def layer_fn(remat: str, compile: str) -> LayerFn | None:
    """The wrapper around each kind's block, arguments as in `make_step`; None if there is nothing to wrap."""
    if (budget := budget_of(remat)) is not None:
        return _within(budget, compile)
    kind, _, number = remat.partition(":") if isinstance(remat, str) else ("", "", "")
    counts = kind == "every" and number.isascii() and number.isdecimal()
    if remat not in ("none", "full", "selective") and not counts:
        raise ValueError(
            f'remat is {remat!r}; it must be "none", "full", "selective", "every:N" with a number N, or "budget:SIZE" '
            'with a size such as "2GiB".'
        )
    every = int(number) if number else 1
    if every < 1:
        raise ValueError(f"remat is {remat!r}; N must be at least 1.")
    if remat == "none" and compile != "block":
        return None
    graphs = functools.partial(_selective, graph=True)
    compiled = _compile_once(graphs if remat == "selective" else lambda block: block)

    def wrap(block: Block) -> Block:
        if compile == "block":
            block = compiled(block)
        elif remat == "selective":
            block = _selective(block)
        return _every(block, every) if remat == "full" or kind == "every" else block

    return wrap


def _within(budget: int, compile: str) -> LayerFn:
    """The wrapper of a budget; a compiled block is kept or recomputed whole, since its operators are not seen."""
    compiled = _compile_once(lambda block: block) if compile == "block" else None
    ways: dict[str, Callable[[Block], Block]] = {"none": lambda block: block, "full": lambda block: _every(block, 1)}
    wrap = within(budget, _key, ways if compiled else ways | {"selective": _selective})
    return wrap if compiled is None else lambda block: wrap(compiled(block))


def _every(block: Block, every: int) -> Block:
    """Checkpoints every Nth call of one forward: `layer_fn` is called once per forward, and layers run in order."""
    calls: Counter[str] = Counter()
    checkpointed = _checkpointed(block)

    def recomputed(*args: Any, **more: Any) -> Any:
        calls["made"] += 1
        if calls["made"] % every:
            return block(*args, **more)
        if transformed():  # where torch's checkpoint raises
            return remat(block)(*args, **more)
        return checkpointed(*args, **more)

    return recomputed


def _checkpointed(block: Block, **options: Any) -> Block:
    """torch's checkpoint, which replays the draws of torch's default generators.

    Draws of others, such as a generator that an edit holds, raise ValueError.
    """
    replayed = functools.partial(checkpoint, block, use_reentrant=False, **options)
    held = [] if torch.compiler.is_compiling() else generators_held(block)
    if not held:
        return replayed

    def recomputed(*args: Any, **more: Any) -> Any:
        with refusing_draws(held):
            return replayed(*args, **more)

    return recomputed


def _selective(block: Block, *, graph: bool = False) -> Block:
    """Keeps what is expensive, the results of matmuls and attention; recomputes norms, rotary and activations.

    graph: the block will be compiled, and then large products are an operator of ours (`fnmodels.ops.linear`).
    """
    saved = costly_operators()
    if graph:
        import fnmodels.ops.cpu.linear_op  # noqa: F401 - the operator; it imports dynamo

        saved.append(torch.ops.fnmodels.linear.default)
    checkpointed = _checkpointed(block, context_fn=functools.partial(create_selective_checkpoint_contexts, saved))

    def kept(*args: Any, **more: Any) -> Any:
        if transformed():
            raise NotImplementedError(
                'remat="selective" does not go through torch.func\'s transforms: "full", "every:N" and '
                "layer_fn=fnmodels.remat do."
            )
        return checkpointed(*args, **more)

    return kept


def _compile_once(wrap: Callable[[Block], Block]) -> LayerFn:
    """torch.compile of a block, made once for equal blocks.

    Every forward binds new blocks (functools.partial of the family's block with config, kind and kernel), and
    torch.compile of each would start over; the bound values are hashable, so equal blocks share one.
    """
    made: dict[Any, Block] = {}

    def compiled(block: Block) -> Block:
        key = _key(block)
        if key not in made:
            made[key] = full_graph(wrap(block))
        return made[key]

    return compiled


def _key(block: Block) -> Any:
    """Equal for equal blocks: functools.partial compares by identity."""
    if not isinstance(block, functools.partial):
        return block
    return (block.func, block.args, tuple(sorted(block.keywords.items(), key=lambda item: item[0])))
