"""verl's `routed_experts`: int16 [tokens, layers, k] as vLLM records them, every layer of the model by its index.

Layers without experts have zeros, and so do tokens that the rollout has not computed: the last of a sequence, and those
behind the last answer of a conversation. No label of an answer is predicted from these.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fnmodels.models.common.family import DecoderConfig
from train.generation.routing import DTYPE, expert_layers

ENTRY = "routed_experts"


def layers_of(routing: Tensor, config: DecoderConfig) -> Tensor:
    """vLLM's form int16 [tokens, layers, k] of recorded experts [tokens, layers with experts, k]."""
    found = torch.zeros(len(routing), config.num_hidden_layers, routing.shape[-1], dtype=DTYPE)
    found[:, expert_layers(config)] = routing.to(DTYPE)
    return found


def routing_of(micro: Any, config: DecoderConfig) -> Tensor:
    """`batch["routing"]` without the batch's dimension, int64 [T, layers with experts, k], of a microbatch.

    Tokens without recorded experts get the first k. ValueError where there are no records, where they are of other
    layers or tokens, and for a sequence in which one without them stands before one with them.
    """
    if ENTRY not in micro.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        raise ValueError(
            f"The batch has no {ENTRY}, which router_replay.mode=R3 replays: set "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=True."
        )
    given, tokens, layers = micro[ENTRY], micro["input_ids"], expert_layers(config)
    flat = given.values() if given.is_nested else given.flatten(0, 1)
    if flat.ndim != 3 or len(flat) != len(tokens.values()) or flat.shape[1] != config.num_hidden_layers:
        raise ValueError(
            f"{ENTRY} are {list(flat.shape)}; they must be [tokens, layers, k], of {len(tokens.values())} tokens and "
            f"all {config.num_hidden_layers} layers, those without experts too."
        )
    chosen = flat[:, layers].long()
    _check_trailing(chosen, tokens.offsets().tolist())
    first = torch.arange(chosen.shape[-1], device=chosen.device)
    return torch.where(_computed(chosen)[:, None, None], chosen, first)


def _computed(chosen: Tensor) -> Tensor:
    """bool [tokens]: whether the experts of a token were recorded. With k = 1 zeros are the first expert."""
    return (chosen != 0).flatten(1).any(1) if chosen.shape[-1] > 1 else chosen.new_ones(len(chosen), dtype=torch.bool)


def _check_trailing(chosen: Tensor, offsets: Sequence[int]) -> None:
    computed = _computed(chosen).cpu()
    for number, (start, end) in enumerate(pairwise(offsets)):
        own = computed[start:end]
        count = int(own.sum())
        if not bool(own[:count].all()):
            place = int((~own).nonzero()[0])
            raise ValueError(
                f"{ENTRY} of sequence {number} has no experts at token {place}, and has some behind it: the records "
                "of a rollout are those of its first tokens."
            )
