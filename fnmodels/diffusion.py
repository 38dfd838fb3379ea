"""Rectified flow (arXiv 2209.03003) with models of `fnmodels.models.diffusion`: batches, and the sampler.

    latents, positions, segment_ids = latent_rows([torch.randn(16, 128, 128)])
    inputs, masks, freqs_cis = prepare_denoising(config, latents, text, conditions, positions=positions)
    velocity = fnmodels.forward(params, inputs, masks, freqs_cis, config=config)
    latents = denoise(params, inputs, masks, freqs_cis, config=config, times=flow_times(28, tokens=4096))

Time is 1 for noise and 0 for data: x = (1 - time) data + time noise, and the velocity is d x / d time = noise - data.
Latents are those of the model's VAE, which is not part of this library, scaled and shifted as its pipeline does it.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from fnmodels.inputs.images import patch_rows
from fnmodels.inputs.mask import MaskLike
from fnmodels.inputs.segments import integers
from fnmodels.inputs.values import readable
from fnmodels.models.common.family import traits_of
from fnmodels.models.common.registry import family_of

from .apply import forward
from .options import ForwardKwargs
from .tree import Tree

_CELL = 2  # rows and columns of a latent in one token


def prepare_denoising(
    config: Any,
    latents: Tensor,
    text: Tensor,
    conditions: Mapping[str, Tensor],
    *,
    positions: Tensor,
    segment_ids: Tensor | None = None,
    text_segment_ids: Tensor | None = None,
) -> tuple[dict[str, Any], dict[str, MaskLike], dict[str, Tensor]]:
    """Prepares a batch of noisy images and texts for `fnmodels.forward`, which returns the velocity [B, I, C] of the
    latents.

    Only the conditions, and inputs["tokens"], the latents, change between the steps of a sampler.

    Args:
        config: The config of a diffusion model.
        latents: Tokens of noisy latents, [B, I, C].
        text: Vectors of a text encoder, [B, T, D].
        conditions: {"time": [B, M], "pooled": [B, M, P]}, and "guidance" [B, M] where the config has it, of image m + 1
            of each row; time from 0 to 1.
        positions: [B, I, 3]: (0, row, column) of each token in its image; those of texts are 0.
        segment_ids: int64 [B, I]: which image of the row a token belongs to, from 1 to M, 0 for padding; None: a row
            holds a single image, without padding.
        text_segment_ids: int64 [B, T]: which image a text's token belongs to; None: a row holds the text of a single
            image.

    Returns:
        (inputs, masks, freqs_cis).

    Raises:
        ValueError: Tensors do not fit each other or the config, or the model is no diffusion model.
    """
    if traits_of(family_of(config)).inputs != "latents":
        raise ValueError(f"A {config.model_type} is no diffusion model: take fnmodels.prepare.")
    _check_shapes(config, latents, text, positions)
    named = {"segment_ids": (segment_ids, latents), "text_segment_ids": (text_segment_ids, text)}
    ids = {name: _segments(name, segments, x) for name, (segments, x) in named.items()}
    images = _check_conditions(config, conditions, len(latents))
    for name, owners in ids.items():
        if readable(owners) and owners.numel() and int(owners.max()) > images:
            raise ValueError(f"{name} has an image {int(owners.max())}, but the conditions are of {images} per row.")
    both = torch.cat((ids["text_segment_ids"], ids["segment_ids"]), 1)
    none = positions.new_zeros(len(text), text.shape[1], 3)
    places = torch.cat((none, integers("positions", positions).expand(len(latents), -1, -1)), 1)
    inputs: dict[str, Any] = {"tokens": latents, "text": text, **conditions, "positions": places, "valid": both > 0}
    inputs |= {"text_image": ids["text_segment_ids"], "latent_image": ids["segment_ids"]}
    for name in ("text_image", "latent_image"):
        inputs[name] = (inputs[name] - 1).clamp(min=0)  # padding reads the first image's, and nothing reads padding
    family = family_of(config)
    return inputs, family.attention_masks(config, places, both), family.freqs_cis(config, places)


def _check_shapes(config: Any, latents: Tensor, text: Tensor, positions: Tensor) -> None:
    for name, x, width in (("latents", latents, config.in_channels), ("text", text, config.joint_attention_dim)):
        if x.ndim != 3 or x.shape[-1] != width or not x.is_floating_point():
            raise ValueError(f"{name} must be floats [B, tokens, {width}], not {x.dtype} {list(x.shape)}.")
    if len(latents) != len(text):
        raise ValueError(f"There are {len(latents)} rows of latents and {len(text)} of texts.")
    if positions.shape not in ((*latents.shape[:2], 3), (1, latents.shape[1], 3)):
        raise ValueError(f"positions must be {[*latents.shape[:2], 3]} like the latents, not {list(positions.shape)}.")


def _segments(name: str, given: Tensor | None, x: Tensor) -> Tensor:
    if given is None:
        return torch.ones(x.shape[:2], dtype=torch.int64, device=x.device)
    if given.shape not in (x.shape[:2], (1, x.shape[1])):
        raise ValueError(f"{name} must be {list(x.shape[:2])}, not {list(given.shape)}.")
    return integers(name, given).expand(x.shape[:2])


def _check_conditions(config: Any, conditions: Mapping[str, Tensor], rows: int) -> int:
    """M, how many images a row may hold."""
    shapes = config.conditions
    if conditions.keys() != shapes.keys():
        raise ValueError(f"conditions are {sorted(conditions)}; this model has {sorted(shapes)}.")
    images = conditions["time"].shape[1] if conditions["time"].ndim == 2 else 1
    for name, tail in shapes.items():
        value = conditions[name]
        if value.shape != (rows, images, *tail) or not value.is_floating_point():
            raise ValueError(
                f"The condition {name!r} must be floats {[rows, images, *tail]}, of {rows} rows of {images} images, "
                f"not {value.dtype} {list(value.shape)}."
            )
    return images


def latent_rows(latents: Sequence[Tensor], *, length: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Cuts latents into tokens of 2 x 2 cells, channels first, as in diffusers.

    Args:
        latents: [c, h, w] of each image, of even height and width.
        length: Tokens in a row, into which images are packed in their order; None: each image has a row to itself.

    Returns:
        (tokens [B, I, 4 c], positions [B, I, 3], segment_ids [B, I]).

    Raises:
        ValueError: There is no image, or one that does not fit in a row or is of odd size.
    """
    if not latents:
        raise ValueError("latent_rows needs at least one image.")
    tokens, places, segment_ids = patch_rows(latents, _Cells(latents[0].shape[0]), length=length)
    return tokens, torch.cat((torch.zeros_like(places[..., :1]), places[..., :2]), -1), segment_ids


