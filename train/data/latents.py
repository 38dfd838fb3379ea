"""Latents of images and the vectors of their texts in one safetensors file: the data of `python -m train.flow`.

latents [n, c, h, w]    of images of one even size, as the VAE's pipeline scales and shifts them
text [n, T, D]          vectors of the texts; text_lengths [n], integers: how many of them count, by default all
pooled [n, P]           one vector for each text
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

import fnmodels
from fnmodels.errors import UserError
from params.io.safetensors_file import cast_buffer, open_tensors, read_tensor

from .sampling import sample_rows

_AXES = {"latents": 4, "text": 3, "pooled": 2}


def read_latents(path: Path) -> dict[str, Tensor]:
    """The tensors of the file, floats in fp32, with "text_lengths" int64 [n]. UserError, FormatError, OSError."""
    with ExitStack() as stack:
        file = open_tensors(path, stack)
        if missing := [name for name in _AXES if name not in file.entries]:
            raise UserError(f"{path} has no tensor {missing[0]!r}; it needs {', '.join(_AXES)}")
        names = [name for name in (*_AXES, "text_lengths") if name in file.entries]
        if unknown := sorted(file.entries.keys() - set(names)):
            raise UserError(f"{path} has a tensor {unknown[0]!r}, which is not read; remove it")
        found = {name: read_tensor(file, file.entries[name], None, cast_buffer()) for name in names}
    return _checked(path, found)


def _checked(path: Path, found: dict[str, Tensor]) -> dict[str, Tensor]:
    count = len(found["latents"]) if found["latents"].ndim else 0
    for name, axes in _AXES.items():
        value = found[name]
        if value.ndim != axes or len(value) != count or not value.numel() or not value.is_floating_point():
            raise UserError(
                f"{path}: {name} is {value.dtype} {list(value.shape)}; it must be floats of {axes} dimensions, the "
                f"first one {count}, that of the latents, and none of them 0"
            )
        found[name] = value.float()
        if not found[name].isfinite().all():
            raise UserError(f"{path}: {name} has values that are not finite")
    if any(size % 2 for size in found["latents"].shape[2:]):
        raise UserError(f"{path}: latents are {list(found['latents'].shape)}; height and width must be even")
    most = found["text"].shape[1]
    lengths = found.setdefault("text_lengths", torch.full((count,), most))
    if lengths.is_floating_point() or lengths.shape != (count,) or lengths.min() < 0 or lengths.max() > most:
        raise UserError(f"{path}: text_lengths must be {count} integers from 0 to {most}")
    found["text_lengths"] = lengths.long()
    return found


def flow_batch(data: Mapping[str, Tensor], seed: int, step: int, images: int) -> dict[str, Tensor]:
    """The batch of `train.losses.flow_noise` and `train.flow_matching_loss` of a step (from 0), one image in each row.

    A function of its arguments alone: every image once, in an order that the seed gives, before any comes again.
    """
    chosen = [row for _, row, _ in sample_rows([len(data["latents"])], [1], seed, step, images)]
    return rows_of_images(data, torch.tensor(chosen))


def rows_of_images(data: Mapping[str, Tensor], chosen: Tensor) -> dict[str, Tensor]:
    """The batch of the images with the numbers `chosen`, one in each row."""
    latents, positions, segment_ids = fnmodels.diffusion.latent_rows(list(data["latents"][chosen]))
    slots = torch.arange(data["text"].shape[1])
    owners = (slots < data["text_lengths"][chosen, None]).long()
    batch = {"latents": latents, "positions": positions, "segment_ids": segment_ids, "text_segment_ids": owners}
    return batch | {"text": data["text"][chosen], "pooled": data["pooled"][chosen, None]}
