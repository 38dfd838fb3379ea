"""A loss as a function of log-probabilities, as RL frameworks write it, for one process and every mesh alike."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.models.common.registry import DecoderConfig
from fnmodels.options import ForwardKwargs
from fnmodels.tree import Tree

from .lm_head import CHUNK
from .logprobs import token_logprobs
from .model_loss import FULL_ROWS, PLACES, ModelLoss, run_options


@dataclass(frozen=True, eq=False)
class LogprobLoss:
    """See `logprob_loss`."""

    function: Callable[[Tensor, Tensor, dict[str, Tensor]], tuple[Any, ...]]
    config: DecoderConfig
    temperature: float | str = 1.0
    chunk: int | None = CHUNK
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, params: Tree, batch: Mapping[str, Tensor]) -> tuple[Any, ...]:
        given: Any = dict(batch)
        rows, places = given.pop(FULL_ROWS, None), given.pop(PLACES, None)
        temperature = given[self.temperature] if isinstance(self.temperature, str) else self.temperature
        how: Any = {"config": self.config, "temperature": temperature, "chunk": self.chunk}
        logp, entropy, _ = token_logprobs(params, given, **how, **self.options)
        outputs = {"logp": logp, "entropy": entropy}
        gather = run_options(params).full_rows
        if gather is None or rows is None:
            return _with_outputs(self.function(logp, entropy, given), outputs)
        length = rows["tokens"].shape[1]
        full, weight = gather(torch.stack((logp, entropy), -1), places)
        logp, entropy = full[:, :length].unbind(-1)
        total, count, aux, _ = _with_outputs(self.function(logp, entropy, rows), outputs)
        # All ranks of cp compute the same sums, and ranks are summed: only the first one's count.
        return total * weight, count * weight, _scaled(aux, weight), outputs


def _with_outputs(found: Any, outputs: Tree) -> tuple[Any, ...]:
    if not isinstance(found, (tuple, list)) or len(found) not in (2, 3):
        raise ValueError("The function of logprob_loss must return (sum, count) or (sum, count, aux).")
    return (*found, None, outputs) if len(found) == 2 else (*found, outputs)


def _scaled(aux: Tree, weight: int) -> Tree:

    return None if aux is None else tree.map(lambda x: x * weight, aux)


def logprob_loss(
    function: Callable[[Tensor, Tensor, dict[str, Tensor]], tuple[Any, ...]],
    *,
    config: DecoderConfig,
    temperature: float | str = 1.0,
    chunk: int | None = CHUNK,
    **options: Unpack[ForwardKwargs],
) -> LogprobLoss:
    """The loss function(logp, entropy, batch) -> (sum, count[, aux]) of the log-probabilities of the labels.

        loss = logprob_loss(lambda logp, entropy, batch: (-(logp * batch["weights"]).sum(), batch["weights"].sum()),
                            config=config)

    logp, entropy [B, S]: as from `token_logprobs`, 0 where labels are -100. function sees full rows on every mesh (over
    `cp` gathered, with gradients), so it may sum over sequences. temperature: a number, or the name of a batch entry
    [B, S] (without a mesh also [B]). chunk, options: as in `token_logprobs`. `Engine.forward_backward` returns logp and
    entropy of the training pass as outputs. Keep one loss object: compiled code is cached per function.
    """
    return LogprobLoss(function, config, temperature, chunk, dict(options))


def needs_full_rows(function: Callable[..., Any]) -> bool:
    """Whether the function reads FULL_ROWS and PLACES of its batch over `cp`."""
    return isinstance(function.function if isinstance(function, ModelLoss) else function, LogprobLoss)
