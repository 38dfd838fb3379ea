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
from fnmodels.models.common.family import DecoderConfig, field_of
from fnmodels.models.common.heads import PER_DOCUMENT
from fnmodels.options import Edit
from fnmodels.taps import list_of_taps
from fnmodels.tree import Tree

from .common import ADDED, Prepared, along_sequence, differentiable, names_of
from .continued import GivenRun, given_run
from .progress import OnProgress

MEMORY = 1 << 28  # bytes
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
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    read: Sequence[int] | None = None,
    chunk: int | None = None,
    memory: int = MEMORY,
    progress: OnProgress | None = None,
) -> Tensor:
    """Activation patching: the metric of the corrupt run where the clean value of a tap replaces that of one position.

    Each of these cells runs the layers from the patched one on, and where tokens depend on earlier ones by attention
    alone, the tokens from the patched one on (not with edits other than of "embed"). So all cells of a model of L
    layers cost about S L / 4 forward passes, or S L / 2, and as many heads unless `read` leaves logits out. Runs
    kernel="math".

    Args:
        params: The parameters of the model.
        clean: (inputs, masks, freqs_cis) of the clean prompt.
        corrupt: Those of the corrupt prompt, of the same shape.
        metric: (logits [B, S, V]) -> 0-d tensor.
        config: The model's config.
        tap: A name within a layer, sequence in dimension 1.
        edits: Further ones of the corrupt run.
        layers: The numbers of the layers to patch, in the order of the rows; None: all that have the tap.
        positions: The positions to patch, increasing; below 0 from the end. None: all, S columns.
        read: The positions whose logits the metric reads, increasing, such as (-1,); it gets [B, len(read), V]. None:
            all of them.
        chunk: At most so many positions run at a time under vmap; None: as many as pay.
        memory: Bytes that these take beside the model, about; a single position may need more.
        progress: Called with the cells done and their total, such as `progress_bar()`.

    Returns:
        [layers, positions].

    Raises:
        ValueError: The tap is of no layer, a layer is without the tap, or positions are not increasing.
    """
    names = _names_of(config, tap, layers)
    with torch.no_grad():
        _, values = forward(params, *clean, config=config, kernel="math", taps=tuple(names.values()))
    rows_of_batch, length = next(iter(values.values())).shape[:2]
    corrupt_run = given_run(
        params, corrupt, list(names), config=config, edits=edits or {}, read=_read_positions(read, length, config)
    )
    places = list(range(length)) if positions is None else _increasing("positions", positions, length)
    rows = []
    for index, (layer, name) in enumerate(names.items()):
        row: list[Tensor] = []
        done = 0
        while done < len(places):
            first = places[done]
            most = max(_share(corrupt_run, len(places)), -(-_TOKENS // (rows_of_batch * (length - first))))
            part = places[done : done + min(most, chunk or length, max(1, memory // corrupt_run.bytes_from(first)))]
            cells = torch.zeros(len(part), length, dtype=torch.bool, device=values[name].device)
            cells[range(len(part)), part] = True
            run = functools.partial(corrupt_run.further, layer=layer, position=first)
            row.append(torch.func.vmap(functools.partial(_patched, run, metric, name, value_there=values[name]))(cells))
            done += len(part)
            if progress is not None:
                progress(index * len(places) + done, len(names) * len(places))
        rows.append(torch.cat(row))
    return torch.stack(rows)


def _share(given: GivenRun, positions: int) -> int:
    return -(-positions // _GROUPS) if given.entries else positions


def _names_of(config: DecoderConfig, tap: str, layers: Sequence[int] | None) -> dict[int, str]:
    """{layer: the tap's name} of the chosen layers. ValueError for a tap of no layer, and for a layer without it."""
    names = {int(name.split(".", 2)[1]): name for name in names_of(config, tap)}
    if not names:
        raise ValueError(f"No layer has the tap {tap!r}. There are {list_of_taps(config)}.")
    if layers is None:
        return names
    if not layers or (wrong := sorted({*layers} - names.keys())) or len({*layers}) < len(layers):
        raise ValueError(
            f"layers={list(layers)} must be different layers with the tap {tap!r}, one or more of {list(names)}"
            + (f"; {wrong[0]} is none." if layers and wrong else ".")
        )
    return {layer: names[layer] for layer in layers}


_GROUPS = 8  # of positions that run together from the first of them on: more would run fewer tokens, in smaller batches
_TOKENS = 256  # below which a run takes the time of reading the weights, whatever their number
EditedRun = Callable[[dict[str, Edit]], Tensor]  # logits by further edits


def _patched(run: EditedRun, metric: Metric, name: str, chosen: Tensor, *, value_there: Tensor) -> Tensor:
    return metric(run({name: functools.partial(_put, chosen=chosen, value_there=value_there)}))


def _read_positions(read: Sequence[int] | None, length: int, config: DecoderConfig) -> list[int]:
    if read is None:
        return list(range(length))
    if (head := field_of(config, "head")) in PER_DOCUMENT:
        raise ValueError(f"read={list(read)} names positions, but the head {head!r} returns one row per document.")
    return _increasing("read", read, length)


def _increasing(name: str, given: Sequence[int], length: int) -> list[int]:
    """The positions from 0, for a row of `length` tokens; ValueError unless they are increasing and in the row."""
    positions = [index + length if index < 0 else index for index in given]
    if not positions or positions != sorted({*positions}) or positions[0] < 0 or positions[-1] >= length:
        raise ValueError(f"{name}={list(given)} must be increasing positions of a row of {length} tokens, one or more.")
    return positions


def causal_trace(
    params: Tree,
    prepared: Prepared,
    noise: Tensor,
    metric: Metric,
    *,
    config: DecoderConfig,
    **options: Any,
) -> Tensor:
    """Causal tracing (arXiv 2202.05262): `patch_grid` whose corrupt run is the same batch with noise on the embeddings.

    Args:
        params: The parameters of the model.
        prepared: (inputs, masks, freqs_cis) of the prompt.
        noise: [B, S, D], added to the embeddings. The paper has Gaussian noise of three standard deviations of the
            embeddings at the subject's tokens, 0 elsewhere.
        metric: (logits) -> 0-d tensor.
        config: The model's config.
        **options: tap, layers, positions, read, chunk, memory and progress of `patch_grid`.

    Returns:
        [layers, positions].
    """
    corrupted = {"embed": functools.partial(_add, noise=noise)}
    return patch_grid(params, prepared, prepared, metric, config=config, edits=corrupted, **options)


def attribution_patching(
    params: Tree, clean: Prepared, corrupt: Prepared, metric: Metric, names: Sequence[str], *, config: DecoderConfig
) -> dict[str, Tensor]:
    """Attribution patching: the first-order change of a metric for patching each element of taps, by three passes.

    It is (clean - corrupt) times the gradient at the corrupt run, for all taps by two forward passes and a backward
    one; sum over what is patched together. Runs kernel="math".

    Args:
        params: The parameters of the model.
        clean: (inputs, masks, freqs_cis) of the clean prompt.
        corrupt: Those of the corrupt prompt, of the same shape.
        metric: (logits [B, S, V]) -> 0-d tensor.
        names: Full names of taps, without *.
        config: The model's config.

    Returns:
        {tap: [B, S, ...]}.
    """
    with torch.no_grad():
        _, clean_values = forward(params, *clean, config=config, kernel="math", taps=tuple(names))
    logits, corrupt_values = forward(
        params, *corrupt, config=config, kernel="math", taps=tuple(names), edits={"embed": differentiable}
    )
    gradients = torch.autograd.grad(metric(logits), [corrupt_values[name] for name in names])
    return {n: (clean_values[n] - corrupt_values[n].detach()) * g for n, g in zip(names, gradients, strict=True)}


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
    """Path patching (arXiv 2304.05969): only direct paths from senders to receivers carry the corrupt value.

    Between them all that layers add keeps its clean value. Runs kernel="math".

    Args:
        params: The parameters of the model.
        clean: (inputs, masks, freqs_cis) of the clean prompt.
        corrupt: Those of the corrupt prompt, of the same shape.
        metric: (logits [B, S, V]) -> a tensor.
        config: The model's config.
        senders: {tap: bool mask that broadcasts with its value, of what is patched; None: all}, of names as
            "layers.3.attention.z" (heads in dimension 2) and "layers.3.mlp".
        receivers: Taps that read the residual stream, such as "layers.5.attention.q", or "hidden".

    Returns:
        The metric of the clean run with these paths patched.

    Raises:
        ValueError: A receiver is a value that is held.
    """
    # The whole output of a sublayer is held, not its heads alone: a gate behind them reads the residual stream.
    kept = [
        name for name in names_of(config, "attention.z", *ADDED) if not any(s.startswith(f"{name}.") for s in senders)
    ]
    if wrong := sorted({*receivers} & {*kept}):
        raise ValueError(
            f"The receiver {wrong[0]!r} is held at its clean value on the way; receivers are what reads the residual "
            'stream, such as "layers.5.attention.q", "layers.5.mlp.pre" or "hidden".'
        )
    run = functools.partial(forward, params, config=config, kernel="math")
    with torch.no_grad():
        plain = run(*clean, taps=(*kept, *senders))[1]
        sent = run(*corrupt, taps=tuple(senders))[1]
        frozen_values = {name: plain[name] for name in kept}
        patched = {name: _mixed(plain[name], sent[name], mask) for name, mask in senders.items()}
        received = run(*clean, taps=tuple(receivers), edits={**frozen_values, **patched})[1]
    return metric(run(*clean, edits=dict(received)))


def _put(value: Tensor, name: str, *, chosen: Tensor, value_there: Tensor) -> Tensor:
    tokens = value.shape[1]  # of the end of the row, or all
    return torch.where(along_sequence(chosen[None, -tokens:], value), value_there[:, -tokens:], value)


def _add(value: Tensor, name: str, *, noise: Tensor) -> Tensor:
    return value + noise.to(value.dtype)


def _mixed(value: Tensor, other: Tensor, mask: Any) -> Tensor:
    return other if mask is None else torch.where(mask, other, value)
