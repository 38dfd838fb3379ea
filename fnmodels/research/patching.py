"""Activation patching, causal tracing (arXiv 2202.05262), attribution patching (Nanda 2023) and path patching.

A metric is a function of logits [B, S, V] that returns a scalar. The clean and the corrupt batch have equal shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fnmodels.apply import forward, hidden, run_layers, unembedded
from fnmodels.edits import edit_end, edits_of_stage
from fnmodels.models.common.heads import PER_DOCUMENT
from fnmodels.models.common.registry import DecoderConfig, family_of, field_of, is_indexed, source_kind
from fnmodels.options import Edit
from fnmodels.taps import FINAL, tap_names
from fnmodels.tree import Tree

from .common import Prepared, along_sequence, differentiable, layer_count, names_of

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

    tap: a name within a layer, sequence in dimension 1. edits: further ones of the corrupt run. chunk: the positions
    that run at a time under vmap; None: all. Each cell runs the layers from the patched one on. Runs kernel="math".
    """
    names = names_of(config, tap)
    with torch.no_grad():
        _, values = forward(params, *clean, config=config, kernel="math", taps=tuple(names))
    cells = torch.eye(values[names[0]].shape[1], dtype=torch.bool, device=values[names[0]].device)
    rows = []
    for name, run in _runs_from(params, corrupt, names, config, dict(edits or {})).items():
        put = functools.partial(_patched, run, metric, name, value_there=values[name])
        rows.append(torch.func.vmap(put, chunk_size=chunk)(cells))
    return torch.stack(rows)


Run = Callable[[dict[str, Edit]], Tensor]  # logits by further edits


def _patched(run: Run, metric: Metric, name: str, chosen: Tensor, *, value_there: Tensor) -> Tensor:
    return metric(run({name: functools.partial(_put, chosen=chosen, value_there=value_there)}))


def _runs_from(
    params: Tree, prepared: Prepared, names: Sequence[str], config: DecoderConfig, edits: dict[str, Edit]
) -> dict[str, Run]:
    """{tap: the run with `edits` and further ones of this tap}, which begins at its layer, with the state kept there.

    From the first layer where layers read more of earlier ones than their output, or the head reads documents.
    """

    def whole(further: dict[str, Edit]) -> Tensor:
        logits: Tensor = forward(params, *prepared, config=config, kernel="math", edits={**edits, **further})
        return logits

    kinds = family_of(config).kinds(config)
    more = any(is_indexed(kind) or source_kind(kind) for kind in kinds) or field_of(config, "head") in PER_DOCUMENT
    if more or field_of(config, "hidden_size_per_layer_input"):
        return dict.fromkeys(names, whole)
    layers = {name: int(name.split(".", 2)[1]) for name in names}
    begins = tuple(f"layers.{index}.input" for index in layers.values())
    _, kept = hidden(
        params,
        *prepared,
        config=config,
        kernel="math",
        taps=begins,
        edits={name: edit for name, edit in edits.items() if name not in FINAL} or None,
    )
    rest = functools.partial(_rest, params, prepared, config, edits)
    return {name: functools.partial(rest, index, kept[f"layers.{index}.input"]) for name, index in layers.items()}


def _rest(
    params: Tree,
    prepared: Prepared,
    config: DecoderConfig,
    edits: dict[str, Edit],
    first: int,
    x: Tensor,
    further: dict[str, Edit],
) -> Tensor:
    """Logits of the run from layer `first` on, whose input is x, after the edit of this input."""
    inputs, masks, freqs_cis = prepared
    layers = range(first, layer_count(config))
    own = edits_of_stage(edits, tap_names(config), layers) or {}
    own.pop(f"layers.{first}.input", None)  # x has it
    given: Any = {key: inputs.get(key) for key in ("valid", "routing")} if isinstance(inputs, Mapping) else {}
    span = layers.start, layers.stop
    x = run_layers(params, x, masks, freqs_cis, *span, config=config, kernel="math", edits={**own, **further}, **given)
    return unembedded(params, edit_end(edits, "hidden", x), config, (), edits)[0]


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
