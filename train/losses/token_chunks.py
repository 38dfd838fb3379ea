"""Per-token functions applied to chunks of tokens: memory O(chunk x V) instead of O(tokens x V)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

PerToken = Callable[..., tuple[Tensor, ...]]


def per_token(
    function: PerToken, tensors: Sequence[Tensor], shape: torch.Size, chunk: int | None
) -> tuple[Tensor, ...]:
    """function(*tensors) in chunks of `chunk` tokens; tensors and results have the token dimensions `shape` in front.

    With gradients enabled each chunk is recomputed in the backward pass, so intermediates (logits) exist for one chunk
    at a time. chunk=None is one plain call, for torch.func transforms, which activation checkpointing does not support.
    ValueError for a chunk below 1.
    """
    if chunk is None:
        return function(*tensors)
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be a number of tokens, at least 1, or None.")
    flat = [t.flatten(0, len(shape) - 1) for t in tensors]
    again = torch.is_grad_enabled()
    each = zip(*(t.split(chunk) for t in flat), strict=True)
    parts = [_recomputed(function, part) if again else function(*part) for part in each]
    return tuple(torch.cat(results).unflatten(0, shape) for results in zip(*parts, strict=True))


def _recomputed(function: PerToken, part: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    try:
        found: tuple[Tensor, ...] = checkpoint(function, *part, use_reentrant=False)
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        raise RuntimeError("Chunks over tokens do not go through torch.func's transforms: pass chunk=None.") from error
    return found
