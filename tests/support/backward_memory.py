"""Measures the activation memory of a step: bytes of the distinct storages that autograd keeps for backward.

    with watched() as kept:
        state, _ = step(state, batch)
    kept.most                                   # the largest that "activations" and "gathered weights" ever were

Recomputed activations of remat and the outputs that torch's pipeline stages keep per microbatch are counted too. Not
counted are parameters, the tensors of `fnmodels.prepare`, and the receive buffers of stages.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

import fnmodels
from fnmodels import tree
from fnmodels.ops.moe import experts
from train.losses import lm_head
from train.parallel import expert, fsdp
from train.parallel.context import api as context


class Kept:
    """Peak bytes by kind (`most`), and the bytes of the receive buffers of this rank's stages (`buffers`)."""

    def __init__(self) -> None:
        self.most = Counter({"activations": 0, "gathered weights": 0})
        self.buffers = 0
        self._now: Counter[str] = Counter()
        self._references: Counter[int] = Counter()
        self._known: dict[int, Any] = {}  # storages that are no activations, by address

    def known(self, tensors: Iterable[Tensor]) -> None:
        """Excludes tensors from the count. Their storages are held, so that their addresses are not reused."""
        for tensor in tensors:
            self._known.setdefault(tensor.untyped_storage()._cdata, tensor.untyped_storage())

    def gathered(self, leaf: Tensor) -> None:
        """Counts a gathered weight until its storage is freed."""
        storage = leaf.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known[key] = None
            self._count("gathered weights", size)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        del self._known[key]
        self._count("gathered weights", -size)

    def refer(self, storage: Any) -> Callable[[], None]:
        """Counts a reference to a storage; the returned function removes it."""
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return lambda: None

        def add(references: int) -> None:
            before = self._references[key]
            self._references[key] += references
            self._count("activations", size * ((before + references > 0) - (before > 0)))

        add(1)
        return lambda: add(-1)

    def _count(self, kind: str, size: int) -> None:
        self._now[kind] += size
        self.most[kind] = max(self.most[kind], self._now[kind])


class _Reference:
    """A reference to a saved tensor, counted for as long as this object lives."""

    def __init__(self, kept: Kept, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.gone = kept.refer(tensor.untyped_storage())

    def __del__(self) -> None:
        self.gone()


class _Fused(torch.autograd.Function):
    """Saves for backward what a fused attention kernel on a GPU saves, and computes nothing."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        return q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_zeros(q.shape[:3], dtype=torch.float32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *saved, sinks = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*saved, *output)
        ctx.sinks = None if sinks is None else torch.zeros_like(sinks, device="meta")

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        sinks = None if ctx.sinks is None else torch.zeros_like(ctx.sinks, device=q.device)
        return *(torch.zeros_like(tensor) for tensor in (q, k, v)), sinks


def fused(q: Tensor, k: Tensor, v: Tensor, *_: Any, sinks: Tensor | None = None, **__: Any) -> Tensor:
    """A kernel for `fnmodels.forward`."""
    out: Tensor = _Fused.apply(q, k, v, sinks)[0]
    return out


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Simulates a GPU: expert counts are not read on the host, tokens are routed evenly, and cp uses `fused`."""

    def evenly(x: Tensor, weights: Tensor, indices: Tensor, valid: Tensor, number: int, weighted: bool) -> Any:
        even = (torch.arange(indices.numel()) % number).view_as(indices)
        return experts.sorted_rows(x, weights, even, valid, number, weighted)

    with (
        mock.patch.object(experts, "readable", return_value=False),
        mock.patch.object(expert, "sorted_rows", evenly),
        mock.patch.object(context, "attention", fused),
    ):
        yield


@contextlib.contextmanager
def watched(*given: Any) -> Iterator[Kept]:
    """Measures a step; `given`, its parameters and batch as plain tensors, are not counted."""
    kept = Kept()
    kept.known(tree.leaves(given))
    with contextlib.ExitStack() as stack:
        patch = lambda *what: stack.enter_context(mock.patch.object(*what))  # noqa: E731
        patch(fnmodels, "prepare", _prepared(kept, fnmodels.prepare))
        patch(fsdp, "gather", _gathered(kept, fsdp.gather))
        patch(lm_head._HeadLoss, "forward", _unwatched(lm_head._HeadLoss.forward))
        _watch_remat(kept, patch)
        _watch_stages(kept, patch)
        stack.enter_context(
            torch.autograd.graph.saved_tensors_hooks(lambda x: _Reference(kept, x), lambda saved: saved.tensor)
        )
        yield kept


def _prepared(kept: Kept, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **more: Any) -> Any:
        found = function(*args, **more)
        kept.known(tree.leaves(found))
        return found

    return run


def _gathered(kept: Kept, function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    @functools.wraps(function)
    def run(*args: Any) -> list[Tensor]:
        found = function(*args)
        for leaf in found:
            kept.gathered(leaf)
        return found

    return run


def _unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Excludes what the head's loss saves per chunk of tokens, which the next chunk replaces."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            return function(*args)

    return run


def _watch_remat(kept: Kept, patch: Callable[..., Any]) -> None:
    """Counts recomputed tensors until they are used; each has a `_Handle` of its own."""
    module: Any = torch.utils.checkpoint
    fresh: list[Any] = []

    class Handle:
        def __init__(self) -> None:
            fresh.append(self)

    class Hook(module._recomputation_hook):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            inner = self.pack_hook

            def pack(x: Tensor) -> Any:
                try:
                    return inner(x)
                finally:  # packing the last one raises an exception, which ends recomputation
                    if fresh:
                        fresh.pop().reference = _Reference(kept, x)

            self.pack_hook = pack

    patch(module, "_Handle", Handle)
    patch(module, "_recomputation_hook", Hook)


def _watch_stages(kept: Kept, patch: Callable[..., Any]) -> None:
    outputs: dict[tuple[int, int], Any] = {}
    buffers: dict[int, int] = {}
    forward, back = PipelineStage.forward_one_chunk, PipelineStage.backward_one_chunk
    weights, receive = PipelineStage.backward_weight_one_chunk, PipelineStage._retrieve_recv_activations

    def forward_one_chunk(self: Any, part: int, *args: Any, **more: Any) -> Any:
        out = forward(self, part, *args, **more)
        received = [
            info.buffer for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()) for info in infos
        ]
        buffers[self.stage_index] = sum(x.untyped_storage().nbytes() for x in received if x is not None)
        kept.buffers = sum(buffers.values())
        if not self.is_last:
            outputs[self.stage_index, part] = _Reference(kept, out)
        return out

    def backward_one_chunk(self: Any, part: int, *args: Any, full_backward: bool = True, **more: Any) -> Any:
        back(self, part, *args, full_backward=full_backward, **more)
        if full_backward:
            outputs.pop((self.stage_index, part), None)

    def backward_weight_one_chunk(self: Any, part: int, *args: Any, **more: Any) -> Any:
        weights(self, part, *args, **more)
        outputs.pop((self.stage_index, part), None)

    def retrieve(self: Any, part: int) -> Any:
        received = receive(self, part)
        kept.known(received)
        return received

    patch(PipelineStage, "forward_one_chunk", forward_one_chunk)
    patch(PipelineStage, "backward_one_chunk", backward_one_chunk)
    patch(PipelineStage, "backward_weight_one_chunk", backward_weight_one_chunk)
    patch(PipelineStage, "_retrieve_recv_activations", retrieve)
