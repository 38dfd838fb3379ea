"""The settings of the tasks beside language modeling: what their commands take as flags."""

from dataclasses import dataclass, field
from typing import Any

from train.data.examples import KINDS
from train.job.settings.runs import RunSettings, new_model, text, training
from train.job.settings.types import CHECKPOINT, FILE, NUMBER, POSITIVE, choice, integer


def _default(name: str, value: Any) -> Any:
    """A setting of every run with another default."""
    return field(default=value, metadata=RunSettings.__dataclass_fields__[name].metadata)


@dataclass(frozen=True)
class ExampleSettings(RunSettings):
    """The settings of runs whose data are single examples. Files may move: a run's identity has their bytes."""

    data: str | None = text(None, FILE, "the examples to train on (needed)", changeable=True)
    init: str | None = text(None, CHECKPOINT, "start from this model, a folder", changeable=True)
    heldout: str | None = text(None, FILE, "more examples, on which the loss is measured", changeable=True)
    batch: int = text(16, integer(1), "examples per step, over all processes")
    warmup: int = _default("warmup", 20)
    decay_ratio: float = _default("decay_ratio", 0.5)
    dtype: str | None = _default("dtype", "float32")
    save_every: int = _default("save_every", 200)

    @property
    def rows(self) -> tuple[str, int]:
        return "batch", self.batch


@dataclass(frozen=True)
class DocumentSettings(ExampleSettings):
    """Settings of `fnmodels-documents`."""

    loss: str | None = text(None, choice(*KINDS), "what is trained (needed)")
    length: int = text(256, integer(1), "tokens of a text at most; longer ones are cut")
    temperature: float = training(0.05, POSITIVE, "of pairs: what similarities are divided by")

    @property
    def adamw(self) -> dict[str, Any]:
        return {"learning_rate": 5e-5, "weight_decay": 0.01, "betas": (0.9, 0.999)}


@dataclass(frozen=True)
class FlowSettings(ExampleSettings):
    """Settings of `fnmodels-flow`."""

    side: int | None = text(
        None,
        integer(1),
        "of a folder of pictures: pixels of a side, to which they are resized and cropped (32)",
    )
    patch: int | None = text(
        None, integer(1), "of a folder of pictures: pixels of a side of a token, an even number (2)"
    )
    samples: int | None = text(None, integer(1), "of a folder of pictures: drawn pictures of each class (4)")
    layers: int = new_model(2, integer(1), "double layers of a new model")
    single_layers: int = new_model(2, integer(1), "single layers of a new model")
    heads: int = new_model(4, integer(1), "heads of a new model")
    head_dim: int = new_model(32, integer(1), "width of a head of a new model, a multiple of 32")
    guidance: float = training(1.0, NUMBER, "the guidance that a model with this input is given")

    @property
    def adamw(self) -> dict[str, Any]:
        return {"learning_rate": 1e-3, "weight_decay": 0.01, "betas": (0.9, 0.999)}
