"""Runs one stage of a loss: its layers, and on the last stage the loss on the final hidden states.

Every stage calls the loss. At the call of fnmodels.hidden the stage runs its own layers on the states that it received;
the last stage returns them to the loss, and the others stop there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.run_params import RunParams
from train.gradients import checked_loss
from train.losses.model_loss import ModelLoss, keywords
from train.losses.moe_balance import Balance, balance_terms

from .joint_node import together
from .schedule import Pipeline
from .tree_split import numbered
from .types import ALONE, Microbatch, StageHooks

Out = tuple[Tensor, Any]  # (hidden states or the loss' sum, added term or count)
Result = Callable[[Any], tuple[Tensor, Any, dict[str, Tensor]]]


def loss_result(found: Any) -> tuple[Tensor, Any, dict[str, Tensor]]:
    """(sum, count, aux) of a loss' return value."""
    total, count, *aux = checked_loss(found)
    return total, count, tree.map(Tensor.detach, aux[0]) if aux else {}


class _Done(BaseException):
    """Ends the loss on a stage before the last, after its layers have run; carries their results."""

    def __init__(self, out: Out, sums: dict[str, Tensor]) -> None:
        self.out, self.sums = out, sums


def run_stage(
    loss: ModelLoss,
    params: Mapping[str, Any],
    x: Tensor | None,
    part: Microbatch,
    pipe: Pipeline,
    stage: int,
    *,
    hooks: StageHooks = ALONE,
    result: Result = loss_result,
) -> tuple[Out, dict[str, Tensor]]:
    """((x [B, S, D], term), aux) of a stage's layers; on the last stage ((sum, count), aux). x: None on the first.

    term: what these layers add to the loss, whose gradient travels with x; the last stage's is in its sum. aux: counts
    of these layers' experts, and balance terms as summands of means over all layers; on the last stage also the loss'
    own. params: the stage's share. result: (sum, count, aux) of the loss' return value.
    """
    config, family, last = pipe.config, fnmodels.family_of(pipe.config), len(pipe.layers) - 1
    lo, hi = pipe.layers[stage]

    def run(given: RunParams, *_: Any) -> tuple[Tensor, dict[str, Tensor]]:
        states = family.embed(given, part.inputs, config=config) if x is None else x
        own: Any = given.run
        options = own.adapted(dataclasses.replace(part.options, layout=part.layout), part.masks)
        inputs = part.inputs if isinstance(part.inputs, Mapping) else {}
        found = fnmodels.run_layers(
            {"layers": numbered(given["layers"])},
            states,
            part.masks,
            part.freqs_cis,
            lo,
            hi,
            config=config,
            valid=inputs.get("valid"),
            routing=inputs.get("routing"),
            taps=tuple(tap for tap in part.taps if tap != "hidden"),
            **keywords(options),
        )
        states, tapped = found if isinstance(found, tuple) else (found, {})
        if stage == last:
            return states, tapped | ({"hidden": states} if "hidden" in part.taps else {})
        raise done(states, tapped)

    def done(states: Tensor, tapped: Mapping[str, Tensor]) -> _Done:
        states = states if hooks.full_states is None else hooks.full_states(states)
        routers = part.routers
        if routers is None:
            return _Done((states, torch.zeros((), device=states.device)), {})
        terms = balance_of_layers(routers.balance)
        added, sums = balance_terms(tapped, part.inputs["valid"], routers.labelled, terms)
        aux = tree.map(Tensor.detach, sums) if routers.aux else {}
        if not added.requires_grad:
            return _Done((states, added), aux)
        return _Done((_Carry.apply(states, added), added.detach()), aux)

    def balance_of_layers(balance: Balance) -> Balance:
        own = loss.options.balance
        sparse = [kind.endswith("_moe") for kind in family.kinds(config)]
        share = sum(sparse[lo:hi]) / max(1, sum(sparse))
        return dataclasses.replace(balance if own is None else own(balance), share=share)

    staged = loss.with_options(stage=run, balance=balance_of_layers)
    try:
        total, beside, sums = result(staged(_joint(params, stage == last, hooks), part.batch))
    except _Done as here:
        return here.out, here.sums
    return (total, beside), sums


def _joint(params: Mapping[str, Any], last: bool, hooks: StageHooks) -> dict[str, Any]:
    """The params, where those that a split backward pass needs behind one autograd node went through `together`."""
    layers, rest = params["layers"], {name: value for name, value in params.items() if name != "layers"}
    if hooks.split_backward:
        layers = {number: together(layer) for number, layer in layers.items()}
    return {**(together(rest) if last else rest), "layers": layers}


class _Carry(torch.autograd.Function):
    """The identity on x that adds a loss term to the graph: the term's gradient is 1, on any stage."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, term: Tensor) -> Tensor:
        return x.clone()  # torch's stages detach their sent outputs in place, which a view does not allow

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.like = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones_like(ctx.like)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> NoReturn:
        raise NotImplementedError(
            "Forward mode does not see a term of the loss that a stage carries; use reverse mode."
        )
