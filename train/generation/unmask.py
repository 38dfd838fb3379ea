"""Writing with masked diffusion language models: LLaDA, Dream and SDAR (arXiv 2502.09992, section 2.4)."""

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

import fnmodels
from fnmodels.options import ForwardKwargs
from fnmodels.tree import Tree, leaves
from train.losses.masked_tokens import check_denoises


@torch.no_grad()
def unmask(
    params: Tree,
    config: Any,
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    steps: int,
    block: int | None = None,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    **options: Unpack[ForwardKwargs],
) -> list[list[int]]:
    """Answers whose tokens are all masks at first, and are found in `steps` steps per block, the surest tokens first.

    Args:
        params: The parameters of the model.
        config: The model's config.
        prompts: Token ids of each row, at least one.
        length: Tokens of each answer.
        steps: Forward passes for each block: in each, an equal share of its masks is replaced.
        block: Tokens of a block, which is complete before the next one begins; None: the model's blocks (SDAR), counted
            from the prompt's first token, or else the whole answer.
        temperature: Divides the logits of drawn tokens; 0: the most probable token.
        generator: The source of randomness, which a temperature needs.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        The answers, `length` token ids each.

    Raises:
        ValueError: A prompt is empty, a size is below 1, the temperature is negative or has no generator, or blocks are
            given to a model that has its own, or the model is none of masked diffusion.
    """
    check_denoises(config)
    own = config.block_size
    for name, size in (("length", length), ("steps", steps), ("block", 1 if block is None else block)):
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1.")
    if temperature < 0 or (temperature > 0 and generator is None):
        raise ValueError(f"temperature is {temperature}; it is 0, or above 0 with a generator to draw from.")
    if own is not None and block is not None:
        raise ValueError(f"block is {block}, but the model has blocks of {own} tokens: leave block out.")
    if not prompts or not all(prompts):
        raise ValueError("prompts must be at least one list of token ids, none of them empty.")
    device, sizes = leaves(params)[0].device, torch.tensor([len(prompt) for prompt in prompts])
    tokens = torch.full((len(prompts), int(sizes.max()) + length), config.mask_token_id)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.as_tensor(prompt)
    tokens, places, first = tokens.to(device), torch.arange(tokens.shape[1], device=device), sizes.to(device)[:, None]
    ids = (places < first + length).long()
    pending = (places >= first) & (ids > 0)
    part = (places - first) // (block or length) if own is None else places // own - first // own
    for index in range(int(part[pending].max()) + 1):
        for left in range(steps, 0, -1):
            asked = pending & (part == index)
            if not asked.any():
                break
            inputs, masks, freqs_cis = fnmodels.prepare(config, tokens, segment_ids=ids)
            logits = fnmodels.forward(params, inputs, masks, freqs_cis, config=config, **options).float()
            logits = torch.cat((logits[:, :1], logits[:, :-1]), 1) if config.shift else logits
            found, sure = _drawn(logits, config.mask_token_id, temperature, generator)
            share = -(-asked.sum(1, keepdim=True) // left)
            ranks = sure.masked_fill(~asked, -1).argsort(dim=1, descending=True, stable=True).argsort(1)
            chosen = asked & (ranks < share)
            tokens, pending = found.where(chosen, tokens), pending & ~chosen
    return [row[size : size + length].tolist() for row, size in zip(tokens, sizes.tolist(), strict=True)]


def _drawn(logits: Tensor, mask: int, temperature: float, generator: Any) -> tuple[Tensor, Tensor]:
    """(a token for each place, never the mask token; its probability at temperature 1), each [B, S]."""
    shares = logits.index_fill(-1, torch.tensor([mask], device=logits.device), -torch.inf).softmax(-1)
    if temperature == 0:
        best = shares.max(-1)
        return best.indices, best.values
    noisy = (shares.log() / temperature).softmax(-1).flatten(0, 1)
    found = torch.multinomial(noisy, 1, generator=generator).view(logits.shape[:2])
    return found, shares.gather(-1, found[..., None])[..., 0]
