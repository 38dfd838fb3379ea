"""Log-probability and entropy of each token under a policy.

All outputs are aligned with the labels: entry [b, t] is for labels[b, t], the token predicted at t. Nothing is shifted
downstream, in packed rows or padded ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.overrides import BaseTorchFunctionMode

from fnmodels.inputs.packing import IGNORE
from fnmodels.models.common.family import DecoderConfig
from fnmodels.models.common.registry import text_config
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.invariant.rows import invariant_rows
from fnmodels.options import ForwardKwargs, ForwardOptions
from fnmodels.tree import Tree
from train.run_options import Balance

from .cross_entropy import check_labels, check_targets
from .lm_head import head_logits, head_name
from .next_token import model_states
from .softmax_stats import Scores, check_temperature, scores
from .token_chunks import chunk_of, per_token
from .vocab_parallel import opened


def token_logprobs(
    params: Tree,
    batch: Mapping[str, Tensor],
    *,
    config: DecoderConfig,
    temperature: float | Tensor = 1.0,
    chunk: int | str | None = "auto",
    length: int | Tensor | None = None,
    **options: Unpack[ForwardKwargs],
) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probability of each label and the entropy of its distribution, from parameters.

    Args:
        params: The parameters of the model.
        batch: tokens, positions, segment_ids and labels, each [B, S]; labels[b, t] is the token predicted at t, -100
            ignored. With images also image_features and is_image, see `train.Batch`.
        config: The model's config; that of the whole model for a batch with images, whose text `params` are of.
        temperature: Divides the logits, as in sampling; a number, or a tensor [B] or [B, S].
        chunk: Tokens whose logits [chunk, V] exist at a time, in the backward pass too; "auto" as for `head_loss`;
            None: all, in plain operations.
        length: The length that length-dependent rotary scalings read, see `fnmodels.prepare`.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        (logp, entropy, valid), each [B, S]: nats in fp32 at least, 0 where `valid` (labels other than -100) is False.

    Raises:
        ValueError: The temperature is not above 0, or a required entry is missing.
    """
    given = ForwardOptions(**options)
    found = model_states(params, batch, config=config, length=length, options=given)
    how: Any = {"temperature": temperature, "chunk": chunk, "invariant": given.invariant}
    return head_logprobs(params, found.x, batch["labels"], config=text_config(config), **how)


def routed_logprobs(
    params: Tree,
    batch: Mapping[str, Tensor],
    *,
    config: DecoderConfig,
    temperature: float | Tensor = 1.0,
    chunk: int | str | None = "auto",
    length: int | Tensor | None = None,
    balance: Balance | None = None,
    **options: Unpack[ForwardKwargs],
) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """`token_logprobs` of a model with experts, with the routers' terms and sums, for losses built on them.

    A loss with another count (answers, pairs) adds `added * count / valid.sum()`.

    Args:
        params: The parameters of the model.
        batch: tokens, positions, segment_ids and labels, each [B, S]. Terms and sums cover the labels that count
            (neither -100 nor of weight 0), so mask labels that the loss does not use.
        config: The model's config.
        temperature: Divides the logits; a number, or a tensor [B] or [B, S].
        chunk: Tokens whose logits exist at a time; "auto" as for `head_loss`; None: all, in plain operations.
        length: The length that length-dependent rotary scalings read, see `fnmodels.prepare`.
        balance: Coefficients of the balance terms; None: no terms.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        logp, entropy and valid as of `token_logprobs`, [B, S] each; the balance terms for the loss's sum, 0-d with a
        gradient; and router statistics, as the aux of `next_token_loss`.

    Raises:
        ValueError: The temperature is not above 0, or the model has no experts.
    """
    terms, given = balance or Balance(), ForwardOptions(**options)
    found = model_states(params, batch, config=config, length=length, balance=terms, aux=True, options=given)
    assert found.added is not None and found.sums is not None
    how: Any = {"temperature": temperature, "chunk": chunk, "invariant": given.invariant}
    logprobs = head_logprobs(params, found.x, batch["labels"], config=text_config(config), **how)
    return *logprobs, found.added, found.sums


