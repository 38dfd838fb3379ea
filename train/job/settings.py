"""All settings of a run as one frozen dataclass, from which the flags, the TOML keys and their validation are derived.

A flag overrides the file, and the file overrides the default. A resumed run's own values are its defaults, and those
that affect its results must not be changed.
"""

import json
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fnmodels.errors import UserError
from fnmodels.files import read_text
from params.checkpoint.gguf_folder import converted
from params.checkpoint.hub import is_hub_name, local_folder
from params.checkpoint.load_gguf import is_gguf
from params.io.files import is_deep
from train.command_line import suggestion
from train.data import sources
from train.optim.schedules import SHAPES

from .imported import Imported, absolute, is_import_path
from .lora_flag import parse_lora
from .setting_types import (
    BETAS,
    CHECKPOINT,
    DATA,
    FIELDS,
    FILE,
    FRACTION,
    FRACTION_BELOW_1,
    IMPORT,
    LORA,
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
    keep: int = saving(
        2, integer(1), "number of saved steps to keep; a damaged one falls back to the one before", changeable=True
    )

    @property
    def rows(self) -> tuple[str, int]:
        """The setting that says how many rows or examples a batch has, and its value."""
        raise NotImplementedError

    @property
    def replaced(self) -> tuple[str, tuple[str, ...]]:
        """What makes settings of a new model void, as a sentence, and their names."""
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


@dataclass(frozen=True)
class Settings(RunSettings):
    """The settings of a language model. The defaults reach the lowest loss in four minutes on two CPU cores.

    All sizes are divisible by 2 (tensor, context, pipeline parallelism), the rows of a batch by 4 (data parallelism).
    """

    data: str | None = text(
        None,
        DATA,
        "a text file, a folder of them (without hidden ones), .jsonl, .parquet, or a folder of .npy shards of token "
        "ids; or several, each with a weight",
    )
    broken: str = text("skip", choice("skip", "stop"), "skip a file or record that cannot be read, or stop")
    init: str | None = text(None, CHECKPOINT, "start from the weights and tokenizer of a checkpoint folder")
    lora: str | None = text(
        None,
        LORA,
        "train LoRA adapters of rank R on the frozen weights of --init: r=8,alpha=16,targets=q_proj+v_proj, where "
        "targets are the last parts of weights' names, or patterns of full names; ,rslora and ,dora choose these forms",
    )
    row_length: int = text(512, integer(2), "tokens per row, at most the model's positions")
    batch_rows: int = text(4, integer(1), "rows per batch, over all processes")
    vocab_size: int = new_model(4096, integer(257), "maximal size of the new tokenizer's vocabulary")
    hidden_size: int = new_model(192, integer(1), "width of the residual stream")
    intermediate_size: int = new_model(512, integer(1), "width of the MLP")
    num_hidden_layers: int = new_model(4, integer(1), "number of layers")
    num_attention_heads: int = new_model(4, integer(1), "number of query heads")
    num_key_value_heads: int = new_model(2, integer(1), "number of key and value heads")
    model: str = new_model("llama", STRING, "the type of the new model: qwen3, mixtral, ... (docs/models.md)")
    preset: str | None = new_model(
        None, STRING, "a published size by name (fnmodels.presets()), in place of a type and sizes"
    )
    set: str | None = new_model(
        None,
        FIELDS,
        "fields of the new model's config.json, such as num_experts=8,layer_types=[...]; null leaves a field out",
    )
    loss: str | None = training(
        None, IMPORT, "your own loss(params, batch, config=...) -> (sum, count[, aux]) in place of the cross entropy"
    )
    label_smoothing: float = training(
        0.0, FRACTION_BELOW_1, "label smoothing: fraction of each target spread over the vocabulary, in training only"
    )
    z_loss: float = training(
        0.0,
        NUMBER,
        "weight of the z-loss, log(sum(exp(logits)))^2, which keeps logits from drifting (for example 1e-4)",
    )
    dropout: str = training(
        "off", choice("off", "config"), "dropout in training: none, or at the rates of the checkpoint's config.json"
    )
    balance_loss: float = training(0.0, NUMBER, "MoE models: weight of the load-balancing loss of each row")
    router_z_loss: float = training(0.0, NUMBER, "MoE models: weight of the routers' z-loss")
    balance_rate: float | None = training(
        None,
        POSITIVE,
        "MoE models with a selection bias in their routers (DeepSeek V3, GLM-4.5): its update rate per step",
    )
    eval_rows: int = logging(16, integer(1), "rows of that sample")
    peak_flops: float | None = logging(
        None,
        POSITIVE,
        "the machine's peak in FLOP/s, to report model FLOPs utilization, MFU (train/job/flops.py)",
        changeable=True,
    )
    sample_every: int | None = logging(
        None, integer(1), "steps between sampled continuations of --prompt; one is sampled at the end", changeable=True
    )
    prompt: str | None = logging(
        None, STRING, "the text that the model continues in samples; by default the beginning of the first document"
    )
    sample_tokens: int = logging(120, integer(1), "tokens per sample")

    @property
    def rows(self) -> tuple[str, int]:
        return "batch_rows", self.batch_rows

    @property
    def replaced(self) -> tuple[str, tuple[str, ...]]:
        if self.init is None and self.preset is not None:
            return f"is for a new type, and --preset {self.preset} has its own: use --set", ("model", *SIZES)
        return super().replaced

    @property
    def one_process(self) -> str | None:
        if self.lora is None or not parse_lora(self.lora).dora:
            return None
        return f"DoRA is for one process: leave dora out of --lora {self.lora}"

    @property
    def adamw(self) -> dict[str, Any]:
        peak = 1e-3 if self.lora else 3e-4 if self.init else 3e-3
        return {"learning_rate": peak, "weight_decay": 0.1, "betas": (0.9, 0.95)}


TOML_LIMIT = 50_000  # bytes; all settings take 3,000, and a key of many parts takes time quadratic in them
DEFAULT = Settings()
FLAG_ONLY = frozenset({"track"})  # sends data elsewhere, which no file, perhaps a stranger's, may switch on


def types_of(kind: type[RunSettings]) -> dict[str, SettingType]:
    """{name of a setting: its type} of a task's settings."""
    return {entry.name: entry.metadata["type"] for entry in fields(kind)}


def changeable(kind: type[RunSettings]) -> frozenset[str]:
    """The settings that a resumed run may change."""
    return frozenset(entry.name for entry in fields(kind) if entry.metadata["changeable"])


def model_sizes(kind: type[RunSettings]) -> tuple[str, ...]:
    """The settings of a new model, which --init replaces."""
    return tuple(entry.name for entry in fields(kind) if entry.metadata["group"] == GROUPS[1])


SETTING_TYPES, CHANGEABLE, MODEL_SIZES = types_of(Settings), changeable(Settings), model_sizes(Settings)
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")

# {flag of parallelism beside --mesh: (mesh dimension, type or None for a switch, help)}. Like the mesh, they do not
# affect the results of a run.
MESH_FLAGS: dict[str, tuple[str, SettingType | None, str]] = {
    "context": (
        "cp",
        choice("gather", "ulysses", "ring"),
        "how attention gets the keys and values of other ranks' positions (default gather)",
    ),
    "order": (
        "cp",
        choice("mask", "head_tail"),
        "how positions are distributed over ranks (default mask, balanced by the masks; with ulysses, and for models "
        "with recurrent layers: contiguous)",
    ),
    "schedule": (
        "pp",
        replace(STRING, description="a name", metavar="NAME"),
        "pipeline schedule, 1F1B (default), GPipe, ...",
    ),
    "virtual": ("pp", integer(1), "stages per process of an interleaved schedule (default 2)"),
    "microbatches": ("pp", integer(1), "number of microbatches per step (default: one row each)"),
    "sequence": ("tp", None, "shard the sequence dimension between its sublayers too (sequence parallelism)"),
}


def fixed_settings(settings: RunSettings) -> dict[str, Any]:
    """The settings that affect the run's results, as JSON."""
    values = json.loads(json.dumps(asdict(settings)))
    return {name: value for name, value in values.items() if name not in changeable(type(settings))}


def from_json(values: Mapping[str, Any], kind: type[RunSettings] = Settings) -> dict[str, Any]:
    """The settings among `values`, as `fixed_settings` wrote them; invalid values are ignored."""
    found, types, default = {}, types_of(kind), kind()
    for name in values.keys() & (types.keys() - FLAG_ONLY):
        value = values[name]
        try:
            found[name] = None if value is None and getattr(default, name) is None else types[name].check(value)
        except ValueError:
            continue
    return found


def absolute_paths(name: str, value: Any, base: Path, kind: type[RunSettings] = Settings) -> Any:
    """`value` with absolute paths, where the setting names files; relative ones are resolved against `base`.

    A model of the Hub is downloaded, and a GGUF file converted into the cache folder.
    """
    setting_type = types_of(kind)[name]
    if setting_type is DATA:
        return sources.absolute_paths(value, base)
    if setting_type is CHECKPOINT and is_hub_name(value):
        return str(local_folder(value))  # with the commit in it: a run that resumes reads the same files
    if is_import_path(value) and is_importable(setting_type):
        return absolute(value, base)
    if setting_type is CHECKPOINT and is_gguf(base / value) and (base / value).exists():
        return str(converted(Path(os.path.realpath(base / value))))
    return os.path.realpath(base / value) if setting_type in (CHECKPOINT, FILE) else value


def is_importable(setting_type: SettingType) -> bool:
    """Whether the setting may name a function of the user's own."""
    return setting_type.accepts("module:name") and not setting_type.accepts("a text")


def imports(settings: RunSettings) -> dict[str, Imported]:
    """{setting: the function of the user's own that it names}."""
    types = types_of(type(settings))
    values = {name: getattr(settings, name) for name, kind in types.items() if is_importable(kind)}
    return {name: Imported(value, flag(name)) for name, value in values.items() if is_import_path(value)}


def flag(name: str) -> str:
    """The command-line flag of a setting."""
    return f"--{name.replace('_', '-')}"


def as_flag(value: Any) -> str:
    """The text of a value on the command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def read_toml(path: Path, kind: type[RunSettings] = Settings) -> dict[str, Any]:
    """The settings in a TOML file, paths relative to its folder. UserError names an unknown key or invalid value."""
    types = types_of(kind)
    try:
        values = tomllib.loads(read_text(path, TOML_LIMIT, follow=True))
        deep = is_deep(values)
    except OSError as error:
        raise UserError(f"{path}: the file of settings cannot be read ({error.strerror})") from error
    except RecursionError:
        deep = True
    except ValueError as error:
        raise UserError(f"{path} is not TOML: {error}") from error
    if deep:
        raise UserError(f"{path} is not TOML that can be read: it is nested too deeply")
    for name, value in values.items():
        if name not in types:
            table = ": settings stand outside of tables" if isinstance(value, dict) else ""
            raise UserError(f"{path}: there is no setting {name!r}{table}{suggestion(name, types)}")
        if name in FLAG_ONLY:
            raise UserError(
                f"{path}: {name} is not read from a file: remove it there, and give {flag(name)} if it is meant"
            )
        try:
            values[name] = types[name].check(value)
        except ValueError as error:
            raise UserError(f"{path}: {name} is {value!r:.80}, which is not {error}") from error
        if is_importable(types[name]) and is_import_path(value):
            raise UserError(
                f"{path}: {name} names code, {value}, which no file may run: remove it there, and give {flag(name)} "
                f"{value} if it is meant"
            )
        values[name] = absolute_paths(name, values[name], path.parent, kind)
    return values


def to_toml(settings: RunSettings) -> str:
    """All settings in the form that `read_toml` reads; one without a value or effect is a comment."""
    kind, lines = type(settings), []
    for name in sorted_by_group(kind):
        value = getattr(settings, name)
        unused = value is None or name in FLAG_ONLY or name in settings.replaced[1] or name in imports(settings)
        # JSON of these values is valid TOML, but for one character that only TOML must escape.
        text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        lines.append(f"# {name} =\n" if unused else f"{name} = {text}\n")
    return "".join(lines)


def sorted_by_group(kind: type[RunSettings]) -> list[str]:
    """The names of a task's settings, group by group."""
    return [entry.name for entry in sorted(fields(kind), key=lambda entry: GROUPS.index(entry.metadata["group"]))]
