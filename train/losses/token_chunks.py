"""A function of each token, over the tokens in chunks: memory O(chunk x V) where all at once would be O(tokens x V)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

PerToken = Callable[..., tuple[Tensor, ...]]


def per_token(
    function: PerToken, tensors: Sequence[Tensor], shape: torch.Size, chunk: int | None
) -> tuple[Tensor, ...]:
    """function(*tensors), whose tensors and results lead with the token dimensions `shape`, `chunk` tokens at a time.

    Where a gradient is wanted each chunk is computed again in the backward, so what lies between tokens and results
    (logits) exists for one chunk only. chunk=None is one plain call: the form for torch.func's transforms, which
    torch's checkpointing does not go through.
    """
    if chunk is None:
        return function(*tensors)
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be a number of tokens, at least 1, or None.")
    flat = [t.flatten(0, len(shape) - 1) for t in tensors]
    again = torch.is_grad_enabled()
    parts = [_recomputed(function, part) if again else function(*part) for part in _split(flat, chunk)]
    return tuple(torch.cat(results).unflatten(0, shape) for results in zip(*parts, strict=True))


def _recomputed(function: PerToken, part: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    try:
        found: tuple[Tensor, ...] = checkpoint(function, *part, use_reentrant=False)
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        raise RuntimeError("Chunks over tokens do not go through torch.func's transforms: pass chunk=None.") from error
    return found


def _split(tensors: Sequence[Tensor], chunk: int) -> list[tuple[Tensor, ...]]:
    return list(zip(*(t.split(chunk) for t in tensors), strict=True))
