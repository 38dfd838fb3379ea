"""Flow matching (arXiv 2210.02747) with the straight paths of rectified flow, see `fnmodels.diffusion`."""

from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

import fnmodels
from fnmodels.inputs.segments import integers
from fnmodels.ops.dtypes import upcast
from fnmodels.options import ForwardKwargs
from fnmodels.tree import Tree
from train.batch import check_entries

_OWN = ("latents", "noise", "text", "positions", "segment_ids", "text_segment_ids")


def flow_noise(
    batch: Mapping[str, Tensor], generator: torch.Generator, *, mean: float = 0.0, std: float = 1.0
) -> dict[str, Tensor]:
    """Draws the noise and the times of a batch for `flow_matching_loss`.

    Args:
        batch: latents [B, I, C] and pooled [B, M, P], of M images per row.
        generator: The only source of randomness.
        mean: The mean of the times' logits, which are normal (arXiv 2403.03206, section 3.1).
        std: Their standard deviation.

    Returns:
        The batch with "noise" [B, I, C], normal, and "time" [B, M] in 0 to 1, one for each image.

    Raises:
        ValueError: The batch lacks latents or pooled.
    """
    check_entries(batch, "latents", "pooled")
    latents, images = batch["latents"], batch["pooled"].shape[:2]
    noise = torch.randn(latents.shape, generator=generator, device=latents.device).to(latents.dtype)
    logits = mean + std * torch.randn(images, generator=generator, device=latents.device)
    return {**batch, "noise": noise, "time": logits.sigmoid()}


def flow_matching_loss(
    params: Tree, batch: Mapping[str, Tensor], *, config: Any, **options: Unpack[ForwardKwargs]
) -> tuple[Tensor, Tensor]:
    """The mean squared error of the velocity that a diffusion model predicts (arXiv 2403.03206).

    The model reads (1 - time) latents + time noise, and its target is noise - latents.

    Args:
        params: The parameters of the model.
        batch: latents [B, I, C], the data; noise [B, I, C] and time [B, M], as `flow_noise` draws them; the others as
            for `fnmodels.diffusion.prepare_denoising`: text, positions, segment_ids, text_segment_ids, pooled, and
            guidance where the config has it.
        config: The model's config.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        The sum over tokens of latents of the error's mean over channels, in fp32 at least, and the number of these
        tokens.

    Raises:
        ValueError: An entry is missing, shapes do not fit each other, or the model returns other channels than it
            reads.
    """
    check_entries(batch, *_OWN, *config.conditions)
    if config.in_channels != config.out_channels:
        raise ValueError(
            f"The model reads {config.in_channels} channels and returns {config.out_channels}; this loss is for "
            "models whose latents are all that they read."
        )
    owners = _owners(batch)
    valid = (owners > 0)[..., None]
    data, noise = (upcast(batch[name]).where(valid, 0) for name in ("latents", "noise"))
    time = torch.take_along_dim(batch["time"], (owners - 1).clamp(min=0), 1)[..., None]
    prepared = fnmodels.diffusion.prepare_denoising(
        config,
        (1 - time) * data + time * noise,
        batch["text"],
        {name: batch[name] for name in config.conditions},
        positions=batch["positions"],
        segment_ids=owners,
        text_segment_ids=batch["text_segment_ids"],
    )
    velocity = upcast(fnmodels.forward(params, *prepared, config=config, **options))
    error = (velocity - (noise - data)).square().mean(-1)
    return error.where(valid[..., 0], 0).sum(), valid.sum()


def _owners(batch: Mapping[str, Tensor]) -> Tensor:
    """The segment ids [B, I]. ValueError for entries of other shapes or dtypes, which could broadcast silently."""
    latents, owners = batch["latents"], integers("segment_ids", batch["segment_ids"])
    for name, x, shape in (("noise", batch["noise"], latents.shape), ("segment_ids", owners, latents.shape[:2])):
        if x.shape != shape:
            raise ValueError(f"{name} must be {list(shape)} like the latents, not {list(x.shape)}.")
    time = batch["time"]
    if time.ndim != 2 or len(time) != len(latents) or not time.is_floating_point():
        raise ValueError(f"time must be floats [{len(latents)}, M], not {time.dtype} {list(time.shape)}.")
    return owners
