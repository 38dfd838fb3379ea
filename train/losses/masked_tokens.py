"""Corruption of tokens for masked language modeling (arXiv 1810.04805, section 3.1)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fnmodels.inputs.packing import IGNORE


def mask_tokens(
    tokens: Tensor,
    segment_ids: Tensor,
    generator: torch.Generator,
    *,
    mask_id: int,
    vocab_size: int,
    rate: float = 0.15,
    kept: float = 0.1,
    random: float = 0.1,
    special_ids: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """(corrupted tokens, labels), each int64 [B, S]: a function of the arguments and of the generator's state alone.

    Each token is chosen with probability `rate`, never padding (segment 0 or less) and none of `special_ids`. Of the
    chosen ones the share `kept` stays, the share `random` becomes a token drawn from the vocabulary, and the others
    become `mask_id`; their labels are the original tokens, all other labels -100. `train.next_token_loss` reads both:
    its labels are the targets at each position, whatever they are. ValueError for shares that are no probabilities.
    """
    if not (0 <= rate <= 1 and kept >= 0 and random >= 0 and kept + random <= 1):
        raise ValueError(
            f"rate is {rate}, kept {kept} and random {random}: each must be at least 0, rate at most 1, and kept + "
            "random at most 1."
        )
    drawn, part = (torch.rand(tokens.shape, generator=generator, device=tokens.device) for _ in range(2))
    others = torch.randint(vocab_size, tokens.shape, generator=generator, device=tokens.device)
    special = torch.isin(tokens, tokens.new_tensor(list(special_ids)))
    chosen = (drawn < rate) & (segment_ids > 0) & ~special
    changed = torch.where(part < kept + random, others, mask_id)
    corrupted = torch.where(chosen & (part >= kept), changed, tokens)
    return corrupted, tokens.where(chosen, IGNORE)
