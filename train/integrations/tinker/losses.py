"""Losses of Tinker's interface by name: sums over all tokens, which nothing divides.

Each is f(logp, entropy, batch) -> (sum, count) for `train.logprob_loss`; batch has the entries of loss_fn_inputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.ops.dtypes import widest
from train.losses.logprobs import document_sums
from train.losses.policy import clipped_gain

from .traced import TracedLoss
from .traced_calls import Budget

Batch = Mapping[str, Tensor]
LossFunction = Callable[[Tensor, Tensor, Batch], tuple[Any, ...]]
PREFIX = "input_"  # of the names under which a batch has the inputs of a traced loss
LOW, HIGH = "clip_low_threshold", "clip_high_threshold"


@dataclass(frozen=True)
class NamedLoss:
    """A loss of Tinker.

    Attributes:
        make: From the numbers of loss_fn_config, to the loss.
        inputs: Entries that a datum needs.
        config: Defaults of the numbers of loss_fn_config.
        per_token: Numbers that the data may have for each token instead, as an entry of their name.
        several: Whether the data may have several targets at a token, and so many inputs.
    """

    make: Callable[[Mapping[str, float]], LossFunction]
    inputs: tuple[str, ...]
    config: Mapping[str, float]
    per_token: tuple[str, ...] = ()
    several: bool = False

    def numbers(self, name: str, given: Mapping[str, float] | None) -> dict[str, float]:
        """The numbers of a call. ValueError for an unknown one; name: of the loss, for the sentence."""
        if unknown := sorted((given or {}).keys() - self.config.keys()):
            raise ValueError(f"The loss {name!r} has no {unknown[0]!r}; its numbers are {sorted(self.config)}.")
        return {**self.config, **(given or {})}


def count_tokens(batch: Batch) -> Tensor:
    """The tokens of a batch that have a target."""
    return (batch["labels"] >= 0).sum()


def _ratio(logp: Tensor, batch: Batch) -> Tensor:
    return (logp - batch["logprobs"]).exp()


def _cross_entropy(config: Mapping[str, float]) -> LossFunction:
    return lambda logp, entropy, batch: (-(logp * batch["weights"]).sum(), count_tokens(batch))


def _importance_sampling(config: Mapping[str, float]) -> LossFunction:
    return lambda logp, entropy, batch: (-(_ratio(logp, batch) * batch["advantages"]).sum(), count_tokens(batch))


def _clips(config: Mapping[str, float], batch: Batch) -> tuple[Any, Any]:
    """The lowest and the highest ratio: those of each token where the data have them."""
    low, high = (batch[name] if name in batch else config[name] for name in (LOW, HIGH))
    of_tokens = low if isinstance(low, Tensor) else high
    if not isinstance(of_tokens, Tensor):
        return low, high
    # clamp takes two numbers or two tensors
    return torch.as_tensor(low).to(of_tokens), torch.as_tensor(high).to(of_tokens)


def _ppo(config: Mapping[str, float]) -> LossFunction:
    def loss(logp: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        gain, _ = clipped_gain(_ratio(logp, batch), batch["advantages"], *_clips(config, batch))
        return -gain.sum(), count_tokens(batch)

    return loss


def _cispo(config: Mapping[str, float]) -> LossFunction:
    def loss(logp: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        ratio = _ratio(logp, batch).clamp(*_clips(config, batch)).detach()
        return -(ratio * logp * batch["advantages"]).sum(), count_tokens(batch)

    return loss


def _dro(config: Mapping[str, float]) -> LossFunction:
    """Direct reward optimization (arXiv 2405.19107): the advantage, less half of beta times the squared log-ratio."""

    def loss(logp: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        penalty = 0.5 * config["beta"] * (logp - batch["logprobs"]).square()
        return (penalty - logp * batch["advantages"]).sum(), count_tokens(batch)

    return loss


def _gspo(config: Mapping[str, float]) -> LossFunction:
    """GSPO-token (arXiv 2507.18071): the ratio of a sequence, with the gradient of each token."""

    def loss(logp: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        sequences, marked = batch["segment_ids"], (batch["sequence_ratio_mask"] != 0).to(logp.dtype)
        most, fixed = int(sequences.max()), logp.detach()
        sums = document_sums((fixed - batch["logprobs"]) * marked, sequences, most)
        means = sums / document_sums(marked, sequences, most).clamp(min=1)
        ratio = (means.gather(1, sequences.clamp(min=1) - 1) + logp - fixed).exp()
        return -clipped_gain(ratio, batch["advantages"], *_clips(config, batch))[0].sum(), count_tokens(batch)

    return loss


def gradient_times_logp(logp: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss whose gradient by logp is the entry "gradient": that of a user's own loss."""
    return (logp * batch["gradient"]).sum(), count_tokens(batch)


def of_each_datum(loss: TracedLoss, budget: Budget) -> LossFunction:
    """The sum of a traced loss over the data of a batch, with the sums of its metrics as aux.

    budget: of the call, whose rows are as many batches.
    The batch has the inputs of the loss as entries, named with PREFIX; a number stands at each token.
    """

    def total(logp: Tensor, entropy: Tensor, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        lengths = batch["segment_ids"][0].bincount()[1:].tolist()
        columns = [logp[0].split(lengths)]
        for name, rank in loss.inputs[1:]:
            parts = batch[PREFIX + name][0].split(lengths)
            columns.append(parts if rank else tuple(part[0] for part in parts))
        # a copy of each: a part of a row is a view, beside which the other data stand
        found = [loss(*(one.clone() for one in each), budget=budget) for each in zip(*columns, strict=True)]
        sums = {
            name: torch.stack([metrics[name] for _, metrics in found]).sum(dtype=widest(logp.device))
            for name in found[0][1]
        }
        return torch.stack([one for one, _ in found]).sum(), count_tokens(batch), sums

    return total


_POLICY, _CLIPS = ("logprobs", "advantages"), (LOW, HIGH)
_USUAL = {LOW: 0.8, HIGH: 1.2}
# Tinker publishes no defaults of beta and of GSPO's clips: beta is that of its example, the clips are the paper's.
_PAPER = {LOW: 1 - 3e-4, HIGH: 1 + 4e-4}
LOSSES = {
    "cross_entropy": NamedLoss(_cross_entropy, ("weights",), {}, several=True),
    "importance_sampling": NamedLoss(_importance_sampling, _POLICY, {}),
    "ppo": NamedLoss(_ppo, _POLICY, _USUAL, _CLIPS),
    "cispo": NamedLoss(_cispo, _POLICY, _USUAL, _CLIPS),
    "dro": NamedLoss(_dro, _POLICY, {"beta": 0.05}),
    "gspo": NamedLoss(_gspo, (*_POLICY, "sequence_ratio_mask"), _PAPER, _CLIPS),
}
