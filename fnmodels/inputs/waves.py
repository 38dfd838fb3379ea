"""Raw waves as rows of tokens: `wave_rows` and `sample_rows`, which pack clips for stacks of strided convolutions.

A token is what the convolutions read for one of their outputs. Where the first convolution is normalized over the whole
clip, the moments of the samples that it reads stand behind them: the mean and the variance of a linear map of windows
follow from the mean and the covariance of the windows, so that clips share a row without seeing each other (wav2vec
2.0). Behind an activation they do not follow, and tokens say which outputs of the first convolution count (Moonshine).
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .packing import packed_tokens, places_in_rows


class ConvSizes(Protocol):
    """The fields of an encoder's Config that say what its convolutions read."""

    @property
    def conv_kernel(self) -> tuple[int, ...]: ...
    @property
    def conv_stride(self) -> tuple[int, ...]: ...


class WaveConfig(ConvSizes, Protocol):
    """The fields of an encoder's Config that say what a token is."""

    @property
    def clip_norm(self) -> bool: ...  # whether the first convolution is normalized over the clip


class Windows(NamedTuple):
    """The parts of tokens: samples [..., R]; of clips, mean [..., K] and root [..., K, K], or both None."""

    samples: Tensor
    mean: Tensor | None
    root: Tensor | None


def reach(config: ConvSizes, first: int = 0) -> tuple[int, int]:
    """(samples R that a token reads, samples from one token to the next).

    first: convolutions before this one are left out, and the results count outputs of the last of those.
    """
    width, step = 1, 1
    for kernel, stride in zip(config.conv_kernel[first:], config.conv_stride[first:], strict=True):
        width, step = width + (kernel - 1) * step, step * stride
    return width, step


def unit_variance(samples: Tensor) -> Tensor:
    """A clip as the published models hear it: (samples - mean) / sqrt(variance + 1e-7).

    Args:
        samples: Floats [T].

    Returns:
        The scaled samples [T].
    """
    return (samples - samples.mean()) / (samples.var(correction=0) + 1e-7).sqrt()