def head_logprobs(
    params: Tree,
    x: Tensor,
    labels: Tensor,
    *,
    config: DecoderConfig,
    temperature: float | Tensor = 1.0,
    chunk: int | str | None = "auto",
    invariant: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`token_logprobs` from hidden states.

    Args:
        params: The parameters of the model, of which the final norm and the head are read.
        x: Hidden states [B, S, D], before the final norm.
        labels: int64 [B, S], -100 ignored.
        config: The model's config.
        temperature: Divides the logits; a number, or a tensor [B] or [B, S].
        chunk: Tokens whose logits exist at a time; "auto" as for `head_loss`; None: all, in plain operations.
        invariant: Whether the head is the batch-invariant one of kernel="invariant".

    Returns:
        (logp, entropy, valid), each [B, S]: nats in fp32 at least, 0 where `valid` (labels other than -100) is False.

    Raises:
        ValueError: Labels have another shape or lie outside the vocabulary, or the temperature is not above 0.
    """
    params, x, part = opened(params, head_name(config), x)
    check_labels(labels, x.shape[:-1], "hidden states")
    check_targets(labels, config.vocab_size)
    each = (temperature_of_tokens(temperature, labels),) if isinstance(temperature, Tensor) else ()
    check_temperature(each[0] if each else temperature)
    chunk = chunk_of(chunk, config.vocab_size, x.device, x.dtype)
    plain = chunk is None or torch.compiler.is_compiling()

    def one(x: Tensor, labels: Tensor, *each: Tensor) -> tuple[Tensor, Tensor]:
        with invariant_rows(True) if invariant else _torchs_products():
            logits = head_logits(params, x, config)
        logits = logits if part is None else part.region.joined(logits)
        divisor: Any = temperature
        if each:  # one per token
            logits, divisor = upcast(logits) / each[0][..., None], 1.0
        if plain:
            return scores(logits, labels, divisor)
        found: tuple[Tensor, Tensor] = Scores.apply(logits, labels, divisor)
        return found

    logp, entropy = per_token(one, (x, labels, *each), labels.shape, chunk)
    return logp, entropy, labels != IGNORE


def temperature_of_tokens(temperature: Tensor, labels: Tensor) -> Tensor:
    """[B, S] from a temperature per row or token, 1 where labels are -100 (padding). ValueError for another shape."""
    shape = list(temperature.shape)
    if shape not in ([], [labels.shape[0]], list(labels.shape)):
        raise ValueError(
            f"temperature is {shape} beside labels {list(labels.shape)}; it must be a number, [B] or [B, S]. Over a "
            "mesh that shards rows it must come from the batch of the call, as train.logprob_loss takes it by name."
        )
    each = (temperature[:, None] if temperature.ndim == 1 else temperature).expand(labels.shape)
    return torch.where(labels == IGNORE, 1.0, each)


def logprobs(logits: Tensor, labels: Tensor, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The log-probability of each label and the entropy of its distribution, from logits.

    Args:
        logits: [..., V].
        labels: int64 [...]; both results are 0 where it is -100.
        temperature: Divides the logits.

    Returns:
        (logp, entropy), each [...] in nats.

    Raises:
        ValueError: Labels have another shape or lie outside the vocabulary, or the temperature is not above 0.
    """
    check_temperature(temperature)
    check_labels(labels, logits.shape[:-1], "logits' tokens")
    check_targets(labels, logits.shape[-1])
    return scores(logits, labels, temperature)


def _torchs_products() -> AbstractContextManager[Any]:
    """Context in which `ops.linear` is F.linear: MKL's sums of 512 terms are 2.4 times more accurate than oneDNN's.

    Policy ratios need full fp32 accuracy, and the head is a small share of a model's time.
    """
    return nullcontext() if torch.compiler.is_compiling() else BaseTorchFunctionMode()


def document_sums(values: Tensor, segment_ids: Tensor, documents: int) -> Tensor:
    """Sums values over the documents of packed rows.

    Args:
        values: [B, S].
        segment_ids: int64 [B, S], which document of its row a token belongs to, from 1; 0 is padding.
        documents: The number of documents per row in the result.

    Returns:
        [B, documents]: the sums over documents 1 to `documents` of each row; 0 for an absent document.

    Raises:
        ValueError: A shape is not [B, S].
    """
    if values.shape != segment_ids.shape:
        raise ValueError(
            f"values are {list(values.shape)}, segment_ids {list(segment_ids.shape)}; both must be [B, S]."
        )
    sums = values.new_zeros(values.shape[0], documents + 1).scatter_add(1, segment_ids.clamp(min=0), values)
    return sums[:, 1:]
