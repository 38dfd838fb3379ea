"""What a policy says about each token: its log-probability and the entropy it was drawn from, with one alignment.

Everything here is aligned as the labels are: entry [b, t] speaks of labels[b, t], the token predicted AT t. So nothing
is shifted again downstream, in a packed row as in a padded one.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.overrides import BaseTorchFunctionMode

import fnmodels
from fnmodels.inputs.packing import IGNORE
from fnmodels.options import ForwardKwargs, ForwardOptions
from fnmodels.tree import Tree

from .cross_entropy import check_labels
from .lm_head import CHUNK, head_name
from .moe_balance import Balance
from .next_token import model_states
from .softmax_stats import Scores, scores
from .token_chunks import per_token
from .vocab_parallel import Vocab, opened


def token_logprobs(
    params: Tree,
    batch: Mapping[str, Tensor],
    *,
    config: Any,
    temperature: float = 1.0,
    chunk: int | None = CHUNK,
    length: int | Tensor | None = None,
    **options: Unpack[ForwardKwargs],
) -> tuple[Tensor, Tensor, Tensor]:
    """(logp, entropy, valid), each [B, S]: nats in fp32 at least, 0 where `valid` (labels that are not -100) is False.

    batch, length, options: as in `next_token_loss`. temperature: divides the logits, as in sampling. chunk: how many
    tokens' logits [chunk, V] are held at once, in the backward too; None: all, in plain operations.
    """
    found = model_states(params, batch, config=config, length=length, options=ForwardOptions(**options))
    return head_logprobs(params, found.x, batch["labels"], config=config, temperature=temperature, chunk=chunk)


def routed_logprobs(
    params: Tree,
    batch: Mapping[str, Tensor],
    *,
    config: Any,
    temperature: float = 1.0,
    chunk: int | None = CHUNK,
    length: int | Tensor | None = None,
    balance: Balance | None = None,
    **options: Unpack[ForwardKwargs],
) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """(logp, entropy, valid, added, sums): `token_logprobs` of a model with experts, for losses made of it.

    added: what `balance` adds to the loss's sum, 0-d with a gradient. sums: of what the routers did, as the aux of
    `next_token_loss`. Both are of the labels that count, neither -100 nor of weight 0, so mark there what the loss does
    not learn from; a loss with another count (of answers, of pairs) adds `added * count / valid.sum()`.
    """
    terms, given = balance or Balance(), ForwardOptions(**options)
    found = model_states(params, batch, config=config, length=length, balance=terms, aux=True, options=given)
    assert found.added is not None and found.sums is not None
    logprobs = head_logprobs(params, found.x, batch["labels"], config=config, temperature=temperature, chunk=chunk)
    return *logprobs, found.added, found.sums


def head_logprobs(
    params: Tree, x: Tensor, labels: Tensor, *, config: Any, temperature: float = 1.0, chunk: int | None = CHUNK
) -> tuple[Tensor, Tensor, Tensor]:
    """As `token_logprobs`, from hidden states x [B, S, D] (before the final norm) and labels [B, S]."""
    _check(temperature)
    family, table = fnmodels.family_of(config), params.get(head_name(config))
    region = None
    if isinstance(table, Vocab):
        region = table.region
        params, x = opened(params, head_name(config), x)
    check_labels(labels, x.shape[:-1], "hidden states")
    plain = chunk is None or torch.compiler.is_compiling()

    def one(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        # The head takes [B, S, D]: a chunk is a row of its own.
        rows = x if x.ndim == 3 else x[None]
        with _torchs_products():
            logits = family.unembed(params, rows, config=config)
        logits = (logits if region is None else region.joined(logits)).reshape(*labels.shape, -1)
        if plain:
            return scores(logits, labels, temperature)
        found: tuple[Tensor, Tensor] = Scores.apply(logits, labels, temperature)
        return found

    logp, entropy = per_token(one, (x, labels), labels.shape, chunk)
    return logp, entropy, labels != IGNORE


def logprobs(logits: Tensor, labels: Tensor, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """(log-probability of the label, entropy of the distribution), [...] in nats, of logits [..., V].

    Both are 0 where the label is -100.
    """
    _check(temperature)
    check_labels(labels, logits.shape[:-1], "logits' tokens")
    return scores(logits, labels, temperature)


def _torchs_products() -> AbstractContextManager[Any]:
    """Where `ops.linear` is F.linear: of 512 terms MKL's sums are 2.4 times closer to the true ones than oneDNN's.

    What a policy's ratios are made of should have the digits that fp32 has. (The head is a small part of a model.)
    """
    return nullcontext() if torch.compiler.is_compiling() else BaseTorchFunctionMode()


def _check(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0.")


def document_sums(values: Tensor, segment_ids: Tensor, documents: int) -> Tensor:
    """[B, documents]: `values` [B, S] summed over each document 1..documents of each row (0 where there is none)."""
    if values.shape != segment_ids.shape:
        raise ValueError(
            f"values are {list(values.shape)}, segment_ids {list(segment_ids.shape)}; both must be [B, S]."
        )
    sums = values.new_zeros(values.shape[0], documents + 1).scatter_add(1, segment_ids.clamp(min=0), values)
    return sums[:, 1:]
