"""Arrangements of two rows of tokens, and which of them say nothing about a model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fnmodels import family_of
from fnmodels.models.common.family import DecoderConfig, traits_of
from fnmodels.models.common.registry import ordered_kinds
from fnmodels.ops.rotary import Rope

SHORTEST, SHIFT = 4, 3


LENGTH, SHORTEST, SHIFT = 24, 4, 3


@dataclass(frozen=True)
class Arrangement:
    """One arrangement ("plain", "padded", "packed", "shifted") of two rows; positions and segment_ids [2, S]."""

    form: str
    positions: Tensor
    segment_ids: Tensor


def batches_of(config: DecoderConfig, length: int) -> list[Arrangement]:
    """The plain arrangement, then the others on which transformers is right.

    The first row always reaches the largest position, and the shifted arrangement is last: transformers' dynamic rope
    keeps the largest length it has seen.
    """
    positions, ones = torch.arange(length).expand(2, -1), torch.ones(2, length, dtype=torch.long)
    boundary = length * 2 // 3
    padding, second = ones.clone(), ones.clone()
    padding[1, boundary:], second[1, boundary:] = 0, 2
    restarted = positions.clone()
    restarted[1, boundary:] = torch.arange(length - boundary)
    arrangements = [
        Arrangement("plain", positions, ones),
        Arrangement("padded", positions, padding),
        Arrangement("packed", restarted, second),
    ]
    if length + SHIFT <= config.max_position_embeddings:
        arrangements.append(Arrangement("shifted", positions + SHIFT, ones))
    return [batch for batch in arrangements if batch.form not in their_mistakes(config)]


# {model type: arrangements of batches on which transformers itself is wrong}.
_THEIR_MISTAKES = {
    "afmoe": ("packed",),  # its masks do not separate documents
    "deepseek_v4": ("padded", "packed", "shifted"),  # it counts windows along the row
    "falcon": ("packed",),  # its masks do not separate documents
    **dict.fromkeys(
        ("opt", "xglm", "biogpt", "openai-gpt", "bloom", "mpt"), ("packed",)
    ),  # their masks do not separate documents
    "minimax_m3_vl_text": ("padded", "packed", "shifted"),  # it counts blocks along the row
    **dict.fromkeys(("glm5_next", "glm5_next_text"), ("shifted",)),  # it counts pools along the row
    "gpt_oss": ("packed",),  # its masks do not separate documents
    "llama4": ("packed", "shifted"),  # its temperature depends on the index in the row, not on the position
    "llama4_text": ("packed", "shifted"),
}


def their_mistakes(config: DecoderConfig) -> tuple[str, ...]:
    """The arrangements on which transformers itself is wrong for this model."""
    # Its convolutions and recurrent states run on from one document into the next.
    ordered = ("packed",) if ordered_kinds(config) else ()
    mixed = () if traits_of(family_of(config)).causal else ("packed",)  # encoders never separate documents
    turned = ("shifted",) if getattr(config, "rotary_value", False) else ()  # values turn by the index in the row
    return (*_THEIR_MISTAKES.get(config.model_type, ()), *ordered, *mixed, *turned)


def unreached(config: DecoderConfig, length: int) -> list[str]:
    """Features of the model that have no effect on rows of up to `length` positions."""
    features = []
    for name in ("sliding_window", "attention_chunk_size", "floor_scale"):
        size = getattr(config, name, None)
        if size and size >= length:
            features.append(f"{name} {size}")
    ropes = {value for value in vars(config).values() if isinstance(value, Rope)}
    for rope in sorted(ropes, key=str):
        if rope.kind in ("dynamic", "longrope") and rope.original_max_position_embeddings >= length:
            features.append(f"{rope.kind} rope beyond {rope.original_max_position_embeddings} positions")
    return features
