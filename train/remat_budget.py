"""remat="budget:2GiB": which layers recompute, and what, so that kept activations fit and the least time is lost.

A block is measured once per kind and shape of its input: the bytes that its backward pass keeps, and the time that
recomputing costs. The first forward pass counts the layers and recomputes all; from the second on each layer is run as
the plan says. All plans have the same bits, so that the times, which differ between runs, change no result.
"""

import functools
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fnmodels import tree
from fnmodels.ops.torch_internals import costly_operators
from fnmodels.options import Block

UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
FORM = re.compile(r"budget:([0-9]{1,15})(|KiB|MiB|GiB)")


def budget_of(remat: str) -> int | None:
    """The bytes of "budget:2GiB" (KiB, MiB, GiB or none); None for another text."""
    found = FORM.fullmatch(remat) if isinstance(remat, str) else None
    return int(found[1]) * UNITS[found[2]] if found else None


@dataclass(frozen=True)
class Cost:
    """Cost of one call of a block: {way: bytes kept until the backward pass}, {way: seconds of recomputing there}."""

    kept: dict[str, int]
    seconds: dict[str, float]


def plan(calls: Sequence[Cost], budget: int) -> list[str]:
    """The way of each call: within the budget of bytes, beginning with "full", what saves most time per byte first.

    ValueError where even "full" needs more.
    """
    ways = ["full"] * len(calls)
    left = budget - sum(cost.kept["full"] for cost in calls)
    if left < 0:
        raise ValueError(
            f"remat's budget is {shown(budget)}, but the inputs of the {len(calls)} layers alone are "
            f"{shown(budget - left)}: give more, or smaller microbatches."
        )
    while True:
        better: list[tuple[float, int, str, int]] = []
        for i, (cost, now) in enumerate(zip(calls, ways, strict=True)):
            for way, seconds in cost.seconds.items():
                saved, more = cost.seconds[now] - seconds, cost.kept[way] - cost.kept[now]
                if saved > 0 and more <= left:
                    better.append((saved / max(more, 1), -i, way, more))
        if not better:
            return ways
        _, index, way, more = max(better)
        ways[-index], left = way, left - more


def shown(size: int) -> str:
    """Bytes for a reader: "1.5 GiB"."""
    unit = next(name for name, one in reversed(UNITS.items()) if size >= one or one == 1)
    return f"{size / UNITS[unit]:.3g} {unit or 'bytes'}"


@dataclass
class _Pass:
    """One forward pass: the wrappers that it made, and the keys of its calls in order."""

    wrapped: set[Any] = field(default_factory=set)
    calls: list[Any] = field(default_factory=list)
    ways: list[str] = field(default_factory=list)


def within(budget: int, key_of: Callable[[Block], Any], ways: dict[str, Callable[[Block], Block]]) -> Any:
    """The `layer_fn` of a budget. key_of: equal for equal blocks. ways: {name: block -> block}, "none" and "full" among
    them; the plan chooses one per call."""
    costs: dict[Any, Cost] = {}
    plans: dict[tuple[Any, ...], list[str]] = {}
    last: dict[Any, tuple[Any, ...]] = {}  # the calls of the last pass that began with this one
    now = _Pass()

    def wrap(block: Block) -> Block:
        nonlocal now
        name = key_of(block)
        if name in now.wrapped:  # one wrapper per kind and pass: another pass begins
            if now.calls:
                last[now.calls[0]] = tuple(now.calls)
            now = _Pass()
        now.wrapped.add(name)
        made = {way: how(block) for way, how in ways.items()}

        def run(*args: Any, **more: Any) -> Any:
            if not torch.is_grad_enabled():
                return block(*args, **more)
            key = name, args[1].shape, args[1].dtype
            if key not in costs:
                costs[key] = measured(block, args, more, tuple(ways))
            if not now.calls and key in last:
                calls = last[key]
                if calls not in plans:
                    plans[calls] = plan([costs[call] for call in calls], budget)
                now.ways = plans[calls]
            index = len(now.calls)
            now.calls.append(key)
            return made[now.ways[index] if index < len(now.ways) else "full"](*args, **more)

        return run

    return wrap


def measured(block: Block, args: tuple[Any, ...], more: dict[str, Any], ways: Sequence[str]) -> Cost:
    """The cost of the block on these arguments, from runs of its own; its first one may compile."""
    given = {t.untyped_storage().data_ptr() for t in tree.leaves((args, more)) if isinstance(t, Tensor)}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = args[1].detach().requires_grad_()
    again = functools.partial(block, args[0], x, *args[2:], **more)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        again()
    seconds = min(_timed(again, x) for _ in range(2))
    kept = {"none": x.nbytes + sum(held.values()), "full": x.nbytes}
    lost = {"none": 0.0, "full": seconds}
    if "selective" in ways:
        outputs, spent = _costly(again, x)
        kept["selective"] = x.nbytes + outputs
        lost["selective"] = max(seconds - spent, 0.0)
    return Cost(kept, lost)


def _costly(again: Callable[[], Any], x: Tensor) -> tuple[int, float]:
    """(bytes of what the costly operators of one run return, seconds that they take)."""
    costly, total, spent = set(costly_operators()), 0, 0.0

    def policy(_: Any, operator: Any, *args: Any, **more: Any) -> CheckpointPolicy:
        nonlocal total, spent
        if operator in costly:
            out: list[Any] = []
            spent += min(_timed(lambda: out.append(operator(*args, **more)), x) for _ in range(2))
            total += sum(t.nbytes for t in tree.leaves(out[-1]) if isinstance(t, Tensor))
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    checkpoint(again, use_reentrant=False, context_fn=contexts)
    return total, spent


def _timed(run: Callable[[], Any], x: Tensor) -> float:
    begin = time.perf_counter()
    run()
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - begin
