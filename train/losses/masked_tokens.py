"""Corruption of tokens for masked language modeling (arXiv 1810.04805, section 3.1), and masked diffusion.

The loss of masked diffusion language models is that of arXiv 2406.07524 and 2502.09992: LLaDA and Dream.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from fnmodels.inputs.packing import IGNORE
from fnmodels.inputs.values import readable
from fnmodels.options import ForwardKwargs
from fnmodels.tree import Tree
from train.batch import check_entries

from .next_token import next_token_loss


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


def diffusion_masks(
    batch: Mapping[str, Tensor], generator: torch.Generator, *, config: Any, least: float = 1e-3
) -> dict[str, Tensor]:
    """Masks tokens of each document at a rate of its own, for `masked_diffusion_loss`.

    Args:
        batch: tokens, positions, segment_ids and labels, int64 [B, S], as for `train.next_token_loss`: a token may be
            masked if it is the label of the token before, so that of conversations the answers are.
        generator: The only source of randomness.
        config: The model's config.
        least: The smallest rate; rates are uniform between it and 1.

    Returns:
        The batch with masked "tokens"; with "labels", the tokens that were masked, at the places where the model says
        what they are; with "weights", fp32 [B, S], 1 / rate of the document; and with "maskable", bool [B, S].

    Raises:
        ValueError: An entry is missing, least is not above 0 and at most 1, or the model reads blocks (SDAR), whose
            loss needs each block beside those before it without masks.
    """
    check_entries(batch, "tokens", "positions", "segment_ids", "labels")
    if not 0 < least <= 1:
        raise ValueError(f"least is {least}; it must be above 0 and at most 1.")
    check_denoises(config)
    if config.block_size is not None:
        raise ValueError(
            f"The model has blocks of {config.block_size} tokens, each of which is trained beside the blocks before it "
            "without masks; this loss masks all of a document. Take a LLaDA or a Dream."
        )
    tokens, ids = batch["tokens"], batch["segment_ids"]
    device, (rows, size) = tokens.device, tokens.shape
    if tokens.numel() and readable(ids) and int(ids.max()) > size:
        raise ValueError(
            f"segment_ids has {int(ids.max())} in rows of {size} tokens; documents are numbered from 1 in each row."
        )
    rates = least + (1 - least) * torch.rand(rows, size + 1, generator=generator, device=device)
    rate = rates.gather(1, ids.clamp(min=0))  # documents count from 1, at most one per token
    maskable = (batch["labels"].roll(1, 1) != IGNORE) & (batch["positions"] > 0) & (ids > 0)
    masked = maskable & (torch.rand(tokens.shape, generator=generator, device=device) < rate)
    labels = tokens.where(masked, IGNORE).roll(-config.shift, 1)  # no row begins with a masked token
    weights = (1 / rate).where(labels != IGNORE, 0.0)
    made = {"tokens": tokens.masked_fill(masked, config.mask_token_id), "labels": labels, "weights": weights}
    return {**batch, **made, "maskable": maskable}


def check_denoises(config: Any) -> None:
    """ValueError unless the config is of a language model of masked diffusion."""
    if not hasattr(config, "mask_token_id") or not hasattr(config, "block_size"):
        raise ValueError(
            f"A model of type {config.model_type!r} is no language model of masked diffusion, such as LLaDA, Dream or "
            "SDAR: its config has no mask token."
        )


def masked_diffusion_loss(
    params: Tree, batch: Mapping[str, Tensor], *, config: Any, **options: Unpack[ForwardKwargs]
) -> tuple[Tensor, Tensor]:
    """The bound of the negative log-likelihood of the documents, estimated at one rate of masks for each.

    Args:
        params: The parameters of the model.
        batch: What `diffusion_masks` returns.
        config: The model's config.
        **options: Keywords of `train.next_token_loss`.

    Returns:
        The sum over masked tokens of cross entropy times weight, 0-d in fp32 at least, and the number of tokens that
        might have been masked, 0-d int64.

    Raises:
        ValueError: An entry is missing, or labels lie outside the vocabulary.
    """
    check_entries(batch, "tokens", "labels", "weights", "maskable")
    total, *_ = next_token_loss(params, batch, config=config, **options)
    return total, batch["maskable"].sum()
