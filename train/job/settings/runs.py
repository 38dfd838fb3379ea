"""The settings that every run has, whatever it trains, and the functions that declare a setting."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from train.optim.schedules import SHAPES

from .types import (
    BETAS,
    CHECKPOINT,
    FILE,
    FRACTION,
    FRACTION_BELOW_1,
    IMPORT,
    NAMES,
    NUMBER,
    POSITIVE,
    REMAT,
    STRING,
    SettingType,
    choice,
    choice_or_import,
    integer,
)

GROUPS = ("data and length", "a new model (without --init)", "training", "evaluation and logging", "saving")


def _group(name: str) -> Callable[..., Any]:
    """The function that makes the fields of one group."""

    def setting(default: Any, kind: SettingType, help: str, *, changeable: bool = False) -> Any:
        """A field of Settings. changeable: does not affect the results, so that a resumed run may change it."""
        return field(default=default, metadata={"type": kind, "group": name, "help": help, "changeable": changeable})

    return setting


text, new_model, training, logging, saving = map(_group, GROUPS)


@dataclass(frozen=True)
class RunSettings:
    """The settings that every run has, whatever it trains; the settings of a task add its own."""

    data: str | None = text(None, FILE, "the data to train on")
    init: str | None = text(None, CHECKPOINT, "start from this model")
    ignore_fields: tuple[str, ...] | None = text(
        None, NAMES, "fields of --init's config.json that no model knows, without which it is read"
    )
    steps: int = text(1000, integer(1), "optimizer steps of the run in total, over all resumes")
    seed: int = text(0, integer(0), "seed of the initial weights and the data order")
    learning_rate: float | None = training(
        None,
        NUMBER,
        "peak learning rate; by default 0.003, for adapters 0.001, for a checkpoint 0.0003; a tenth of that with Lion, "
        "ten times with Adafactor, thirty with SGD",
    )
    optimizer: str = training(
        "adamw",
        choice_or_import("adamw", "muon", "lion", "sgd", "adafactor"),
        "the optimizer; muon: Muon for the matrices in the layers, AdamW for the rest; or your own f(rate, spec=...)",
    )
    muon_learning_rate: float | None = training(None, NUMBER, "peak learning rate of Muon's matrices (default 0.02)")
    warmup: int = training(60, integer(0), "warmup steps, at most a tenth of all steps")
    decay_ratio: float = training(
        0.6, FRACTION, "fraction of the steps, the last ones, over which the learning rate decays"
    )
    decay_shape: str = training(
        "linear",
        choice_or_import(*SHAPES),
        "shape of the decay; sqrt is 1 - sqrt(progress); or your own f(step, steps) in place of warmup and decay",
    )
    decay_floor: float = training(0.0, FRACTION, "final learning rate as a fraction of the peak")
    betas: tuple[float, float] | None = training(
        None, BETAS, "decay rates of the moments of AdamW (default 0.9,0.95) and Lion (0.9,0.99)"
    )
    momentum: float | None = training(None, FRACTION_BELOW_1, "momentum of SGD (default 0.9) and Muon (0.95)")
    weight_decay: float | None = training(
        None,
        NUMBER,
        "decay of matrices (default 0.1, Lion 1, Adafactor 0.01, SGD 0.0001); none for norms, biases and embeddings",
    )
    clip: float = training(1.0, POSITIVE, "maximal global gradient norm")
    ema: float | None = training(
        None,
        FRACTION_BELOW_1,
        "keep an exponential moving average of the weights with this decay per step (for example 0.999), which is "
        "evaluated and sampled from; DIR/ema is its checkpoint",
    )
    accumulate: int = training(
        1, integer(1), "gradient accumulation: the number of microbatches per step; less memory, the same step"
    )
    remat: str = training(
        "none",
        REMAT,
        "rematerialization: what backward recomputes of each layer; less memory, the same results",
        changeable=True,
    )
    compile: str = training(
        "none",
        choice("none", "block", "whole", "step"),
        "what torch.compile compiles: each kind of layer (block), the loss (whole), or the loss and the update (step), "
        "for small models",
    )
    dtype: str | None = training(
        None,
        choice("bfloat16", "float32"),
        "compute dtype; weights and gradients are float32; default: the fastest on this machine",
    )
    stop_after_bad: int | None = training(
        None,
        integer(1),
        "end with exit code 5 after this many bad steps in a row: their gradients are not finite, or the loss has "
        "jumped",
        changeable=True,
    )
    on_divergence: str | None = training(
        None,
        choice("rewind"),
        "after --stop-after-bad steps (default 5) go back to the last good save, and on from there with other batches, "
        "three times at most",
    )
    on_step: str | None = training(
        None,
        IMPORT,
        "your own f(state, metrics), called after each step; a result that is true ends the run, such as "
        "train.eval.early_stopping:on_step",
    )
    eval_every: int | None = logging(
        None,
        integer(1),
        "steps between evaluations on a sample of the held-out text (default: a tenth of all); the last step is one",
    )
    profile: int | None = logging(
        None, integer(1), "number of steps to profile into a Chrome trace, after two warmup steps", changeable=True
    )
    track: str | None = logging(
        None,
        choice("mlflow", "wandb"),
        "where the metrics go beside TensorBoard, by the package of that name and its environment variables; a flag "
        "alone, for a resumed run too",
        changeable=True,
    )
    save_every: int = saving(
        100, integer(1), "steps between checkpoints; the last step is always saved", changeable=True
    )
    license: str | None = saving(
        None, STRING, "license of the weights in the model card, by the Hub's name, such as apache-2.0", changeable=True
    )
    mirror: str | None = saving(
        None,
        STRING,
        "a URL that fsspec reads, such as s3://bucket/runs/a, to which saved steps are copied in the background, and "
        "from which --resume takes them where the folder has none as new; a flag alone",
        changeable=True,
    )
    keep: int = saving(
        2, integer(1), "number of saved steps to keep; a damaged one falls back to the one before", changeable=True
    )

    @property
    def rows(self) -> tuple[str, int]:
        """The setting that says how many rows or examples a batch has, and its value."""
        raise NotImplementedError

    @property
    def replaced(self) -> tuple[str, tuple[str, ...]]:
        """The reason why settings of a new model are void, as the end of a sentence, and their names."""
        if self.init is None:
            return "", ()
        return f"is for a new model, and --init {self.init} names a checkpoint", model_sizes(type(self))

    @property
    def one_process(self) -> str | None:
        """Why one process must train it, as a sentence; None: a mesh can too."""
        return None

    @property
    def adamw(self) -> dict[str, Any]:
        """The defaults of AdamW for this task: learning_rate (its peak), weight_decay and betas."""
        raise NotImplementedError


def types_of(kind: type[RunSettings]) -> dict[str, SettingType]:
    """{name of a setting: its type} of a task's settings."""
    return {entry.name: entry.metadata["type"] for entry in fields(kind)}


def changeable(kind: type[RunSettings]) -> frozenset[str]:
    """The settings that a resumed run may change."""
    return frozenset(entry.name for entry in fields(kind) if entry.metadata["changeable"])


def model_sizes(kind: type[RunSettings]) -> tuple[str, ...]:
    """The settings of a new model, which --init replaces."""
    return tuple(entry.name for entry in fields(kind) if entry.metadata["group"] == GROUPS[1])
