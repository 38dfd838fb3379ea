"""verl's batches as packed rows: jagged [N, T*] entries of a TensorDict become rows [1, T] of microbatches."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.packing import IGNORE
from fnmodels.models.common.family import DecoderConfig
from train.data.token_budget import rows_within

from .pictures import ImageReader, given_to
from .routing import routing_of

NUMBER = "number"  # batch entry [1, T]: the number of the microbatch, by which a loss finds what is not per token
TEMPERATURE = "temperature"  # batch entry [1, T], where it is not 1


def entry(data: Any, name: str, default: Any) -> Any:
    """An entry of a TensorDict, `default` where there is none; what is no tensor comes as it was put in."""
    return data[name] if name in data.keys() else default  # noqa: SIM118 - a TensorDict iterates over rows


def microbatches(data: Any, cp: int, group: Any) -> tuple[list[Any], list[list[int]] | None]:
    """(microbatches, the numbers of the sequences in each), equally many on all ranks of `group`.

    With use_dynamic_bsz they have at most max_token_len_per_gpu * cp tokens, balanced by verl's measure of work, and
    each `force_group_size` sequences in a row stay together; else micro_batch_size_per_gpu sequences, in order and
    without numbers. ValueError, on all ranks alike, where a sequence is too long or a rank has too few.
    """
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine.utils import prepare_micro_batches

    if not entry(data, "use_dynamic_bsz", True):
        return prepare_micro_batches(data=data, dp_group=group)
    size, tokens = entry(data, "force_group_size", 1), data["input_ids"]
    _check_jagged(tokens)
    lengths = tokens.offsets().diff().unflatten(0, (-1, size)).sum(1).tolist()
    rows = agreed_rows(lengths, data["max_token_len_per_gpu"] * cp, group, tokens.device)
    numbers = [[one for first in row for one in range(first * size, (first + 1) * size)] for row in rows]
    return [tu.index_select_tensor_dict(data, row) for row in numbers], numbers


def agreed_rows(lengths: Sequence[int], budget: int, group: Any, device: torch.device) -> list[list[int]]:
    """`rows_within`, as many as the rank of the group that needs most has. ValueError on all ranks alike."""
    from verl.utils.seqlen_balancing import calculate_workload

    longest, fewest = _most(group, device, max(lengths, default=0), -len(lengths))
    if longest > budget:
        raise ValueError(f"A sequence (or group of them) has {longest} tokens; max_token_len_per_gpu allows {budget}.")
    rows = rows_within(lengths, budget, cost=calculate_workload)
    most, least = _most(group, device, len(rows), -len(rows))
    while most != -least:
        rows = rows_within(lengths, budget, least=most, cost=calculate_workload)
        most, least = _most(group, device, len(rows), -len(rows))
    if most > -fewest:
        raise ValueError(f"max_token_len_per_gpu needs {most} microbatches on a rank, and one has {-fewest} sequences.")
    return rows


def _most(group: Any, device: torch.device, *values: int) -> list[int]:
    found = torch.tensor(values, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found.tolist()


def _check_jagged(tokens: Tensor) -> None:
    if not tokens.is_nested:
        raise ValueError('input_ids must be jagged, [N, T*]: fnmodels takes pad_mode="no_padding".')


def packed_row(
    micro: Any,
    number: int,
    multiple: int = 1,
    *,
    replays: DecoderConfig | None = None,
    reads: ImageReader | None = None,
) -> dict[str, Tensor]:
    """The row of microbatch `number`: tokens, positions, segment_ids, labels, NUMBER and perhaps TEMPERATURE.

    labels are the next tokens, -100 at the end of a sequence. The row is padded to a multiple of `multiple` tokens.
    replays: the config of the model whose experts are those of the rollout, as the entry "routing"; None: its own.
    reads: how images are read, from which positions follow anew; None: NotImplementedError for images and positions of
    several axes.
    """
    tokens, positions = micro["input_ids"], micro["position_ids"]
    _check_jagged(tokens)
    if reads is None and positions.ndim != 2:
        raise NotImplementedError(f"position_ids have {positions.ndim} dimensions; fnmodels takes [N, T*].")
    if reads is None and any(given_to(micro)):
        raise NotImplementedError("The batch has multi_modal_inputs, which engine.images=true reads; it is false.")
    flat, ends, lengths = tokens.values(), tokens.offsets()[1:] - 1, tokens.offsets().diff()
    labels = flat.roll(-1)
    labels[ends] = IGNORE
    sequences = torch.arange(1, len(lengths) + 1, device=flat.device).repeat_interleave(lengths)
    order = torch.arange(len(flat), device=flat.device) - tokens.offsets()[:-1].repeat_interleave(lengths)
    places = positions.values() if reads is None else order
    row = {"tokens": flat, "positions": places, "segment_ids": sequences, "labels": labels}
    row |= {} if reads is None else reads.entries(micro)
    row[NUMBER] = torch.full_like(flat, number)
    if has_temperature(micro):
        each = torch.as_tensor(micro[TEMPERATURE], dtype=torch.float32, device=flat.device)
        row[TEMPERATURE] = each.expand(len(lengths)).repeat_interleave(lengths)
    if replays is not None:
        row["routing"] = routing_of(micro, replays)
    padding = -len(flat) % multiple
    fill = {"labels": IGNORE, NUMBER: number, TEMPERATURE: 1.0}
    made = {
        name: F.pad(value, (0, 0) * (value.ndim - 1) + (0, padding), value=fill.get(name, 0))[None]
        for name, value in row.items()
    }
    return made if reads is None else {**made, "positions": reads.positions(made, micro)}


def has_temperature(micro: Any) -> bool:
    """Whether log-probabilities are at another temperature than 1, or each sequence has its own."""
    given = entry(micro, TEMPERATURE, 1.0)
    return isinstance(given, Tensor) or given != 1


def jagged(row: Tensor, micro: Any) -> Tensor:
    """A row [1, T], without its padding, as the jagged [N, T*] of the microbatch's sequences."""
    offsets = micro["input_ids"].offsets()
    found: Tensor = torch.nested.nested_tensor_from_jagged(row[0, : int(offsets[-1])], offsets)
    return found
