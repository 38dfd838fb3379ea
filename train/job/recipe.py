"""The optimizer and the loss terms of a run's settings, and the default hyperparameters of each optimizer."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

import fnmodels
from fnmodels.models.common.family import DecoderConfig, traits_of
from fnmodels.tree import Tree
from train.loss import Balance, LossFn
from train.losses.next_token import next_token_loss
from train.optim.adafactor import adafactor
from train.optim.adamw import adamw, sgd
from train.optim.base import Optimizer
from train.optim.lion import lion
from train.optim.muon import muon
from train.optim.schedules import warmup_stable_decay
from train.optim.wrappers import averaged, partition, with_ema
from train.state import State

from .settings import Settings

MATRICES = "layers.*_proj"
LR_FROM_SCRATCH, LR_FROM_CHECKPOINT, LR_OF_ADAPTERS = 3e-3, 3e-4, 1e-3  # peak learning rates of AdamW

# Default hyperparameters of each optimizer. rate: a factor on AdamW's peak.
OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"rate": 1.0, "weight_decay": 0.1, "betas": (0.9, 0.95)},
    "muon": {"rate": 1.0, "weight_decay": 0.1, "betas": (0.9, 0.95), "momentum": 0.95, "muon_learning_rate": 0.02},
    "lion": {"rate": 0.1, "weight_decay": 1.0, "betas": (0.9, 0.99)},  # the rule of thumb of arXiv 2302.06675
    "sgd": {"rate": 30.0, "weight_decay": 1e-4, "momentum": 0.9},  # decay is part of the gradient and of the momentum
    "adafactor": {"rate": 10.0, "weight_decay": 0.01},  # its rate is relative to the RMS of a parameter
}
HYPERPARAMETERS = ("weight_decay", "betas", "momentum", "muon_learning_rate")


def with_optimizer_defaults(settings: Settings) -> Settings:
    """`settings` with defaults for all hyperparameters of its optimizer; those it does not have stay None."""
    values = dict(OPTIMIZER_DEFAULTS[settings.optimizer])
    peak = LR_OF_ADAPTERS if settings.lora else LR_FROM_CHECKPOINT if settings.init else LR_FROM_SCRATCH
    values["learning_rate"] = float(f"{peak * values.pop('rate'):g}")  # rounds off binary representation errors
    return replace(settings, **{name: value for name, value in values.items() if getattr(settings, name) is None})


def unused_settings(settings: Settings) -> list[str]:
    """The names of hyperparameters that are set but that the optimizer does not have."""
    known = OPTIMIZER_DEFAULTS[settings.optimizer]
    return [name for name in HYPERPARAMETERS if getattr(settings, name) is not None and name not in known]


def optimizer_for(spec: Tree, settings: Settings) -> Optimizer:
    """The optimizer of `settings`, which must be completed by `with_optimizer_defaults`."""

    def keywords(*names: str) -> dict[str, Any]:
        return {"spec": spec} | {name: getattr(settings, name) for name in ("weight_decay", *names)}

    rate = _rate(settings, settings.learning_rate)
    match settings.optimizer:
        case "lion":
            optimizer = lion(rate, **keywords("betas"))
        case "sgd":
            optimizer = sgd(rate, **keywords("momentum"))
        case "adafactor":
            optimizer = adafactor(rate, **keywords())
        case "muon":
            matrices = muon(_rate(settings, settings.muon_learning_rate), **keywords("momentum"))
            optimizer = partition({MATRICES: matrices, "*": adamw(rate, **keywords("betas"))})
        case "adamw":
            optimizer = adamw(rate, **keywords("betas"))
        case unknown:
            raise ValueError(f"There is no optimizer {unknown!r} for --optimizer.")
    return optimizer if settings.ema is None else with_ema(optimizer, settings.ema)


def _rate(settings: Settings, peak: float | None) -> Callable[[Tensor], float]:
    assert peak is not None  # set by `with_optimizer_defaults`
    shape: dict[str, Any] = {"total": settings.steps, "warmup": min(settings.warmup, settings.steps // 10)}
    shape |= {"decay_ratio": settings.decay_ratio, "shape": settings.decay_shape, "floor": settings.decay_floor}
    return lambda step: peak * float(warmup_stable_decay(int(step), **shape))


def evaluated_params(state: State, settings: Settings) -> Tree:
    """The parameters used for evaluation and sampling: with --ema the averages, for parameters that have one."""
    return state.params if settings.ema is None else averaged(state.params, state.opt_state["ema"])


def moe_balance(settings: Settings) -> Balance | None:
    """The weights of the load-balancing losses; None where both are 0."""
    if not settings.balance_loss and not settings.router_z_loss:
        return None
    return Balance(sequence=settings.balance_loss, z=settings.router_z_loss)


def losses(config: DecoderConfig, settings: Settings) -> tuple[LossFn, LossFn]:
    """(held-out loss, training loss with the terms that only it has), with aux (expert counts) for MoE models."""
    loss = functools.partial(next_token_loss, config=config, aux=is_routed(config))
    terms = {"label_smoothing": settings.label_smoothing, "z_loss": settings.z_loss}
    return loss, functools.partial(loss, balance=moe_balance(settings), **terms)


def is_routed(config: DecoderConfig) -> bool:
    return bool(traits_of(fnmodels.family_of(config)).routed)


def step_options(settings: Settings) -> dict[str, Any]:
    """Keywords of `make_step`."""
    return {name: getattr(settings, name) for name in ("accumulate", "clip", "remat", "compile", "balance_rate")}


def is_cross_entropy(settings: Settings) -> bool:
    """Whether the training loss is a plain cross entropy apart from load balancing, so that perplexity is defined."""
    return not settings.label_smoothing and not settings.z_loss
