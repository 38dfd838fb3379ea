"""How a run learns: the optimizer and the loss that its settings name, and the usual numbers where none are given."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fnmodels.tree import Tree
from train.losses.moe_balance import Balance
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
FROM_SCRATCH, FROM_CHECKPOINT, OF_ADAPTERS = 3e-3, 3e-4, 1e-3  # peaks of AdamW's learning rate


@dataclass(frozen=True)
class Usual:
    """Of an optimizer. rate: times AdamW's; None: it has no such number."""

    rate: float
    weight_decay: float
    betas: tuple[float, float] | None = None
    momentum: float | None = None
    muon_learning_rate: float | None = None


USUAL = {
    "adamw": Usual(1.0, 0.1, betas=(0.9, 0.95)),
    "muon": Usual(1.0, 0.1, betas=(0.9, 0.95), momentum=0.95, muon_learning_rate=0.02),
    "lion": Usual(0.1, 1.0, betas=(0.9, 0.99)),  # the rule of thumb of arXiv 2302.06675
    "sgd": Usual(30.0, 1e-4, momentum=0.9),  # whose decay is a part of the gradient, and so of the momentum
    "adafactor": Usual(10.0, 0.01),  # whose rate is relative to the size of a leaf's numbers
}
NUMBERS = ("weight_decay", "betas", "momentum", "muon_learning_rate")


def with_usual(settings: Settings) -> Settings:
    """With a number wherever the optimizer has one; those that it does not have stay None."""
    usual = USUAL[settings.optimizer]
    rate = OF_ADAPTERS if settings.lora else FROM_CHECKPOINT if settings.init else FROM_SCRATCH
    values: dict[str, Any] = {name: getattr(usual, name) for name in NUMBERS}
    values["learning_rate"] = float(f"{rate * usual.rate:g}")  # no digits that only binary fractions have
    return replace(settings, **{name: value for name, value in values.items() if getattr(settings, name) is None})


def strangers(settings: Settings) -> list[str]:
    """Numbers that the settings have and their optimizer has not."""
    usual = USUAL[settings.optimizer]
    return [name for name in NUMBERS if getattr(settings, name) is not None and getattr(usual, name) is None]


def optimizer_for(spec: Tree, settings: Settings) -> Optimizer:
    """settings: with numbers, as `with_usual` gives them."""

    def numbers(*names: str) -> dict[str, Any]:
        return {"spec": spec} | {name: getattr(settings, name) for name in ("weight_decay", *names)}

    rate = _rate(settings, settings.learning_rate)
    match settings.optimizer:
        case "lion":
            made = lion(rate, **numbers("betas"))
        case "sgd":
            made = sgd(rate, **numbers("momentum"))
        case "adafactor":
            made = adafactor(rate, **numbers())
        case "muon":
            of_matrices = muon(_rate(settings, settings.muon_learning_rate), **numbers("momentum"))
            made = partition({MATRICES: of_matrices, "*": adamw(rate, **numbers("betas"))})
        case _:
            made = adamw(rate, **numbers("betas"))
    return made if settings.ema is None else with_ema(made, settings.ema)


def _rate(settings: Settings, peak: float | None) -> Callable[[Tensor], float]:
    assert peak is not None  # as in `with_usual`
    shape: dict[str, Any] = {"total": settings.steps, "warmup": min(settings.warmup, settings.steps // 10)}
    shape |= {"decay_ratio": settings.decay_ratio, "shape": settings.decay_shape, "floor": settings.decay_floor}
    return lambda step: peak * float(warmup_stable_decay(int(step), **shape))


def weights(state: State, settings: Settings) -> Tree:
    """What held-out text and samples are shown: with --ema the averages, where leaves have one."""
    return state.params if settings.ema is None else averaged(state.params, state.opt_state["ema"])


def balance_of(settings: Settings) -> Balance | None:
    """What is added to the loss that trains, for the routers' sake."""
    if not settings.balance_loss and not settings.router_z_loss:
        return None
    return Balance(sequence=settings.balance_loss, z=settings.router_z_loss)


def loss_terms(settings: Settings) -> dict[str, Any]:
    """What the loss that trains has beside that of held-out text: keywords of `next_token_loss`."""
    terms = {"label_smoothing": settings.label_smoothing, "z_loss": settings.z_loss}
    return {"balance": balance_of(settings), **terms}


def is_plain(settings: Settings) -> bool:
    """Whether the tokens' part of the loss that trains is their cross entropy, of which a perplexity can be made."""
    return not settings.label_smoothing and not settings.z_loss
