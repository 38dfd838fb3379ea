"""The cost of taps and edits where none are given: the same calls with them taken out of the code.

The contenders run the block that the family wrote with a context whose `tap` does nothing, in a plain loop over the
layers; "fnmodels" are the public functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from research_setting import Contenders, Setting, summed
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.cache import step
from fnmodels.models.common.context import Context
from fnmodels.stack import loop as layer_loop

REPEATS = 4  # calls of one measurement


class _Bare(Context):
    """A context without taps and edits."""

    def tap(self, name: str, value: Tensor) -> Tensor:
        return value

    @property
    def shown(self) -> Any:
        return _unchanged

    def wants(self, name: str) -> bool:
        return False

    def wants_any(self, names: tuple[str, ...]) -> bool:
        return False

    def norms(self, layer: Any) -> Any:
        return contextlib.nullcontext()

    def _tapped(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q, k, v


def _unchanged(name: str, value: Tensor) -> Tensor:
    return value


def _first(tap: str, x: Tensor, edits: Any) -> Tensor:
    return x


def _bare(run: Callable[..., list[Tensor]]) -> list[Tensor]:
    """`run` with what the loop over layers and the ends do for taps and edits taken out too."""
    with (
        mock.patch.object(layer_loop, "_around", _first),
        mock.patch.object(layer_loop, "missed", return_value=[]),
        mock.patch.object(fnmodels.apply, "edit_end", lambda edits, name, value: value),
    ):
        return run(context=_Bare)


def _repeated(call: Callable[..., Any]) -> Contenders:
    def run(**more: Any) -> list[Tensor]:
        return [call(**more) for _ in range(REPEATS)][-1:]

    return {"fnmodels": run, "without taps and edits": lambda: _bare(run)}


def forward(at: Setting) -> Contenders:
    @torch.no_grad()
    def call(**more: Any) -> Tensor:
        logits: Tensor = fnmodels.forward(at.params, *at.prepared, config=at.config, **more)
        return logits

    return _repeated(call)


def gradient(at: Setting) -> Contenders:
    """A loss and the gradients of all parameters."""
    leaves = tree.leaves(at.params)

    def call(**more: Any) -> Tensor:
        for leaf in leaves:
            leaf.requires_grad_()
        loss = summed(fnmodels.forward(at.params, *at.prepared, config=at.config, **more), at.labels)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, leaves)])

    return _repeated(call)


def decode(at: Setting) -> Contenders:
    """One new token of one row on a cache of 64."""
    fresh = fnmodels.init_cache(at.config, batch=1, capacity=66)
    how = {"config": at.config}
    given = fnmodels.prepare_step(at.config, at.tokens[:1, :64], fresh)
    _, cache = fnmodels.prefill(at.params, *given, fresh, **how)
    one = fnmodels.prepare_step(at.config, at.tokens[:1, :1], cache)

    @torch.no_grad()
    def call(**more: Any) -> Tensor:
        logits: Tensor = step.decode(at.params, *one, cache, **how, **more)[0]
        return logits

    return _repeated(call)
