"""A loss as a function of log-probabilities, as RL frameworks write it, for one process and every mesh alike."""

from collections.abc import Callable, Mapping
from typing import Any, Unpack

from torch import Tensor

from fnmodels.models.common.registry import DecoderConfig
from fnmodels.options import ForwardKwargs
from fnmodels.tree import Tree

from .batch_checks import check_batch
from .logprobs import temperature_of_tokens, token_logprobs
from .model_loss import check_entries
from .output_loss import OutputLoss
from .softmax_stats import check_temperature


def logprob_loss(
    function: Callable[[Tensor, Tensor, dict[str, Tensor]], tuple[Any, ...]],
    *,
    config: DecoderConfig,
    temperature: float | str = 1.0,
    chunk: int | str | None = "auto",
    **options: Unpack[ForwardKwargs],
) -> OutputLoss:
    """The loss function(logp, entropy, batch) -> (sum, count[, aux]) of the log-probabilities of the labels.

        loss = logprob_loss(lambda logp, entropy, batch: (-(logp * batch["weights"]).sum(), batch["weights"].sum()),
                            config=config)

    logp, entropy [B, S]: as from `token_logprobs`, 0 where labels are -100. function sees full rows on every mesh (over
    `cp` gathered, with gradients), so it may sum over sequences. temperature: a number, or the name of a batch entry
    [B] or [B, S]. chunk, options: as in `token_logprobs`. `Engine.forward_backward` returns logp and
    entropy of the training pass as outputs. Keep one loss object: compiled code is cached per function.
    """

    def outputs(params: Tree, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        divisor = batch[temperature] if isinstance(temperature, str) else temperature
        logp, entropy, _ = token_logprobs(params, batch, config=config, temperature=divisor, chunk=chunk, **options)
        return {"logp": logp, "entropy": entropy}

    def check(batch: Mapping[str, Tensor], config: Any, _: Mapping[str, Any]) -> None:
        check_batch(batch, config)
        if isinstance(temperature, str):
            check_entries(batch, temperature, "labels")
            check_temperature(temperature_of_tokens(batch[temperature], batch["labels"]))

    return OutputLoss(outputs, lambda found, batch: function(found["logp"], found["entropy"], batch), check)
