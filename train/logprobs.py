"""What a policy says about each token: its log-probability and the entropy it was drawn from, with one alignment.

Everything here is aligned as the labels are: entry [b, t] speaks of labels[b, t], the token predicted AT t. So nothing
is shifted again downstream, in a packed row as in a padded one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import fnmodels
from fnmodels.mask import Layout
from fnmodels.ops.attention import Kernel
from fnmodels.ops.experts import Experts
from fnmodels.tree import Tree

from .chunks import per_token
from .loss import CHUNK, IGNORE, check_labels, hidden_states


def token_logprobs(
    params: Tree,
    batch: Mapping[str, Tensor],
    *,
    config: Any,
    temperature: float = 1.0,
    kernel: Kernel = "auto",
    layout: Layout | None = None,
    layer_fn: Any = None,
    chunk: int | None = CHUNK,
    length: int | Tensor | None = None,
    experts: str | Experts = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, entropy, valid), each [B, S]: nats in fp32 at least, 0 where `valid` (labels that are not -100) is False.

    batch, kernel, layout, layer_fn, length, experts: as in `next_token_loss`. temperature: divides the logits, as in
    sampling. chunk: how many tokens' logits [chunk, V] are held at once, in the backward too; None: all, in plain
    operations.
    """
    how: dict[str, Any] = {"kernel": kernel, "layout": layout, "layer_fn": layer_fn, "length": length}
    x = hidden_states(params, batch, config=config, **how, experts=experts)
    return head_logprobs(params, x, batch["labels"], config=config, temperature=temperature, chunk=chunk)


def head_logprobs(
    params: Tree, x: Tensor, labels: Tensor, *, config: Any, temperature: float = 1.0, chunk: int | None = CHUNK
) -> tuple[Tensor, Tensor, Tensor]:
    """As `token_logprobs`, from hidden states x [B, S, D] (before the final norm) and labels [B, S]."""
    check_labels(labels, x.shape[:-1], "hidden states")
    family = fnmodels.family_of(config)

    def one(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        # The head takes [B, S, D]: a chunk is a row of its own.
        rows = x if x.ndim == 3 else x[None]
        logits = family.unembed(params, rows, config=config).reshape(*labels.shape, -1)
        return logprobs(logits, labels, temperature=temperature)

    logp, entropy = per_token(one, (x, labels), labels.shape, chunk)
    return logp, entropy, labels != IGNORE


def logprobs(logits: Tensor, labels: Tensor, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """(log-probability of the label, entropy of the distribution), [...] in nats, of logits [..., V].

    Both are 0 where the label is -100.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0.")
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    all_logp = torch.log_softmax(wide if temperature == 1 else wide / temperature, -1)
    valid = labels != IGNORE
    logp = all_logp.gather(-1, torch.where(valid, labels, 0)[..., None])[..., 0]
    # A token of probability 0 (logit -inf) adds nothing: 0 log 0 is 0, and so is its gradient.
    terms = torch.where(all_logp.isinf(), 0.0, all_logp)
    entropy = -(all_logp.exp() * terms).sum(-1)
    return torch.where(valid, logp, 0.0), torch.where(valid, entropy, 0.0)


def document_sums(values: Tensor, segment_ids: Tensor, documents: int) -> Tensor:
    """[B, documents]: `values` [B, S] summed over each document 1..documents of each row (0 where there is none)."""
    if values.shape != segment_ids.shape:
        raise ValueError(
            f"values are {list(values.shape)}, segment_ids {list(segment_ids.shape)}; both must be [B, S]."
        )
    sums = values.new_zeros(values.shape[0], documents + 1).scatter_add(1, segment_ids.clamp(min=0), values)
    return sums[:, 1:]
