"""Raw waves as rows of tokens: `wave_rows`, which packs clips for stacks of strided convolutions (wav2vec 2.0).

A token is what the convolutions read for one of their outputs. Where the first convolution is normalized over the whole
clip, the moments of the samples that it reads stand behind them: the mean and the variance of a linear map of windows
follow from the mean and the covariance of the windows, so that clips share a row without seeing each other.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .packing import places_in_rows


class WaveConfig(Protocol):
    """The fields of an encoder's Config that say what a token is."""

    @property
    def conv_kernel(self) -> tuple[int, ...]: ...
    @property
    def conv_stride(self) -> tuple[int, ...]: ...
    @property
    def clip_norm(self) -> bool: ...  # whether the first convolution is normalized over the clip


class Windows(NamedTuple):
    """The parts of tokens: samples [..., R]; of clips, mean [..., K] and root [..., K, K], or both None."""

    samples: Tensor
    mean: Tensor | None
    root: Tensor | None


def reach(config: WaveConfig) -> tuple[int, int]:
    """(samples R that a token reads, samples from one token to the next)."""
    width, step = 1, 1
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
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
    if clip.ndim != 1 or not clip.is_floating_point() or len(clip) < width:
        raise ValueError(
            f"Clip {index} must be floats [T] of at least {width} samples, which is one token, not {clip.dtype} "
            f"{list(clip.shape)}."
        )
    samples = clip.unfold(0, width, step)
    if not config.clip_norm:
        return samples
    mean, root = _moments(clip, config.conv_kernel[0], config.conv_stride[0])
    return torch.cat((samples, torch.cat((mean, root.flatten())).to(clip).expand(len(samples), -1)), -1)


def _moments(clip: Tensor, kernel: int, stride: int) -> tuple[Tensor, Tensor]:
    """(mean [K], R [K, K]) in fp64 of all windows of K samples of the clip; R' R is their covariance.

    On the CPU, since some devices have no fp64.
    """
    windows = clip.cpu().double().unfold(0, kernel, stride)
    mean = windows.mean(0)
    # A triangular factor of the windows: rounding of a covariance, squared, would reach the variances of high tones.
    root: Tensor = torch.linalg.qr(F.pad(windows - mean, (0, 0, 0, max(0, kernel - len(windows)))), mode="r")[1]
    return mean, root / len(windows) ** 0.5