def wave_rows(
    clips: Sequence[Tensor], config: WaveConfig, *, length: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of clips of raw samples, for `fnmodels.prepare`.

    Args:
        clips: Floats [T] at 16 kHz, see `unit_variance`; a clip has as many tokens as the convolutions have outputs.
        config: The encoder's Config.
        length: None puts each clip in a row of its own; a number of tokens packs clips, in their order, into rows of
            that length, so that clip i is document i of `fnmodels.documents(segment_ids)` either way.

    Returns:
        (waves [B, S, R], or [B, S, R + K + K K] with the moments of clips, positions [B, S, 2], segment_ids [B, S]). A
        position is (index of the token in its clip, tokens of the clip). Rows are padded at the end: segment 0.

    Raises:
        ValueError: For a clip that is shorter than a token or does not fit in a row, and without clips.
    """
    tokens = [_tokens(clip, i, config) for i, clip in enumerate(clips)]
    if not tokens:
        raise ValueError("wave_rows needs at least one clip.")
    places, shape = places_in_rows([len(rows) for rows in tokens], length, "Clip")
    waves = tokens[0].new_zeros(*shape, tokens[0].shape[-1])
    segment_ids = torch.zeros(shape, dtype=torch.long, device=waves.device)
    positions = segment_ids.new_zeros(*shape, 2)
    for rows, (row, columns, number) in zip(tokens, places, strict=True):
        waves[row, columns], segment_ids[row, columns] = rows, number
        positions[row, columns, 0] = torch.arange(len(rows), device=waves.device)
        positions[row, columns, 1] = len(rows)
    return waves, positions, segment_ids


def sample_rows(
    clips: Sequence[Tensor], config: ConvSizes, *, length: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of clips of raw samples for convolutions with one mean and variance of a clip after the first (Moonshine).

    A token has the samples of its outputs of the first convolution and of those that its clip has beyond the last
    token, and how many of them the moments of the clip count for it. So tokens may stand in any order, and a clip has
    the moments that it has alone.

    Args:
        clips: Floats [T] at 16 kHz; a clip has as many tokens as the convolutions have outputs.
        config: The config of the encoder, or of both stacks.
        length: Tokens in a row, into which clips are packed in their order; None: each clip has a row to itself. Either
            way clip i is document i of `fnmodels.documents(segment_ids)`.

    Returns:
        (samples [B, S, R + 1], positions [B, S], segment_ids [B, S]); rows are padded at the end, with segment 0.

    Raises:
        ValueError: For a clip that is shorter than a token or does not fit in a row, and without clips.
    """
    return packed_tokens([_counted(clip, i, config) for i, clip in enumerate(clips)], length, "sample_rows")


def outputs_of(config: ConvSizes) -> int:
    """The outputs of the first convolution of which a token of `sample_rows` has the samples."""
    width, step = reach(config, 1)
    return width + step - 1


def _counted(clip: Tensor, index: int, config: ConvSizes) -> Tensor:
    """The tokens [T, R + 1] of a clip for `sample_rows`."""
    _check_clip(clip, index, reach(config)[0])
    kernel, stride = config.conv_kernel[0], config.conv_stride[0]
    width, step = reach(config, 1)
    outputs = (len(clip) - kernel) // stride + 1
    tokens = (outputs - width) // step + 1
    held = kernel + (outputs_of(config) - 1) * stride
    end = held + (tokens - 1) * step * stride
    counts = clip.new_full((tokens, 1), step)
    counts[-1] = outputs - (tokens - 1) * step
    return torch.cat((F.pad(clip, (0, max(0, end - len(clip))))[:end].unfold(0, held, step * stride), counts), -1)


def windows_of(waves: Tensor, config: WaveConfig) -> Windows:
    """The parts of tokens [..., R] or [..., R + K + K K]; ValueError for tokens of another width."""
    width, kernel = reach(config)[0], config.conv_kernel[0]
    sizes = [width, kernel, kernel**2] if config.clip_norm else [width]
    if not waves.is_floating_point() or waves.shape[-1] != sum(sizes):
        raise ValueError(
            f"The tokens of this encoder are waves [B, S, {sum(sizes)}] as fnmodels.inputs.wave_rows makes them, not "
            f"{waves.dtype} {list(waves.shape)}."
        )
    if not config.clip_norm:
        return Windows(waves, None, None)
    samples, mean, root = waves.split(sizes, -1)
    return Windows(samples, mean, root.unflatten(-1, (kernel, kernel)))


def _tokens(clip: Tensor, index: int, config: WaveConfig) -> Tensor:
    """The tokens [T, R] of a clip, or [T, R + K + K K]."""
    width, step = reach(config)
    _check_clip(clip, index, width)
    samples = clip.unfold(0, width, step)
    if not config.clip_norm:
        return samples
    mean, root = _moments(clip, config.conv_kernel[0], config.conv_stride[0])
    return torch.cat((samples, torch.cat((mean, root.flatten())).to(clip).expand(len(samples), -1)), -1)


def _check_clip(clip: Tensor, index: int, width: int) -> None:
    if clip.ndim != 1 or not clip.is_floating_point() or len(clip) < width:
        raise ValueError(
            f"Clip {index} must be floats [T] of at least {width} samples, which is one token, not {clip.dtype} "
            f"{list(clip.shape)}."
        )


def _moments(clip: Tensor, kernel: int, stride: int) -> tuple[Tensor, Tensor]:
    """(mean [K], R [K, K]) in fp64 of all windows of K samples of the clip; R' R is their covariance.

    On the CPU, since some devices have no fp64.
    """
    windows = clip.cpu().double().unfold(0, kernel, stride)
    mean = windows.mean(0)
    # A triangular factor of the windows: rounding of a covariance, squared, would reach the variances of high tones.
    root: Tensor = torch.linalg.qr(F.pad(windows - mean, (0, 0, 0, max(0, kernel - len(windows)))), mode="r")[1]
    return mean, root / len(windows) ** 0.5
