"""The settings of a language model, the task of the main job."""

from dataclasses import dataclass
from typing import Any

from .lora_flag import parse_lora
from .runs import RunSettings, logging, model_sizes, new_model, text, training, types_of
from .types import (
    CHECKPOINT,
    DATA,
    FAMILY,
    FIELDS,
    FRACTION_BELOW_1,
    IMPORT,
    LORA,
    NUMBER,
    POSITIVE,
    STRING,
    choice,
    integer,
)

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class Settings(RunSettings):
    """The settings of a language model. The defaults reach the lowest loss in four minutes on two CPU cores.

    All sizes are divisible by 2 (tensor, context, pipeline parallelism), the rows of a batch by 4 (data parallelism).
    """

    data: str | None = text(
        None,
        DATA,
        "a text file, a folder of them (without hidden ones), .jsonl, .parquet, or a folder of .npy shards of token "
        "ids; a URL that fsspec reads, or your own f() -> iterable of texts, which are streamed; or several, each with "
        "a weight",
    )
    stream: int | None = text(
        None,
        integer(1),
        "read the data while training, for text that does not fit in memory, and shuffle it within windows of this "
        "many rows (1024 for a URL and your own function)",
    )
    family: str | None = text(
        None, FAMILY, "your own module that defines the model, new or of --init: mymodel.py or package.module"
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


DEFAULT = Settings()
SETTING_TYPES, MODEL_SIZES = types_of(Settings), model_sizes(Settings)
