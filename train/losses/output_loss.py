"""A loss as a function of per-token outputs of the model, such as log-probabilities, for every mesh alike."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.models.common.family import DecoderConfig
from fnmodels.options import ForwardKwargs
from fnmodels.tree import Tree
from train.batch import FULL_ROWS, PLACES, check_entries
from train.loss import ModelLoss, run_options

from .batch_checks import check_batch
from .logprobs import temperature_of_tokens, token_logprobs
from .softmax_stats import check_temperature

Outputs = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class OutputLoss:
    """The loss function(outputs, batch) -> (sum, count[, aux]) of outputs(params, batch) -> {name: [B, S]}.

    `Engine.forward_backward` returns the outputs of the training pass.

    Args:
        outputs: Runs the model and returns values per token.
        function: The loss of these. It sees full rows on every mesh, over `cp` gathered, with gradients.
        check_batch: A further check of batches, see `train.losses.batch_checks`; None: none.

    Raises:
        ValueError: By a call, where `function` returns something else.
    """

    outputs: Callable[[Tree, Mapping[str, Tensor]], Outputs]
    function: Callable[[Outputs, dict[str, Tensor]], tuple[Any, ...]]
    check_batch: Callable[[Mapping[str, Tensor], Any, Mapping[str, Any]], None] | None = None

    def __call__(self, params: Tree, batch: Mapping[str, Tensor]) -> tuple[Any, ...]:
        given: Any = dict(batch)
        rows, places = given.pop(FULL_ROWS, None), given.pop(PLACES, None)
        found = self.outputs(params, given)
        gather = run_options(params).ranks.full_rows
        if gather is None or rows is None:
            return (*_three(self.function(found, given)), found)
        full, weight = gather(torch.stack(tuple(found.values()), -1), places)
        joined = dict(zip(found, full[:, : rows["tokens"].shape[1]].unbind(-1), strict=True))
        total, count, aux = _three(self.function(joined, rows))
        # All ranks of cp compute the same sums, and ranks are summed: only the first one's count.
        aux = None if aux is None else tree.map(lambda x: x * weight, aux)
        return total * weight, count * weight, aux, found


def _three(found: Any) -> tuple[Any, Any, Any]:
    if not isinstance(found, (tuple, list)) or len(found) not in (2, 3):
        raise ValueError("The function of the outputs must return (sum, count) or (sum, count, aux).")
    return found[0], found[1], found[2] if len(found) == 3 else None


def needs_full_rows(function: Callable[..., Any]) -> bool:
    """Whether the function reads FULL_ROWS and PLACES of its batch over `cp`."""
    return isinstance(function.function if isinstance(function, ModelLoss) else function, OutputLoss)


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

    `Engine.forward_backward` returns logp and entropy of the training pass as outputs. Keep one loss object: compiled
    code is cached per function.

    Args:
        function: The loss of logp and entropy [B, S], as from `token_logprobs`, 0 where labels are -100. It sees full
            rows on every mesh (over `cp` gathered, with gradients), so it may sum over sequences.
        config: The model's config.
        temperature: Divides the logits; a number, or the name of a batch entry [B] or [B, S].
        chunk: Tokens whose logits exist at a time; "auto" as for `head_loss`; None: all, in plain operations.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        The loss, for `make_step` and `Engine.forward_backward`.
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
