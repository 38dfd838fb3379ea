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
    """Corrupts tokens for masked language modelling (BERT, arXiv 1810.04805), by the generator's state alone.

    `train.next_token_loss` reads the result: its labels are the targets at each position, whatever they are.

    Args:
        tokens: int64 [B, S].
        segment_ids: int64 [B, S]; padding, 0 or less, is never chosen.
        generator: The only source of randomness.
        mask_id: The id of the mask token.
        vocab_size: Random tokens are drawn from 0 to this, exclusive.
        rate: The probability that a token is chosen.
        kept: The share of chosen tokens that are unchanged.
        random: The share of chosen tokens that become a random token; the others become `mask_id`.
        special_ids: Ids that are never chosen.

    Returns:
        (corrupted tokens, labels), each int64 [B, S]; the labels of chosen tokens are the original ones, all others
        -100.

    Raises:
        ValueError: A share is below 0, or rate or kept + random is above 1.
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
