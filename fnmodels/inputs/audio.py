"""Sound as rows of frames: `log_mel`, the front end of Whisper (arXiv 2212.04356), and `frame_rows`, which packs clips.

mel = log_mel(samples, bins=80, length=30 * 16000)
frames, positions, segment_ids = frame_rows([mel], config)
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .packing import packed_tokens

SAMPLE_RATE = 16000
WINDOW, HOP = 400, 160  # samples of a Fourier transform, and between two of them
REACH = 5  # mel frames that one token of the encoder reads
# Of Qwen3-ASR, whose convolutions read seconds one by one: frames of a second, its tokens, and frames that one reads.
CHUNK, CHUNK_TOKENS, CHUNK_REACH = 100, 13, 15


class AudioConfig(Protocol):
    """The field of an encoder's Config that says what its frames are."""

    @property
    def num_mel_bins(self) -> int: ...


def mel_filters(bins: int, *, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> Tensor:
    """[bins, 201] triangular filters on Slaney's mel scale from 0 to 8000 Hz, each of area 1 over frequency."""
    break_hz, per_mel, step = 1000.0, 200 / 3, math.log(6.4) / 27  # linear below the break, then logarithmic
    break_mel = break_hz / per_mel
    highest = break_mel + math.log(SAMPLE_RATE / 2 / break_hz) / step
    mels = torch.linspace(0, highest, bins + 2, dtype=torch.float64)
    edges = torch.where(mels < break_mel, mels * per_mel, break_hz * torch.exp(step * (mels - break_mel)))
    bands = torch.linspace(0, SAMPLE_RATE / 2, WINDOW // 2 + 1, dtype=torch.float64)
    low, middle, high = (edges[i : i + bins, None] for i in range(3))
    triangles = torch.minimum((bands - low) / (middle - low), (high - bands) / (high - middle)).clamp(min=0)
    return (triangles * 2 / (high - low)).to(device=device, dtype=dtype)


def log_mel(samples: Tensor, *, bins: int = 80, length: int | None = None) -> Tensor:
    """The log-mel spectrogram that Whisper reads (arXiv 2212.04356); the logarithm is of base 10.

    Args:
        samples: [..., T] at 16 kHz, floats from -1 to 1.
        bins: Mel bins, 80 or 128 by the model.
        length: Samples to which the sound is cut or padded with silence before; the published models read 30 s. None
            pads it to the next multiple of 320 samples, two frames, which are one token.

    Returns:
        [..., bins, frames] in the dtype of the samples; a frame is 10 ms. Values are at most 8 below the loudest of
        their clip before they are scaled as (x + 4) / 4.

    Raises:
        ValueError: There are no samples, they are no floats, or the length is no such multiple.
    """
    if not samples.is_floating_point():
        raise ValueError(f"samples must be floats from -1 to 1, [..., T], not {samples.dtype}.")
    token = 2 * HOP
    if length is None:
        length = -(-samples.shape[-1] // token) * token
    if length % token or not length or not samples.shape[-1]:
        raise ValueError(
            f"There are {samples.shape[-1]} samples and length is {length}; there must be samples, and a length is a "
            f"multiple of {token}, which is one token."
        )
    samples = F.pad(samples[..., :length], (0, max(length - samples.shape[-1], 0)))
    window = torch.hann_window(WINDOW, dtype=samples.dtype, device=samples.device)
    flat = samples.reshape(-1, samples.shape[-1])
    bands = torch.stft(flat, WINDOW, HOP, window=window, return_complex=True)[..., :-1]  # the last is half a frame
    power = bands.real.square() + bands.imag.square()
    mel = mel_filters(bins, dtype=samples.dtype, device=samples.device) @ power
    log = mel.clamp(min=1e-10).log10()
    log = torch.maximum(log, log.amax((1, 2), keepdim=True) - 8)
    return ((log + 4) / 4).reshape(*samples.shape[:-1], *log.shape[1:])


def frame_rows(
    clips: Sequence[Tensor], config: AudioConfig, *, length: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Packs mel spectrograms into rows of tokens for `fnmodels.prepare`.

    A token is what two convolutions, the second of stride 2, read for one of their outputs: frames 2t - 2 to 2t + 2,
    zeros outside of its clip. So tokens may stand in any order, and clips do not see each other.

    Args:
        clips: Spectrograms [bins, 2 T] of T tokens each.
        config: The config of the audio encoder.
        length: Tokens in a row, into which clips are packed in their order; None: each clip has a row to itself. Either
            way clip i is document i of `fnmodels.documents(segment_ids)`.

    Returns:
        (frames [B, S, 5 bins], positions [B, S], segment_ids [B, S]); rows are padded at the end, with segment 0.

    Raises:
        ValueError: A clip does not fit in a row or has an odd number of frames, or there are no clips.
    """
    return packed_tokens([_tokens(mel, i, config.num_mel_bins) for i, mel in enumerate(clips)], length, "frame_rows")


def causal_rows(
    clips: Sequence[Tensor], config: AudioConfig, *, length: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `frame_rows`, for convolutions that read no later frame (Voxtral Realtime): frames 2t - 3 to 2t + 1.

    Args:
        clips: Spectrograms [bins, 2 T] of T tokens each.
        config: The encoder's Config.
        length: The tokens of a row; None puts each clip in a row of its own.

    Returns:
        (frames [B, S, 5 bins], positions [B, S], segment_ids [B, S]).

    Raises:
        ValueError: For a clip of another shape or longer than a row, and without clips.
    """
    return packed_tokens(
        [_tokens(mel, i, config.num_mel_bins, 3) for i, mel in enumerate(clips)], length, "causal_rows"
    )


def chunk_tokens(mel: Tensor, index: int, bins: int) -> int:
    """The tokens of the spectrogram [bins, T] of clip `index`: 13 for each second, and one for 8 frames of the rest."""
    if not isinstance(mel, Tensor) or mel.ndim != 2 or mel.shape[0] != bins or not mel.shape[1]:
        shown = list(mel.shape) if isinstance(mel, Tensor) else f"a {type(mel).__name__}"
        raise ValueError(f"Clip {index} must be a log-mel spectrogram [{bins}, frames], not {shown}.")
    seconds, rest = divmod(mel.shape[1], CHUNK)
    return seconds * CHUNK_TOKENS + -(-rest // 8)


def chunk_rows(
    clips: Sequence[Tensor], config: AudioConfig, *, length: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of mel spectrograms for an encoder that convolves seconds one by one (Qwen3-ASR), as `frame_rows`.

    Args:
        clips: [bins, T] at 100 frames a second; the last second is padded with zeros.
        config: The encoder's Config.
        length: The tokens of a row; None puts each clip in a row of its own.

    Returns:
        (frames [B, S, 15 bins], positions [B, S], segment_ids [B, S]).

    Raises:
        ValueError: For a clip of another shape or longer than a row, and without clips.
    """
    return packed_tokens([_chunked(mel, i, config.num_mel_bins) for i, mel in enumerate(clips)], length, "chunk_rows")


def _chunked(mel: Tensor, index: int, bins: int) -> Tensor:
    """The tokens [T, 15 bins] of a spectrogram [bins, frames]; token t of a second reads frames 8 t - 7 to 8 t + 7."""
    count = chunk_tokens(mel, index, bins)
    seconds = F.pad(mel, (0, -mel.shape[1] % CHUNK)).unflatten(1, (-1, CHUNK))
    read = F.pad(seconds, (7, 4)).unfold(2, CHUNK_REACH, 8)  # [bins, seconds, 13, 15]
    return read.permute(1, 2, 3, 0).flatten(2).flatten(0, 1)[:count]


def _tokens(mel: Tensor, index: int, bins: int, before: int = 2) -> Tensor:
    """The tokens [T, 5 bins] of a spectrogram [bins, 2 T], each from `before` frames before 2 t on."""
    if mel.ndim != 2 or mel.shape[0] != bins or mel.shape[1] % 2 or not mel.shape[1]:
        raise ValueError(f"Clip {index} must be [{bins}, frames] with an even number of frames, not {list(mel.shape)}.")
    return F.pad(mel, (before, 3 - before)).unfold(1, REACH, 2).permute(1, 2, 0).flatten(1)


def check_spectrum(clip: object, index: int, bins: int) -> int:
    """The frames of the spectrum [bins, frames] of clip `index`. ValueError for another shape."""
    if not isinstance(clip, Tensor) or clip.ndim != 2 or clip.shape[0] != bins or not clip.shape[1]:
        shown = list(clip.shape) if isinstance(clip, Tensor) else f"a {type(clip).__name__}"
        raise ValueError(f"Clip {index} must be a spectrum [{bins}, frames], not {shown}.")
    return clip.shape[1]


def spectrum_rows(
    clips: Sequence[Tensor], config: AudioConfig, *, length: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of spectra for an encoder that reads a frame as a token (Granite Speech), as `frame_rows`.

    Args:
        clips: [bins, frames].
        config: The encoder's Config.
        length: The tokens of a row; None puts each clip in a row of its own.

    Returns:
        (frames [B, S, bins], positions [B, S], segment_ids [B, S]).

    Raises:
        ValueError: For a clip of another shape or longer than a row, and without clips.
    """
    for index, clip in enumerate(clips):
        check_spectrum(clip, index, config.num_mel_bins)
    return packed_tokens([clip.mT for clip in clips], length, "spectrum_rows")


def windows(positions: Tensor, segment_ids: Tensor, size: int) -> Tensor:
    """As `groups`, with the last group of a clip filled up with (-1, -1): int64 [groups, size, 2]."""
    clips = torch.stack((torch.arange(len(positions), device=positions.device)[:, None] + 0 * segment_ids, segment_ids))
    row, slot = (segment_ids > 0).nonzero().unbind(-1)
    _, clip, counts = clips[:, row, slot].unique(dim=1, return_inverse=True, return_counts=True)
    of_clips = -(-counts // size)
    at, found = positions[row, slot], torch.full((int(of_clips.sum()), size, 2), -1, device=positions.device)
    found[(of_clips.cumsum(0) - of_clips)[clip] + at // size, at % size] = torch.stack((row, slot), -1)
    return found


def groups(positions: Tensor, segment_ids: Tensor, size: int) -> Tensor:
    """The (row, slot) of the tokens of every group of `size` in a row: int64 [groups, size, 2], clip after clip.

    positions, segment_ids [B, S]: those of `frame_rows`; tokens of segment 0 are in no group, and those after a clip's
    last whole group neither. Reads values: not for use in transforms.
    """
    found = (segment_ids > 0).nonzero()
    b, s = found.unbind(-1)
    keys = (positions[b, s], segment_ids[b, s], b)
    order = torch.arange(len(found), device=found.device)
    for key in keys:
        order = order[key[order].argsort(stable=True)]
    found, (at, clip, row) = found[order], (key[order] for key in keys)
    _, counts = torch.stack((row, clip)).unique_consecutive(dim=1, return_counts=True)
    whole = (counts // size * size).repeat_interleave(counts)
    return found[at < whole].unflatten(0, (-1, size))
