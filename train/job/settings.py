"""What a run can be told, as one frozen dataclass: flags, the keys of a TOML file and their checks all follow from it.

A value given as a flag wins over one in the file, and that over the default. Where a run is resumed its own values are
the defaults, and those that decide its numbers must not be given otherwise.
"""

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fnmodels.errors import UserError
from train.command_line import suggestion
from train.data import sources
from train.optim.schedules import SHAPES

from .setting_types import (
    ABOVE_0,
    BELOW_1,
    BETAS,
    CHECKPOINT,
    DATA,
    LORA,
    NUMBER,
    REMAT,
    SHARE,
    WORDS,
    Kind,
    choice,
    whole,
)

TEXT, MODEL, LEARNING, WATCHING, KEEPING = (
    "text and length",
    "the model that is made where --init names none",
    "how it learns",
    "what is told on the way",
    "what is kept",
)
GROUPS = (TEXT, MODEL, LEARNING, WATCHING, KEEPING)


def setting(default: Any, kind: Kind, group: str, help: str, *, free: bool = False) -> Any:
    """free: it decides no number of the run, so that a resumed one may have another."""
    return field(default=default, metadata={"kind": kind, "group": group, "help": help, "free": free})


@dataclass(frozen=True)
class Settings:
    """Defaults: what learns most in four minutes of two CPU cores.

    Every size divides by 2 (tensor, context and pipeline parallel), the rows of a batch by 4 (data parallel).
    """

    data: str | None = setting(
        None,
        DATA,
        TEXT,
        "a text file, a folder of them (without hidden ones), .jsonl, .parquet, a folder of .npy shards of ids; or "
        "several, each with a weight",
    )
    broken: str = setting("skip", choice("skip", "stop"), TEXT, "what to do about a file or record that cannot be read")
    init: str | None = setting(None, CHECKPOINT, TEXT, "start from the weights and tokenizer of a checkpoint folder")
    lora: str | None = setting(
        None,
        LORA,
        TEXT,
        "train adapters of rank R beside the weights of --init, which stay: r=8,alpha=16,targets=q_proj+v_proj, where "
        "targets are last names of weights, or patterns of whole ones",
    )
    steps: int = setting(1000, whole(1), TEXT, "optimizer steps of the whole run, resumed parts included")
    seed: int = setting(0, whole(0), TEXT, "of the initial weights and the order of the text")
    row_length: int = setting(512, whole(2), TEXT, "tokens of a row, or as many as the model has positions")
    batch_rows: int = setting(4, whole(1), TEXT, "rows of a batch")

    vocab_size: int = setting(4096, whole(257), MODEL, "tokens that the tokenizer may learn")
    hidden_size: int = setting(192, whole(1), MODEL, "width of the residual stream")
    intermediate_size: int = setting(512, whole(1), MODEL, "width of the MLP")
    num_hidden_layers: int = setting(4, whole(1), MODEL, "layers")
    num_attention_heads: int = setting(4, whole(1), MODEL, "query heads")
    num_key_value_heads: int = setting(2, whole(1), MODEL, "heads of keys and values")

    learning_rate: float | None = setting(
        None,
        NUMBER,
        LEARNING,
        "at its peak; without it 0.003, for adapters 0.001, for a checkpoint, whose knowledge should last, 0.0003; "
        "with Lion a tenth of these, with Adafactor ten times and with SGD thirty times as much",
    )
    optimizer: str = setting(
        "adamw",
        choice("adamw", "muon", "lion", "sgd", "adafactor"),
        LEARNING,
        "of all weights; muon: of the matrices in the layers, and AdamW of the rest",
    )
    muon_learning_rate: float | None = setting(
        None, NUMBER, LEARNING, "of the matrices that Muon has, at its peak; without it 0.02"
    )
    warmup: int = setting(60, whole(0), LEARNING, "steps up to the peak, at most a tenth of all")
    decay_ratio: float = setting(0.6, SHARE, LEARNING, "share of the steps in which the rate falls, the last ones")
    decay_shape: str = setting("linear", choice(*SHAPES), LEARNING, "how it falls; sqrt is 1 - sqrt(progress)")
    decay_floor: float = setting(0.0, SHARE, LEARNING, "where it stays, as a share of the peak")
    betas: tuple[float, float] | None = setting(
        None, BETAS, LEARNING, "of the means of AdamW (without it 0.9,0.95) and Lion (0.9,0.99)"
    )
    momentum: float | None = setting(None, BELOW_1, LEARNING, "of SGD (without it 0.9) and Muon (0.95)")
    weight_decay: float | None = setting(
        None,
        NUMBER,
        LEARNING,
        "of matrices (without it 0.1, with Lion 1, Adafactor 0.01, SGD 0.0001); norms, biases, embeddings have none",
    )
    clip: float = setting(1.0, ABOVE_0, LEARNING, "the largest norm of the gradient")
    ema: float | None = setting(
        None,
        BELOW_1,
        LEARNING,
        "keep an average of the weights, its decay in each step being this (0.999, say): held-out text and samples are "
        "the average's, and DIR/ema is its checkpoint",
    )
    label_smoothing: float = setting(
        0.0, BELOW_1, LEARNING, "share of each target that is spread over the vocabulary in training"
    )
    z_loss: float = setting(
        0.0, NUMBER, LEARNING, "weight of log(sum(exp(logits)))^2, which keeps logits from drifting (1e-4, say)"
    )
    balance_loss: float = setting(
        0.0, NUMBER, LEARNING, "of a model with experts: weight of the loss that uneven use of them costs in each row"
    )
    router_z_loss: float = setting(0.0, NUMBER, LEARNING, "of a model with experts: weight of its routers' z-loss")
    balance_rate: float | None = setting(
        None,
        ABOVE_0,
        LEARNING,
        "of a model whose routers have a selection bias (DeepSeek V3, GLM-4.5): how far it moves after each step",
    )
    accumulate: int = setting(
        1, whole(1), LEARNING, "parts in which the rows of a batch are taken in turn: less memory, the same step"
    )
    remat: str = setting(
        "none",
        REMAT,
        LEARNING,
        "what of each layer is computed again for the gradient: less memory, the same numbers",
        free=True,
    )
    compile: str = setting(
        "none", choice("none", "block", "whole"), LEARNING, "what torch.compile takes: each kind of layer, or the loss"
    )
    dtype: str | None = setting(
        None,
        choice("bfloat16", "float32"),
        LEARNING,
        "of the computation, weights and gradients being float32; without it what is fast on this machine",
    )

    eval_every: int | None = setting(
        None,
        whole(1),
        WATCHING,
        "steps between looks at a sample of the held-out text, the last step being one; without it a tenth of all",
    )
    eval_rows: int = setting(16, whole(1), WATCHING, "rows of that sample")
    peak_flops: float | None = setting(
        None,
        ABOVE_0,
        WATCHING,
        "the machine's peak in FLOP/s; with it MFU, its use, is told (train/job/flops.py)",
        free=True,
    )
    profile: int | None = setting(
        None,
        whole(1),
        WATCHING,
        "how many steps go into a chrome trace, after two that do not",
        free=True,
    )
    sample_every: int | None = setting(
        None, whole(1), WATCHING, "steps between samples of the model's speech; one is made at the end", free=True
    )
    prompt: str = setting("def ", WORDS, WATCHING, "what the model continues there")
    sample_tokens: int = setting(120, whole(1), WATCHING, "tokens of that continuation")

    save_every: int = setting(100, whole(1), KEEPING, "steps between saves; the last step is always saved", free=True)
    keep: int = setting(
        2,
        whole(1),
        KEEPING,
        "saved steps that stay, the newest; a damaged one falls back to the one before",
        free=True,
    )


