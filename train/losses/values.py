"""Losses of value and reward heads, and generalized advantage estimates.

    config, params = P.new_head(config, params, head="tokens", num_labels=1)             # a critic
    values = functools.partial(token_values, config=config)
    loss = OutputLoss(lambda params, batch: {"values": values(params, batch)}, judge)    # judge calls `value_loss`

A reward model is the value of each document's last token: `fnmodels.pool(values[..., None], documents, how="last")`.
"""

from collections.abc import Mapping
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.models.common.decoder import scores
from fnmodels.models.common.family import DecoderConfig, field_of
from fnmodels.ops.dtypes import upcast
from fnmodels.options import ForwardKwargs, ForwardOptions
from fnmodels.tree import Tree

from .next_token import model_states
from .policy import MetricSums, same_shape
from .vocab_parallel import Vocab


def token_values(
    params: Tree,
    batch: Mapping[str, Tensor],
    *,
    config: DecoderConfig,
    length: int | Tensor | None = None,
    **options: Unpack[ForwardKwargs],
) -> Tensor:
    """The value of each token, from a model with a head of one label.

    Args:
        params: The parameters of the model.
        batch: tokens, positions and segment_ids, each [B, S]; labels are not read.
        config: The model's config, with head="tokens" and one label.
        length: The length that length-dependent rotary scalings read, see `fnmodels.prepare`.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        [B, S] in fp32 at least, 0 at padding.

    Raises:
        ValueError: The model has another head.
    """
    head, labels = field_of(config, "head"), field_of(config, "num_labels")
    if head == "lm" or labels != 1:
        raise ValueError(
            f"Values need a head with one label, and this model's head is {head!r} with {labels}; "
            'params.new_head(config, params, head="tokens", num_labels=1) makes one.'
        )
    found = model_states(params, batch, config=config, length=length, options=ForwardOptions(**options))
    values = scores(found.params, found.x, config=config)
    embedding = params.get("embed_tokens")
    if isinstance(embedding, Vocab):
        values = embedding.region.join(values)
    return upcast(values[..., 0]).where(batch["segment_ids"] > 0, 0)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, valid: Tensor, *, clip: float | None = 0.2
) -> tuple[Tensor, Tensor, MetricSums]:
    """PPO's clipped value loss per token: half the larger squared error, of the value or of the clipped one.

    Args:
        values: The values that are trained, [B, S].
        old_values: Those of the model that estimated the advantages, [B, S].
        returns: The targets, [B, S], see `advantages`.
        valid: bool [B, S], the tokens that count.
        clip: Values count as at most this far from the old ones; None: not clipped.

    Returns:
        The sum over valid tokens, their number, and {value, clipped} summed.

    Raises:
        ValueError: Shapes differ, or clip is not above 0.
    """
    same_shape(values=values, old_values=old_values, returns=returns, valid=valid)
    if clip is not None and not clip > 0:
        raise ValueError(f"clip is {clip}; it must be above 0, or None.")
    values, old, returns = (torch.where(valid, t, 0.0) for t in (values, old_values.detach(), returns.detach()))
    plain = (values - returns) ** 2
    limited = plain if clip is None else (values.clamp(old - clip, old + clip) - returns) ** 2
    metrics = {"value": values, "clipped": limited > plain}
    return 0.5 * torch.maximum(plain, limited).sum(), valid.sum(), {n: m.detach().sum() for n, m in metrics.items()}


def reward_loss(chosen: Tensor, rejected: Tensor, *, margin: Tensor | float = 0.0) -> tuple[Tensor, Tensor, MetricSums]:
    """The loss of a reward model on pairs (Bradley-Terry): -log sigmoid(chosen - rejected - margin).

    Args:
        chosen: The scores [N] of the preferred answers.
        rejected: The scores [N] of the other answers.
        margin: How much better the chosen answer is labelled to be, a number or [N].

    Returns:
        The sum, the number of pairs, and {chosen, rejected, accuracy} summed.

    Raises:
        ValueError: Shapes differ.
    """
    same_shape(chosen=chosen, rejected=rejected)
    count = torch.tensor(chosen.numel(), device=chosen.device)
    metrics = {"chosen": chosen, "rejected": rejected, "accuracy": chosen > rejected}
    losses = -F.logsigmoid(chosen - rejected - margin)
    return losses.sum(), count, {name: m.detach().sum() for name, m in metrics.items()}


def advantages(
    rewards: Tensor, values: Tensor, valid: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438), without a gradient.

    Args:
        rewards: [B, S], one answer per row.
        values: [B, S], of the value model.
        valid: bool [B, S]; other entries are skipped, so that an answer may be interrupted by a tool.
        gamma: The discount per token.
        lam: Trades bias (0) for variance (1).

    Returns:
        (advantages, returns), each [B, S], 0 where not valid; returns are advantages + values.

    Raises:
        ValueError: Shapes differ.
    """
    same_shape(rewards=rewards, values=values, valid=valid)
    rewards, values = upcast(rewards.detach()), upcast(values.detach())
    after, later, found = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0]), []
    for column in range(values.shape[1] - 1, -1, -1):
        error = rewards[:, column] + gamma * after - values[:, column]
        gain = error + gamma * lam * later
        here = valid[:, column]
        after, later = values[:, column].where(here, after), gain.where(here, later)
        found.append(gain)
    gains = torch.stack(found[::-1], 1)
    return gains.where(valid, 0), (gains + values).where(valid, 0)
