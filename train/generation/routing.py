"""Recorded routing: the experts of each token that a model computes, as they are kept and replayed."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fnmodels.models.common.family import DecoderConfig, is_routed
from fnmodels.models.common.registry import family_of

TAPS = ("layers.*.expert_indices",)
DTYPE = torch.int16  # of recorded experts, as verl keeps them
NONE = -1  # in place of an expert: nothing was computed


def expert_layers(config: DecoderConfig) -> list[int]:
    """The layers that choose experts, in the order of `routing`'s third dimension."""
    family = family_of(config)
    return [i for i, kind in enumerate(family.kinds(config)) if is_routed(family, kind)]


def check_records(row: int, config: DecoderConfig, *, paired: bool) -> None:
    """ValueError for a request to record the experts of a model without them. paired: whether it has an encoder."""
    if paired or not expert_layers(config):
        without = "an encoder" if paired else "no layers with experts"
        raise ValueError(f"Request {row} has record_routing, for decoders with experts; this model has {without}.")


def recorded(tapped: Mapping[str, Tensor]) -> Tensor:
    """The experts of a call [B, S, layers with experts, k], from its taps of TAPS."""
    layers = sorted(int(name.split(".")[1]) for name in tapped)
    return torch.stack([tapped[f"layers.{layer}.expert_indices"] for layer in layers], 2).to(DTYPE)


def replayable(routing: Tensor, length: int) -> Tensor:
    """The experts of `length` tokens as `batch["routing"]` takes them: int64 [length, layers with experts, k].

    Tokens that were never computed, such as the last one of an answer, get the first k experts: no label is predicted
    from them. routing: of the first tokens, [at most length, layers with experts, k].
    """
    missing = length - len(routing)
    if missing < 0:
        raise ValueError(f"The routing is of {len(routing)} tokens; the sequence has {length}.")
    first = torch.arange(routing.shape[-1], device=routing.device).expand(missing, *routing.shape[1:])
    return torch.cat((routing.long(), first))


def joined(pieces: Sequence[Tensor]) -> Tensor | None:
    """The experts of pieces of a sequence behind each other; None where nothing was computed."""
    return torch.cat(list(pieces)) if pieces else None