@dataclass(frozen=True)
class _Cells:
    """The `PatchConfig` of latents."""

    num_channels: int
    patch_size: int = _CELL
    special_tokens: int = 0
    channels_last: bool = False


def unpacked_latents(tokens: Tensor, positions: Tensor, segment_ids: Tensor) -> list[Tensor]:
    """The latents that `latent_rows` packed. It reads values, so call it outside of transforms.

    Args:
        tokens: [B, I, 4 c].
        positions: [B, I, 3], of `latent_rows`.
        segment_ids: [B, I], of `latent_rows`.

    Returns:
        [c, h, w] of each image, in the order of `latent_rows`.
    """
    latents = []
    for row, owners in enumerate(segment_ids):
        for segment in range(1, int(owners.max()) + 1):
            of_image = owners == segment
            at = positions[row, of_image, 1:]
            height, width = (int(size) + 1 for size in at.amax(0))
            image = tokens.new_empty(height, width, tokens.shape[-1])
            image[at[:, 0], at[:, 1]] = tokens[row, of_image]
            cells = image.unflatten(-1, (-1, _CELL, _CELL)).permute(2, 0, 3, 1, 4)  # [c, rows, 2, columns, 2]
            latents.append(cells.flatten(3).flatten(1, 2))
    return latents


def flow_times(steps: int, *, tokens: int | None = None) -> Tensor:
    """The times of a sampler's steps.

    Args:
        steps: The number of steps.
        tokens: Of the image, for FLUX.1 dev, which takes more of its steps near the noise the larger an image is. Time
            t becomes e^m / (e^m + 1 / t - 1), with m from 0.5 at 256 tokens to 1.15 at 4096 (arXiv 2403.03206, section
            5.3.2). None, for schnell: equal steps.

    Returns:
        fp32 [steps + 1], from 1 to 0.

    Raises:
        ValueError: There are no steps.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; it must be at least 1.")
    even = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    if tokens is None:
        return even.float()
    shift = math.exp(0.5 + (tokens - 256) * (1.15 - 0.5) / (4096 - 256))
    return (shift * even / (shift * even + 1 - even)).float()


def denoise(
    params: Tree,
    inputs: Tree,
    masks: Mapping[str, MaskLike],
    freqs_cis: Mapping[str, Tensor],
    /,
    *,
    config: Any,
    times: Tensor,
    **options: Unpack[ForwardKwargs],
) -> Tensor:
    """Integrates a diffusion model's velocity by a step of Euler's method between each two times.

    Args:
        params: The parameters of the model.
        inputs: Those of `prepare_denoising`; at time 1 inputs["tokens"] are noise, and "time" is replaced.
        masks: Those of `prepare_denoising`.
        freqs_cis: Those of `prepare_denoising`.
        config: The config of a diffusion model.
        times: [steps + 1], descending, such as of `flow_times`.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        Latents [B, I, C] at times[-1], summed in fp32 at least.
    """
    x = inputs["tokens"].to(torch.promote_types(inputs["tokens"].dtype, torch.float32))
    for now, then in itertools.pairwise(times):
        step_inputs = {**inputs, "tokens": x, "time": now.expand_as(inputs["time"])}
        x = x + (then - now) * forward(params, step_inputs, masks, freqs_cis, config=config, **options)
    return x
