"""Losses of Tinker's interface by name: sums over all tokens, which nothing divides.

Each is f(logp, entropy, batch) -> (sum, count) for `train.logprob_loss`; batch has the entries of loss_fn_inputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from train.losses.policy import clipped_gain

LossFunction = Callable[[Tensor, Tensor, Mapping[str, Tensor]], tuple[Tensor, Tensor]]
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


@dataclass(frozen=True)
class NamedLoss:
    """make: from the numbers of loss_fn_config. inputs: entries that a datum needs. config: defaults of the numbers."""

    make: Callable[[Mapping[str, float]], LossFunction]
    inputs: tuple[str, ...]
    config: Mapping[str, float]


def _count(batch: Mapping[str, Tensor]) -> Tensor:
    return (batch["labels"] >= 0).sum()


def _cross_entropy(config: Mapping[str, float]) -> LossFunction:
    return lambda logp, entropy, batch: (-(logp * batch["weights"]).sum(), _count(batch))


def _importance_sampling(config: Mapping[str, float]) -> LossFunction:
    def loss(logp: Tensor, entropy: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return -((logp - batch["logprobs"]).exp() * batch["advantages"]).sum(), _count(batch)

    return loss


def _ppo(config: Mapping[str, float]) -> LossFunction:
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]

    def loss(logp: Tensor, entropy: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        ratio = (logp - batch["logprobs"]).exp()
        return -clipped_gain(ratio, batch["advantages"], low, high)[0].sum(), _count(batch)

    return loss


def _cispo(config: Mapping[str, float]) -> LossFunction:
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]

    def loss(logp: Tensor, entropy: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        ratio = (logp - batch["logprobs"]).exp().clamp(low, high).detach()
        return -(ratio * logp * batch["advantages"]).sum(), _count(batch)

    return loss


def gradient_times_logp(logp: Tensor, entropy: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The loss whose gradient by logp is the entry "gradient": that of a user's own loss."""
    return (logp * batch["gradient"]).sum(), _count(batch)


_POLICY = ("logprobs", "advantages")
LOSSES = {
    "cross_entropy": NamedLoss(_cross_entropy, ("weights",), {}),
    "importance_sampling": NamedLoss(_importance_sampling, _POLICY, {}),
    "ppo": NamedLoss(_ppo, _POLICY, CLIP),
    "cispo": NamedLoss(_cispo, _POLICY, CLIP),
}
