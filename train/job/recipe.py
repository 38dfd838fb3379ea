"""The optimizer, the step and the dtype of a run's settings, and the default hyperparameters of each optimizer."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.errors import UserError
from fnmodels.ops.dtypes import widest
from fnmodels.tree import Tree
from train.loss import LossFn
from train.optim.adafactor import adafactor
from train.optim.adamw import adamw, sgd
from train.optim.base import Optimizer
from train.optim.lion import lion
from train.optim.muon import muon
from train.optim.schedules import warmup_stable_decay
from train.optim.wrappers import averaged, partition, with_ema
from train.state import State

from .settings import RunSettings, imports

S = TypeVar("S", bound=RunSettings)
MATRICES = "layers.*_proj"

# Default hyperparameters of each optimizer beside those that a task has for AdamW. rate: a factor on AdamW's peak.
OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"rate": 1.0, "weight_decay": None, "betas": None},
    "muon": {"rate": 1.0, "weight_decay": None, "betas": None, "momentum": 0.95, "muon_learning_rate": 0.02},
    "lion": {"rate": 0.1, "weight_decay": 1.0, "betas": (0.9, 0.99)},  # the rule of thumb of arXiv 2302.06675
    "sgd": {"rate": 30.0, "weight_decay": 1e-4, "momentum": 0.9},  # decay is part of the gradient and of the momentum
    "adafactor": {"rate": 10.0, "weight_decay": 0.01},  # its rate is relative to the RMS of a parameter
}
HYPERPARAMETERS = ("weight_decay", "betas", "momentum", "muon_learning_rate")


def resolved(settings: S) -> S:
    """`settings` with defaults that depend on other settings or the machine; a run keeps them when it is resumed."""
    return with_optimizer_defaults(replace(settings, dtype=settings.dtype or fast_dtype()))


def fast_dtype() -> str:
    """bfloat16 on CPUs that multiply faster in it (a step is 1.5 times as fast as in fp32), else float32.

    A resumed run keeps the dtype it started with, also on another machine.
    """
    # `get_capabilities` is missing in older supported versions of torch.
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    if not (capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")):
        return "float32"
    from fnmodels.ops.cpu import product_table  # here, for its import measures

    # A variable such as ONEDNN_MAX_CPU_ISA may keep the libraries from instructions that the CPU has.
    return "float32" if product_table.WIDENS else "bfloat16"


def with_optimizer_defaults(settings: S) -> S:
    """`settings` with defaults for all hyperparameters of its optimizer; those it does not have stay None."""
    of_task, values = settings.adamw, dict(OPTIMIZER_DEFAULTS.get(settings.optimizer, {"rate": 1.0}))
    rate = values.pop("rate") * of_task["learning_rate"]
    values = {name: of_task[name] if value is None else value for name, value in values.items()}
    values["learning_rate"] = float(f"{rate:g}")  # rounds off binary representation errors
    return replace(settings, **{name: value for name, value in values.items() if getattr(settings, name) is None})


def unused_settings(settings: RunSettings) -> list[str]:
    """The names of hyperparameters that are set but that the optimizer does not have."""
    known = OPTIMIZER_DEFAULTS.get(settings.optimizer, ())
    return [name for name in HYPERPARAMETERS if getattr(settings, name) is not None and name not in known]


def optimizer_for(spec: Tree, settings: RunSettings) -> Optimizer:
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
        case _:
            optimizer = imports(settings)["optimizer"](rate, spec=spec)
            if not isinstance(optimizer, Optimizer):
                raise UserError(
                    f"--optimizer {settings.optimizer}: it returns no train.Optimizer, but {optimizer!r:.80}"
                )
    return optimizer if settings.ema is None else with_ema(optimizer, settings.ema)


def _rate(settings: RunSettings, peak: float | None) -> Callable[[Tensor], float | Tensor]:
    assert peak is not None  # set by `with_optimizer_defaults`
    if (own := imports(settings).get("decay_shape")) is not None:
        return lambda step: peak * float(own(int(step), settings.steps))
    shape: dict[str, Any] = {"total": settings.steps, "warmup": min(settings.warmup, settings.steps // 10)}
    shape |= {"decay_ratio": settings.decay_ratio, "shape": settings.decay_shape, "floor": settings.decay_floor}

    def rate(step: Tensor) -> float | Tensor:
        if torch.compiler.is_compiling():  # in fp64, as Python computes it, where the device has it
            return peak * warmup_stable_decay(step.to(widest(step.device)), **shape)
        return peak * float(warmup_stable_decay(int(step), **shape))

    return rate


def evaluated_params(state: State, settings: RunSettings) -> Tree:
    """The parameters used for evaluation and sampling: with --ema the averages, for parameters that have one."""
    return state.params if settings.ema is None else averaged(state.params, state.opt_state["ema"])


def step_options(settings: RunSettings) -> dict[str, Any]:
    """Keywords of `make_step`."""
    return {name: getattr(settings, name) for name in ("accumulate", "clip", "remat", "compile")}


def computed_in(dtype: torch.dtype, loss: LossFn, spec: Tree) -> LossFn:
    """The loss with its model computed in `dtype`: trainable parameters, their gradients and the loss stay fp32."""
    casts = tree.map(lambda leaf: leaf.dtype.is_floating_point and not leaf.keep_dtype, spec)

    def computed(params: Tree, batch: Mapping[str, Tensor]) -> tuple[Any, ...]:
        return loss(tree.map(lambda param, casts: param.to(dtype) if casts else param, params, casts), batch)

    return computed
