"""verl's microbatches as packed rows: jagged [N, T*] entries of a TensorDict become one row [1, T]."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.packing import IGNORE

NUMBER = "number"  # batch entry [1, T]: the number of the microbatch, by which a loss finds what is not per token
TEMPERATURE = "temperature"  # batch entry [1, T], where verl gives one per sequence


def entry(data: Any, name: str, default: Any) -> Any:
    """An entry of a TensorDict, `default` where there is none; what is no tensor comes as it was put in."""
    return data[name] if name in data.keys() else default  # noqa: SIM118 - a TensorDict iterates over rows


def packed_row(micro: Any, number: int, multiple: int = 1) -> dict[str, Tensor]:
    """The row of microbatch `number`: tokens, positions, segment_ids, labels, NUMBER and perhaps TEMPERATURE.

    labels are the next tokens, -100 at the end of a sequence. The row is padded to a multiple of `multiple` tokens.
    NotImplementedError for images and positions of several axes.
    """
    tokens, positions = micro["input_ids"], micro["position_ids"]
    if not tokens.is_nested:
        raise ValueError('input_ids must be jagged, [N, T*]: train.verl takes pad_mode="no_padding".')
    if positions.ndim != 2:
        raise NotImplementedError(f"position_ids have {positions.ndim} dimensions; train.verl takes [N, T*].")
    if any(isinstance(one, Mapping) and one for one in entry(micro, "multi_modal_inputs", ())):
        raise NotImplementedError("The batch has multi_modal_inputs; train.verl takes text.")
    flat, ends, lengths = tokens.values(), tokens.offsets()[1:] - 1, tokens.offsets().diff()
    labels = flat.roll(-1)
    labels[ends] = IGNORE
    sequences = torch.arange(1, len(lengths) + 1, device=flat.device).repeat_interleave(lengths)
    row = {"tokens": flat, "positions": positions.values(), "segment_ids": sequences, "labels": labels}
    row[NUMBER] = torch.full_like(flat, number)
    if isinstance(temperature := entry(micro, TEMPERATURE, None), Tensor):
        row[TEMPERATURE] = temperature.to(torch.float32).repeat_interleave(lengths)
    padding = (0, -len(flat) % multiple)
    fill = {"labels": IGNORE, NUMBER: number, TEMPERATURE: 1.0}
    return {name: F.pad(value, padding, value=fill.get(name, 0))[None] for name, value in row.items()}


def jagged(row: Tensor, micro: Any) -> Tensor:
    """A row [1, T], without its padding, as the jagged [N, T*] of the microbatch's sequences."""
    offsets = micro["input_ids"].offsets()
    found: Tensor = torch.nested.nested_tensor_from_jagged(row[0, : int(offsets[-1])], offsets)
    return found
