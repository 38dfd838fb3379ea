"""Activation patching, causal tracing (arXiv 2202.05262), attribution patching (Nanda 2023) and path patching.

A metric is a function of logits [B, S, V] that returns a scalar. The clean and the corrupt batch have equal shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fnmodels.apply import forward
from fnmodels.models.common.registry import DecoderConfig
from fnmodels.options import Edit
from fnmodels.taps import tap_names
from fnmodels.tree import Tree

from .common import Prepared, along_sequence, differentiable, names_of

Metric = Callable[[Tensor], Tensor]


def patch_grid(
    params: Tree,
    clean: Prepared,
    corrupt: Prepared,
    metric: Metric,
    *,
    config: DecoderConfig,
    tap: str = "output",
    edits: Mapping[str, Edit] | None = None,
    chunk: int | None = None,
) -> Tensor:
    """[layers with the tap, S]: the metric of the corrupt run where the clean value of `tap` replaces one position's.

    tap: a name within a layer with the sequence in dimension 1. edits: further ones of the corrupt run. chunk: cells
    that run at a time under vmap; None: all. Runs kernel="math".
    """
    names = names_of(config, tap)
    with torch.no_grad():
        _, values = forward(params, *clean, config=config, kernel="math", taps=tuple(names))
    length = values[names[0]].shape[1]

    def cell(chosen: Tensor) -> Tensor:  # bool [layers, S], True in one place
        patches = {
            name: functools.partial(_put, chosen=row, value_there=values[name])
            for name, row in zip(names, chosen, strict=True)
        }
        return metric(forward(params, *corrupt, config=config, kernel="math", edits={**(edits or {}), **patches}))

    cells = torch.eye(len(names) * length, dtype=torch.bool, device=values[names[0]].device)
    grid = torch.func.vmap(cell, chunk_size=chunk)(cells.view(-1, len(names), length))
    return grid.view(len(names), length)


def causal_trace(
    params: Tree,
    prepared: Prepared,
    noise: Tensor,
    metric: Metric,
    *,
    config: DecoderConfig,
    tap: str = "output",
    chunk: int | None = None,
) -> Tensor:
    """`patch_grid` whose corrupt run is the same batch with `noise` [B, S, D] added to the embeddings.

    The paper adds Gaussian noise of three standard deviations of the embeddings at the subject's tokens, 0 elsewhere.
    """
    corrupted = {"embed": functools.partial(_add, noise=noise)}
    return patch_grid(params, prepared, prepared, metric, config=config, tap=tap, edits=corrupted, chunk=chunk)


def attribution_patching(
    params: Tree, clean: Prepared, corrupt: Prepared, metric: Metric, names: Sequence[str], *, config: DecoderConfig
) -> dict[str, Tensor]:
    """{tap: [B, S, ...]}: for each number of a tap the first-order change of the metric where its clean value is put.

    That is (clean - corrupt) times the gradient at the corrupt run, for all taps by two forward passes and a backward
    one; sum over what is patched together. names: full names, without *. Runs kernel="math".
    """
    with torch.no_grad():
        _, wanted = forward(params, *clean, config=config, kernel="math", taps=tuple(names))
    logits, found = forward(
        params, *corrupt, config=config, kernel="math", taps=tuple(names), edits={"embed": differentiable}
    )
    gradients = torch.autograd.grad(metric(logits), [found[name] for name in names])
    return {n: (wanted[n] - found[n].detach()) * g for n, g in zip(names, gradients, strict=True)}


def path_patching(
    params: Tree,
    clean: Prepared,
    corrupt: Prepared,
    metric: Metric,
    *,
    config: DecoderConfig,
    senders: Mapping[str, Tensor | None],
    receivers: Sequence[str],
) -> Tensor:
    """The metric of the clean run where only direct paths from senders to receivers carry the corrupt value.

    senders: {tap: bool mask that broadcasts with its value, of what is patched; None: all}, of names as
    "layers.3.attention.z" (heads in dimension 2) and "layers.3.mlp". receivers: taps that read the residual stream,
    such as "layers.5.attention.q", or "hidden". Between them all heads and MLPs keep their clean values
    (arXiv 2304.05969). ValueError for a receiver that is such a value itself. Runs kernel="math".
    """
    known = tap_names(config)
    kept = names_of(config, "attention.z", "attention", "mamba", "mlp")
    kept = [name for name in kept if not name.endswith(".attention") or f"{name}.z" not in known]
    if wrong := sorted({*receivers} & {*kept}):
        raise ValueError(
            f"The receiver {wrong[0]!r} is held at its clean value on the way; receivers are what reads the residual "
            'stream, such as "layers.5.attention.q", "layers.5.mlp.pre" or "hidden".'
        )
    run = functools.partial(forward, params, config=config, kernel="math")
    with torch.no_grad():
        held = run(*clean, taps=tuple(kept))[1]
        sent = run(*corrupt, taps=tuple(senders))[1]
        patched = {name: _mixed(held[name], sent[name], mask) for name, mask in senders.items()}
        received = run(*clean, taps=tuple(receivers), edits={**held, **patched})[1]
    return metric(run(*clean, edits=dict(received)))


def _put(value: Tensor, name: str, *, chosen: Tensor, value_there: Tensor) -> Tensor:
    return torch.where(along_sequence(chosen[None], value), value_there, value)


def _add(value: Tensor, name: str, *, noise: Tensor) -> Tensor:
    return value + noise.to(value.dtype)


def _mixed(value: Tensor, other: Tensor, mask: Any) -> Tensor:
    return other if mask is None else torch.where(mask, other, value)
