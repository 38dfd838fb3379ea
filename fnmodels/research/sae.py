"""Sparse autoencoders of activations (arXiv 2309.08600): harvest to a memory-mapped file, train, splice by an edit.

x is approximated by decoder f + bias with features f = relu(encoder (x - bias) + encoder_bias), few of which are not 0.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.apply import hidden, run_layers
from fnmodels.models.common.family import DecoderConfig, field_of
from fnmodels.models.common.registry import family_of
from fnmodels.options import Edit
from fnmodels.tree import Tree

from .common import Prepared, layer_count, valid_of

Autoencoder = dict[str, Tensor]


def harvest(
    params: Tree,
    batches: Iterable[Prepared],
    path: Path | str,
    name: str,
    *,
    config: DecoderConfig,
    rows: int,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Tensor:
    """Writes a tap's values at the first tokens of batches that are no padding into a memory-mapped file.

    Packed batches (`fnmodels.pack`) have the fewest tokens of padding.

    Args:
        params: The parameters of the model.
        batches: (inputs, masks, freqs_cis) of each batch.
        path: The new file.
        name: The tap.
        config: The model's config.
        rows: The number of tokens.
        dtype: Of the file.
        **options: Keywords of `fnmodels.hidden`, such as layout.

    Returns:
        [rows, ...], mapped.

    Raises:
        ValueError: The batches have fewer tokens; the file is then removed.
        FileExistsError: There is a file already.
        TypeError: A batch is not what `fnmodels.prepare` returns.
    """
    if os.path.lexists(path):  # also a link to a file that is not there, which would be made
        raise FileExistsError(f"{path} exists; harvest writes a new file.")
    out, filled = None, 0
    for prepared in batches:
        if not isinstance(prepared, tuple):
            raise TypeError(
                f"A batch is a {type(prepared).__name__}; batches are a list of what fnmodels.prepare returns."
            )
        with torch.no_grad():
            value = _tapped(params, prepared, name, config, options)
        harvested = value[valid_of(prepared)][: rows - filled]
        if out is None:
            shape = (rows, *harvested.shape[1:])
            out = torch.from_file(str(path), shared=True, size=torch.Size(shape).numel(), dtype=dtype).view(shape)
        out[filled : filled + len(harvested)] = harvested.to(dtype)
        filled += len(harvested)
        if filled == rows:
            return out
    Path(path).unlink(missing_ok=True)
    raise ValueError(f"The batches have {filled} tokens that are no padding, and rows is {rows}.")


def _tapped(params: Tree, prepared: Prepared, name: str, config: DecoderConfig, options: dict[str, Any]) -> Tensor:
    """The tap, by the layers up to its own where they need no inputs but the embedding."""
    inputs: Any = prepared[0]
    where, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    needs_all = "edits" in options or field_of(config, "hidden_size_per_layer_input")
    if where != "layers" or not number.isdigit() or needs_all:
        whole: Tensor = hidden(params, *prepared, config=config, taps=(name,), **options)[1][name]
        return whole
    x = family_of(config).embed(params, inputs, config=config)
    layer_inputs = {key: inputs.get(key) for key in ("valid", "routing", "choices")}
    stop = min(int(number) + 1, layer_count(config))
    tapped: Tensor = run_layers(
        params, x, *prepared[1:], 0, stop, config=config, taps=(name,), **layer_inputs, **options
    )[1][name]
    return tapped


def init_sae(width: int, features: int, *, seed: int = 0) -> Autoencoder:
    """A sparse autoencoder (arXiv 2309.08600) to be trained: a decoder of unit columns, and its transpose as the
    encoder.

    Args:
        width: The width D of the activations.
        features: The number F of features.
        seed: Of the decoder.

    Returns:
        encoder [F, D], decoder [D, F], encoder_bias [F] and bias [D].
    """
    decoder = F.normalize(torch.randn(width, features, generator=torch.Generator().manual_seed(seed)), dim=0)
    zeros = {"encoder_bias": torch.zeros(features), "bias": torch.zeros(width)}
    return {"encoder": decoder.T.clone(), "decoder": decoder, **zeros}


def encode(sae: Autoencoder, x: Tensor) -> Tensor:
    """The features of activations.

    Args:
        sae: The autoencoder.
        x: Activations [..., D].

    Returns:
        [..., F], at least 0.

    Raises:
        ValueError: The activations have another width.
    """
    if x.shape[-1] != len(sae["bias"]):
        raise ValueError(
            f"The activations have {x.shape[-1]} numbers; the autoencoder was made for {len(sae['bias'])}."
        )
    return F.relu(F.linear(x - sae["bias"], sae["encoder"], sae["encoder_bias"]))


def decode(sae: Autoencoder, features: Tensor) -> Tensor:
    """The activations that features stand for.

    Args:
        sae: The autoencoder.
        features: [..., F].

    Returns:
        [..., D].
    """
    return F.linear(features, sae["decoder"], sae["bias"])


def sae_loss(sae: Autoencoder, x: Tensor, *, sparsity: float) -> tuple[Tensor, Tensor]:
    """The loss of a sparse autoencoder: squared error plus `sparsity` times the sum of the features, the mean over
    rows.

    Args:
        sae: The autoencoder.
        x: Activations [rows, D].
        sparsity: The coefficient of the features.

    Returns:
        The loss, 0-d, and the mean number of active features per row.
    """
    features = encode(sae, x)
    loss = (decode(sae, features) - x).square().sum(-1) + sparsity * features.sum(-1)
    return loss.mean(), (features > 0).sum(-1).to(loss.dtype).mean()


def train_sae(
    sae: Autoencoder,
    data: Tensor,
    *,
    steps: int,
    batch: int = 256,
    rate: float = 1e-3,
    sparsity: float = 1e-2,
    seed: int = 0,
) -> tuple[Autoencoder, list[float]]:
    """Trains a sparse autoencoder by Adam on random rows; the columns of the decoder keep length 1.

    Args:
        sae: The autoencoder to begin with, which is not changed.
        data: Activations [rows, D], as of `harvest`.
        steps: The number of updates.
        batch: Rows per update.
        rate: The learning rate.
        sparsity: The coefficient of the features.
        seed: Of the choice of rows.

    Returns:
        The trained autoencoder, and the loss of each step.
    """
    sae = {name: value.detach().clone().requires_grad_() for name, value in sae.items()}
    optimizer, losses = torch.optim.Adam(sae.values(), rate), []
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = data[torch.randint(len(data), (batch,), generator=generator)].to(sae["bias"])
        loss, _ = sae_loss(sae, x, sparsity=sparsity)
        optimizer.zero_grad()
        torch.autograd.backward(loss, inputs=list(sae.values()))
        optimizer.step()
        with torch.no_grad():
            sae["decoder"].copy_(F.normalize(sae["decoder"], dim=0))
        losses.append(float(loss.detach()))
    return {name: value.detach() for name, value in sae.items()}, losses


def splice(sae: Autoencoder, name: str, *, keep: Tensor | None = None, error: bool = False) -> dict[str, Edit]:
    """Edits by which an autoencoder's reconstruction replaces a tap.

    Args:
        sae: The autoencoder.
        name: The tap.
        keep: [F], multiplies the features (0 ablates a feature); None: all 1.
        error: Whether what the reconstruction misses is added, so that without `keep` nothing changes.

    Returns:
        The `edits` of `fnmodels.forward`.
    """
    tensors: dict[str, Any] = dict(sae) if keep is None else sae | {"keep": keep}
    return {name: functools.partial(_spliced, error=error, **tensors)}


def _spliced(value: Tensor, name: str, *, error: bool, keep: Tensor | None = None, **sae: Tensor) -> Tensor:
    x = value.to(sae["bias"].dtype)
    features = encode(sae, x)
    out = decode(sae, features if keep is None else features * keep)
    out = out + (x - decode(sae, features)) if error else out
    return out.to(value.dtype)
