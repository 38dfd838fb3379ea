"""Microbatches of a pipeline: padded to one shape, and checked before any communication."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import MaskLike
from fnmodels.models.common.family import traits_of
from fnmodels.models.common.registry import family_of, stack_configs
from fnmodels.options import ForwardOptions
from fnmodels.tree import Tree
from train.batch import Entries, check_entries
from train.loss import ModelLoss, as_loss
from train.losses.batch_checks import check_of
from train.parallel.padding import padded
from train.run_options import RouterTerms, Stage

from .schedule import Pipeline, check_microbatches
from .stacks import stacks_of


@dataclass(frozen=True)
class Microbatch:
    """One microbatch, with the arguments of the loss' call of fnmodels.hidden; tensors lead with its rows.

    options: as the loss gave them. layout: the one with which layers run; as inputs, masks and tables, {"encoder",
    "decoder"} of a model of both. routers: what the loss needs of the routers.
    """

    batch: Entries
    inputs: Tree
    masks: Mapping[str, MaskLike]
    freqs_cis: Mapping[str, Tensor]
    layout: Layout | Mapping[str, Layout | None] | None
    config: Any
    taps: tuple[str, ...]
    options: ForwardOptions
    routers: RouterTerms | None


def microbatches(loss: ModelLoss, pipe: Pipeline, params: Tree, parts: Sequence[Entries]) -> list[Microbatch]:
    """The prepared microbatches. ValueError, the same on every rank, since all are given the same ones.

    Every stage expects hidden states of one shape, so smaller microbatches are padded to the largest number of rows and
    the largest length, which changes no result.
    """
    check_microbatches(pipe, len(parts))
    if padding := several_lengths(pipe.config):
        _check_same_shapes(parts, padding)
        return [_microbatch(loss, pipe, params, part) for part in parts]
    rows, longest = (max(part["tokens"].shape[dim] for part in parts) for dim in (0, 1))
    return [_microbatch(loss, pipe, params, padded(part, longest, rows)) for part in parts]


def several_lengths(config: Any) -> str:
    """Why the rows of a model's batch have several lengths, as a clause; "" where they have one."""
    family = family_of(config)
    if stack_configs(config):
        return "it has an encoder and a decoder"
    return "it has texts and latents" if traits_of(family).inputs == "latents" else ""


def _check_same_shapes(parts: Sequence[Entries], why: str) -> None:
    """ValueError for microbatches of several shapes: which of a row's lengths an entry has is not known."""
    for index, part in enumerate(parts):
        for name, x in part.items():
            like = parts[0].get(name)
            if like is None or x.shape != like.shape:
                raise ValueError(
                    f"{name!r} is {list(x.shape)} in microbatch {index} and "
                    f"{'absent' if like is None else list(like.shape)} in the first. The model's rows have several "
                    f"lengths, since {why}, so a pipeline cannot pad its microbatches: give them one shape, or one "
                    "batch with accumulate=."
                )


def _microbatch(loss: ModelLoss, pipe: Pipeline, params: Tree, batch: Entries) -> Microbatch:
    latents = traits_of(family_of(pipe.config)).inputs == "latents"
    check_entries(batch, "latents" if latents else "tokens", "positions", "segment_ids")
    check_of(loss)(batch, pipe.config)
    if "image_features" in batch:
        raise ValueError("The batch has image_features, which the stages of a pipeline do not take: train without pp.")
    found = recorded(loss, params, batch)
    if found is None:
        raise ValueError(
            "Over a pipeline the last stage runs the loss on the states of all layers, so the loss must run the model "
            "by fnmodels.hidden or forward with the params that it is given."
        )
    if found.config != pipe.config:
        raise ValueError("The loss runs the model with another config than that of the pipeline.")
    last = f"layers.{found.config.num_hidden_layers - 1}."
    layers = [tap for tap in found.taps if tap != "hidden" and not tap.startswith(last)]
    if layers and found.routers is None:
        raise ValueError(
            f"Over a pipeline the last stage sees its own layers alone, so the loss cannot read the tap {layers[0]!r}; "
            'there is "hidden", and train.losses.routed_logprobs for what routers do.'
        )
    return found


class _Reached(BaseException):
    """The loss has called the model, or needs other ranks.

    A BaseException, so that `except Exception` in the loss does not catch it.
    """


def stop_before(_: Tensor) -> NoReturn:
    """In place of a collective that a loss runs before the model: what it does up to there is `recorded`."""
    raise _Reached


def recorded(function: Callable[..., Any], params: Tree, batch: Entries) -> Microbatch | None:
    """The call of fnmodels.hidden that a function of (params, batch) makes, where it is stopped; None without a call.

    params: this rank's shards, of which nothing is gathered.
    """
    loss, found = as_loss(function), list[Microbatch]()

    def stop(given: Any, inputs: Any, masks: Any, freqs_cis: Any, config: Any, taps: Any, options: Any) -> NoReturn:
        run = given.run
        layout = layout_of(run, options, masks, config)
        found.append(Microbatch(batch, inputs, masks, freqs_cis, layout, config, taps, options, run.stage.routers))
        raise _Reached

    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        try:
            replace(loss.with_options(stage=Stage(stop), reports={"required": None}), params=None)(params, batch)
        except _Reached:
            return found[0] if found else None
    return None


def layout_of(run: Any, options: ForwardOptions, masks: Mapping[str, Any], config: Any) -> Any:
    """The layout with which layers run; of several stacks {name: layout}, as their masks are {name: masks}."""
    own: Any = options.layout or {}
    found = {
        stack.name: run.layout_of(replace(options, layout=stack.part(own) if own else None), stack.part(masks))
        for stack in stacks_of(config)
    }
    return found.get("", found)
