"""Per-token functions applied to chunks of tokens: memory O(chunk x V) instead of O(tokens x V)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fnmodels.ops.torch_internals import transformed

PerToken = Callable[..., tuple[Tensor, ...]]

CHUNK = 512  # tokens at least
LOGITS = 2**27  # of a chunk on CUDA, where the launches for one of 512 tokens take longer than its work
# Bytes of a chunk's logits elsewhere. Each chunk adds to the gradient of the whole head in fp32, so that few chunks
# read and write less.
BYTES = 2**25


def chunk_of(chunk: int | str | None, vocabulary: int, device: torch.device, dtype: torch.dtype) -> int | None:
    """The number of tokens in a chunk: `chunk` itself, or for "auto" what suits the device and the logits' size.

    dtype: that of the logits. ValueError for anything but a number of at least 1, None or "auto".
    """
    if chunk == "auto":
        return automatic_chunk(vocabulary, device, dtype)
    if isinstance(chunk, str) or (chunk is not None and chunk < 1):
        raise ValueError(f'chunk is {chunk!r}; it must be a number of tokens, at least 1, None or "auto".')
    return chunk


def automatic_chunk(vocabulary: int, device: torch.device, dtype: torch.dtype) -> int:
    """Tokens of a chunk that suit the device and the logits' dtype."""
    logits = LOGITS if device.type == "cuda" else BYTES // dtype.itemsize
    return max(CHUNK, logits // vocabulary)


def per_token(
    function: PerToken, tensors: Sequence[Tensor], shape: torch.Size, chunk: int | None
) -> tuple[Tensor, ...]:
    """function(*tensors) in chunks of `chunk` tokens; tensors and results have the token dimensions `shape` in front.

    With gradients enabled each chunk is recomputed in the backward pass, so intermediates (logits) exist for one chunk
    at a time. chunk=None is one plain call, as are torch.func's transforms, which activation checkpointing does not
    support.
    """
    if chunk is None or transformed():
        return function(*tensors)
    flat = [t.flatten(0, len(shape) - 1) for t in tensors]
    again = torch.is_grad_enabled()
    each = zip(*(t.split(chunk) for t in flat), strict=True)
    parts = [checkpoint(function, *part, use_reentrant=False) if again else function(*part) for part in each]
    return tuple(torch.cat(results).unflatten(0, shape) for results in zip(*parts, strict=True))
