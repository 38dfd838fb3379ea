"""Microbatches of a pipeline: padded to one shape, and checked before any communication."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import MaskLike
from fnmodels.inputs.packing import IGNORE
from fnmodels.options import ForwardOptions
from fnmodels.tree import Tree
from train.losses.model_loss import Batch, ModelLoss, RouterTerms, as_loss, check_entries
from train.parallel.padding import padded

from .schedule import Pipeline, check_microbatches


@dataclass(frozen=True)
class Microbatch:
    """One microbatch, with the arguments of the loss' call of fnmodels.hidden; tensors lead with its rows.

    options: as the loss gave them. layout: the one with which layers run. routers: what the loss needs of the routers.
    """

    batch: Batch
    inputs: Tree
    masks: Mapping[str, MaskLike]
    freqs_cis: Mapping[str, Tensor]
    layout: Layout | None
    config: Any
    taps: tuple[str, ...]
    options: ForwardOptions
    routers: RouterTerms | None


def microbatches(loss: ModelLoss, pipe: Pipeline, params: Tree, parts: Sequence[Batch]) -> list[Microbatch]:
    """The prepared microbatches. ValueError, the same on every rank, since all are given the same ones.

    Every stage expects hidden states of one shape, so smaller microbatches are padded to the largest number of rows and
    the largest length, which changes no result.
    """
    check_microbatches(pipe, len(parts))
    rows, longest = (max(part["tokens"].shape[dim] for part in parts) for dim in (0, 1))
    return [_microbatch(loss, pipe, params, padded(part, longest, rows)) for part in parts]


def _microbatch(loss: ModelLoss, pipe: Pipeline, params: Tree, batch: Batch) -> Microbatch:
    check_entries(batch, "tokens", "positions", "segment_ids")
    check_ids(batch, pipe.config)
    found = recorded(loss, params, batch)
    if found is None:
        raise ValueError(
            "Over a pipeline the last stage runs the loss on the states of all layers, so the loss must run the model "
            "by fnmodels.hidden or forward with the params that it is given."
        )
    if found.config != pipe.config:
        raise ValueError("The loss runs the model with another config than that of the pipeline.")
    layers = [tap for tap in found.taps if tap != "hidden"]
    if layers and found.routers is None:
        raise ValueError(
            f"Over a pipeline the last stage sees its own layers alone, so the loss cannot read the tap {layers[0]!r}; "
            'there is "hidden", and train.routed_logprobs for what routers do.'
        )
    return found


class _Reached(BaseException):
    """The loss has called the model: a BaseException, so that `except Exception` in the loss does not catch it."""


def recorded(function: Callable[..., Any], params: Tree, batch: Batch) -> Microbatch | None:
    """The call of fnmodels.hidden that a function of (params, batch) makes, where it is stopped; None without a call.

    params: this rank's shards, of which nothing is gathered.
    """
    loss, found = as_loss(function), list[Microbatch]()

    def stop(given: Any, inputs: Any, masks: Any, freqs_cis: Any, config: Any, taps: Any, options: Any) -> NoReturn:
        run = given.run
        layout = run.layout_of(options, masks)
        found.append(Microbatch(batch, inputs, masks, freqs_cis, layout, config, taps, options, run.routers))
        raise _Reached

    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        try:
            replace(loss.with_options(stage=stop, required=None), params=None)(params, batch)
        except _Reached:
            return found[0]
    return None


def check_ids(batch: Batch, config: Any) -> None:
    """ValueError for tokens and labels outside of the vocabulary, on the CPU.

    An invalid id would raise on one rank alone, and the others would wait. On other devices this check would
    synchronise, and the kernel that meets such an id aborts its process, and so the job.
    """
    if not hasattr(config, "vocab_size"):  # it reads patches or latents
        return
    size = config.vocab_size
    for name in ("tokens", "labels"):
        ids = batch.get(name)
        if ids is None or not ids.is_cpu or not ids.numel() or ids.is_floating_point():
            continue
        known = ids if name == "tokens" else ids.where(ids != IGNORE, 0)
        low, high = int(known.min()), int(known.max())
        if low < 0 or high >= size:
            raise ValueError(f"The {name} go from {low} to {high}; the model knows 0 to {size - 1}.")
