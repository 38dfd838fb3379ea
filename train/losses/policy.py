"""DPO and policy-gradient losses, and group advantages, on log-probabilities.

Inputs are aligned as in `token_logprobs`. Each loss returns (sum, count, metrics), metrics being sums over the same
tokens or pairs, so that a step over microbatches divides everything once by the global count.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.ops.dtypes import upcast

MetricSums = dict[str, Tensor]

# Upper bound of a log ratio. exp(20) = 5e8 is far beyond every clip; unbounded, exp would give inf and the gradient of
# a clipped token 0 x inf = NaN, which would invalidate the whole step.
MAX_LOG_RATIO = 20.0


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor, MetricSums]:
    """Direct preference optimization (arXiv 2305.18290): -log sigmoid(beta x (margin over the reference)).

    Args:
        chosen: Summed log-probabilities [N] of the preferred answers in nats, see `document_sums`.
        rejected: Those of the other answers, [N].
        reference_chosen: The same of the reference model, which gets no gradient, [N].
        reference_rejected: Those of the other answers, [N].
        beta: The strength of the penalty for leaving the reference.
        label_smoothing: The probability that a preference is wrong (conservative DPO, appendix of arXiv 2305.18290).

    Returns:
        The sum, the number of pairs, and summed metrics: the rewards beta x (log p - reference) of both answers, the
        margin between them, and accuracy, the number of pairs with a margin above 0.

    Raises:
        ValueError: Shapes differ, or label_smoothing is not in 0 to 1.
    """
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be at least 0 and below 1.")
    same_shape(
        chosen=chosen, rejected=rejected, reference_chosen=reference_chosen, reference_rejected=reference_rejected
    )
    better, worse = beta * (chosen - reference_chosen.detach()), beta * (rejected - reference_rejected.detach())
    margin = better - worse
    losses = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    metrics = {"chosen": better, "rejected": worse, "margin": margin, "accuracy": margin > 0}
    count = torch.tensor(chosen.numel(), device=chosen.device)
    return losses.sum(), count, {name: m.detach().sum() for name, m in metrics.items()}


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    valid: Tensor,
    *,
    clip: tuple[float, float] = (0.2, 0.2),
    dual_clip: float | None = None,
    weights: Tensor | None = None,
    reference_logp: Tensor | None = None,
    kl: float = 0.0,
    entropy: Tensor | None = None,
    entropy_bonus: float = 0.0,
) -> tuple[Tensor, Tensor, MetricSums]:
    """PPO's clipped surrogate (arXiv 1707.06347) per token, as in GRPO (arXiv 2402.03300), to be minimized.

    Divided by its count it is GRPO's token-level form (as in DAPO). For the mean over answers of their means, set
    weights to 1 / length of the answer and return the number of answers as the count; without weights that gives the
    mean over answers of their sums (arXiv 2503.20783).

    Args:
        logp: Log-probabilities of the policy that is trained, [B, S] in nats.
        old_logp: Those of the policy that sampled the tokens, [B, S].
        advantages: [B, S]; an answer's advantage is repeated over its tokens.
        valid: bool [B, S]. Other entries may be anything, NaN too.
        clip: The ratio's gradient stops below 1 - clip[0] and above 1 + clip[1] (unequal: "clip higher", arXiv
            2503.14476).
        dual_clip: The bound above for negative advantages (arXiv 1912.09729, with 3); None: no bound.
        weights: [B, S], multiply each token's loss, penalty and bonus included; None: all 1.
        reference_logp: Log-probabilities of the reference model, [B, S], for `kl`.
        kl: The coefficient of the penalty exp(r) - r - 1, r = reference_logp - logp, an unbiased estimate that is never
            negative (GRPO's equation 4).
        entropy: [B, S] in nats, for `entropy_bonus`.
        entropy_bonus: The coefficient of the entropy.

    Returns:
        The sum over valid tokens, their number, and {ratio, clipped, kl, entropy} summed without weights. Ratios and
        exp(r) are at most e^20, and have no gradient beyond.

    Raises:
        ValueError: Shapes differ, `valid` is not bool, dual_clip is not above 1, or kl or entropy_bonus is without its
            tensor.
    """
    given = {"logp": logp, "old_logp": old_logp, "advantages": advantages, "valid": valid}
    more = {"reference_logp": reference_logp, "entropy": entropy, "weights": weights}
    same_shape(**given, **{name: t for name, t in more.items() if t is not None})
    if valid.dtype != torch.bool:
        raise ValueError(f"valid is {valid.dtype}; it must say True or False of each token (torch.bool).")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip}; it must be above 1, or None.")
    if kl and reference_logp is None:
        raise ValueError(f"kl is {kl}, so reference_logp must be given.")
    if entropy_bonus and entropy is None:
        raise ValueError(f"entropy_bonus is {entropy_bonus}, so entropy must be given.")
    logp, old_logp, advantages = (torch.where(valid, t, 0.0) for t in (logp, old_logp.detach(), advantages.detach()))
    ratio = (logp - old_logp).clamp(max=MAX_LOG_RATIO).exp()
    low, high = 1 - clip[0], 1 + clip[1]
    gain, beyond = clipped_gain(ratio, advantages, low, high)
    if dual_clip is not None:
        gain = torch.where(advantages < 0, torch.maximum(gain, dual_clip * advantages), gain)
        beyond = beyond | ((ratio > dual_clip) & (advantages < 0))
    losses = -gain
    metrics = {"ratio": ratio, "clipped": beyond}
    if reference_logp is not None:
        r = (torch.where(valid, reference_logp.detach(), 0.0) - logp).clamp(max=MAX_LOG_RATIO)
        metrics["kl"] = r.exp() - r - 1
        losses = losses + kl * metrics["kl"]
    if entropy is not None:
        metrics["entropy"] = torch.where(valid, entropy, 0.0)
        losses = losses - entropy_bonus * metrics["entropy"]
    losses = losses if weights is None else losses * weights.detach()
    total = torch.where(valid, losses, 0.0).sum()
    return total, valid.sum(), {name: torch.where(valid, m.detach(), 0).sum() for name, m in metrics.items()}


def clipped_gain(ratio: Tensor, advantages: Tensor, low: float | Tensor, high: float | Tensor) -> tuple[Tensor, Tensor]:
    """(min(ratio advantages, ratio.clamp(low, high) advantages), where the clip stops the gradient).

    A ratio that is `low` or `high` has its gradient, as at the old policy with a clip of 0: the gradient of clamp there
    is 1 or 0, by the release of torch.
    """
    beyond = ((ratio > high) & (advantages > 0)) | ((ratio < low) & (advantages < 0))
    return torch.where(beyond, ratio.clamp(low, high), ratio) * advantages, beyond  # type: ignore[arg-type]


def group_advantages(rewards: Tensor, *, normalize: bool = True) -> Tensor:
    """GRPO's advantages (arXiv 2402.03300): each answer's reward against its group.

    Args:
        rewards: [prompts, answers].
        normalize: Whether differences are divided by the group's standard deviation over n (TRL and verl divide by n -
            1, which makes advantages smaller by the factor sqrt((n - 1) / n)). False gives the form without that bias
            (arXiv 2503.20783).

    Returns:
        [prompts, answers]; 0 in a group with equal rewards or one answer.

    Raises:
        ValueError: `rewards` is not [prompts, answers].
    """
    if rewards.ndim != 2:
        raise ValueError(f"rewards must be [prompts, answers], not {list(rewards.shape)}.")
    wide = upcast(rewards)
    centered = wide - wide.mean(1, keepdim=True)
    if not normalize:
        return centered
    return centered / (wide.std(1, keepdim=True, correction=0) + 1e-6)


def same_shape(**tensors: Tensor) -> None:
    """ValueError for shapes that differ: broadcasting would assign one token's reward to another."""
    shapes = {name: list(t.shape) for name, t in tensors.items()}
    if len({tuple(shape) for shape in shapes.values()}) > 1:
        raise ValueError(f"The shapes must be equal, not {', '.join(f'{n} {s}' for n, s in shapes.items())}.")
