"""Log-probabilities of several targets at each token, as distillation from the likeliest tokens of a teacher reads."""

from collections.abc import Callable, Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from fnmodels.inputs.packing import IGNORE
from fnmodels.models.common.family import DecoderConfig
from fnmodels.models.common.registry import text_config
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.invariant.rows import invariant_rows
from fnmodels.options import ForwardKwargs, ForwardOptions
from fnmodels.tree import Tree
from train.losses.batch_checks import check_batch
from train.losses.cross_entropy import check_targets
from train.losses.lm_head import head_logits
from train.losses.logprobs import token_logprobs
from train.losses.next_token import model_states
from train.losses.output_loss import OutputLoss, logprob_loss
from train.losses.token_chunks import chunk_of, per_token

TARGETS = "targets"  # the entry [B, S, K] of a batch


def target_logprobs(
    params: Tree, batch: Mapping[str, Tensor], *, config: DecoderConfig, **options: Unpack[ForwardKwargs]
) -> Tensor:
    """The log-probability of each target.

    Args:
        params: The parameters of the model, in one process.
        batch: That of `token_logprobs`, with targets, int64 [B, S, K]: ids that are predicted at each token, or -100.
        config: The model's config; that of the whole model for a batch with images.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        Nats [B, S, K] in fp32 at least, 0 where the target is -100.

    Raises:
        ValueError: A target lies outside the vocabulary.
    """
    given, text, targets = ForwardOptions(**options), text_config(config), batch[TARGETS]
    check_targets(targets, text.vocab_size, TARGETS)
    x = model_states(params, batch, config=config, length=None, options=given).x

    def one(x: Tensor, targets: Tensor) -> tuple[Tensor]:
        with invariant_rows(given.invariant):
            logits = head_logits(params, x, text)
        every = torch.log_softmax(upcast(logits), -1)
        valid = targets != IGNORE
        return (torch.where(valid, every.gather(-1, torch.where(valid, targets, 0)), 0.0),)

    chunk = chunk_of("auto", text.vocab_size, x.device, x.dtype)
    return per_token(one, (x, targets), targets.shape[:-1], chunk)[0]


def logprobs_of(params: Tree, batch: Mapping[str, Tensor], run: Mapping[str, Any]) -> Tensor:
    """The log-probabilities of the labels [B, S], or of the targets [B, S, K] where the batch has them.

    run: the keywords by which losses run the model.
    """
    return target_logprobs(params, batch, **run) if TARGETS in batch else token_logprobs(params, batch, **run)[0]


def loss_of(
    function: Callable[..., tuple[Any, ...]], batch: Mapping[str, Tensor], run: Mapping[str, Any]
) -> OutputLoss:
    """The loss function(logp, entropy, batch) -> (sum, count[, aux]) of batches as this one, in one process.

    Of several targets logp is [B, S, K], and the entropy is empty, for none is computed.
    """
    if TARGETS not in batch:
        return logprob_loss(function, **run)

    def outputs(params: Tree, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"logp": target_logprobs(params, batch, **run)}

    return OutputLoss(
        outputs,
        lambda found, batch: function(found["logp"], found["logp"].new_empty(0), batch),
        lambda batch, config, _: check_batch(batch, config),
    )