DEFAULT = Settings()
KINDS: dict[str, Kind] = {entry.name: entry.metadata["kind"] for entry in fields(Settings)}
FREE = frozenset(entry.name for entry in fields(Settings) if entry.metadata["free"])
SIZES = tuple(entry.name for entry in fields(Settings) if entry.metadata["group"] == MODEL)


def deciding(settings: Settings) -> dict[str, Any]:
    """What decides the run's numbers, as JSON."""
    values = json.loads(json.dumps(asdict(settings)))
    return {name: value for name, value in values.items() if name not in FREE}


def from_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is a setting of `values`, as `deciding` gave it; a value that cannot be one is as if it were not there."""
    found = {}
    for name in values.keys() & KINDS.keys():
        value = values[name]
        try:
            found[name] = None if value is None and getattr(DEFAULT, name) is None else KINDS[name].check(value)
        except ValueError:
            continue
    return found


def absolute(name: str, value: Any, base: Path) -> Any:
    """The same value; where it names files, relative ones are relative to `base`."""
    if KINDS[name] is DATA:
        return sources.absolute_paths(value, base)
    return os.path.realpath(base / value) if KINDS[name] is CHECKPOINT else value


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a file, paths being relative to its folder. UserError names the key that is unknown or wrong."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: the file of settings cannot be read ({error.strerror})") from error
    except ValueError as error:  # of TOML and of UTF-8
        raise UserError(f"{path} is not TOML: {error}") from error
    for name, value in values.items():
        if name not in KINDS:
            table = ", for settings stand outside of tables" if isinstance(value, dict) else ""
            raise UserError(f"{path}: there is no setting {name!r}{table}{suggestion(name, KINDS)}")
        try:
            values[name] = KINDS[name].check(value)
        except ValueError as error:
            raise UserError(f"{path}: {name} is {value!r}, which is not {error}") from error
        values[name] = absolute(name, values[name], path.parent)
    return values


def to_toml(settings: Settings) -> str:
    """All settings, as `read_toml` reads them; one without a value, or without a use, stands in a comment."""
    lines = []
    for name, value in asdict(settings).items():
        idle = value is None or (settings.init and name in SIZES)
        lines.append(f"# {name} =\n" if idle else f"{name} = {_value(value)}\n")
    return "".join(lines)


def _value(value: Any) -> str:
    # What JSON writes of these is TOML, but for a character that only TOML escapes.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
