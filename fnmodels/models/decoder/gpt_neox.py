"""GPT-NeoX and Pythia (arXiv 2204.06745, 2304.01373).

LayerNorms, rotary embedding of a quarter of each head, an MLP without a gate. Attention and MLP run in parallel, each
with its own norm, or in sequence. On disk q, k and v are fused, interleaved by head.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.rope_config import parse_rope, rope_values
from fnmodels.models.common.spec import decoder_leaves, layer_leaves, plain_mlp_leaves, usual_attention
from fnmodels.models.common.storage import Stored, TensorSlice
from fnmodels.ops import Rope, apply_rotary, layer_norm, plain_mlp, project_out, project_qkv
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("gpt_neox",)
TRAITS = Traits(
    dropout={"attention_dropout": ("weights",), "hidden_dropout": ("attention", "mlp", "embedding")},
    leftovers=(r"gpt_neox\.layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",),  # buffers in older files
    in_memory={r"^embed_out\.": "lm_head."},
)

# The components of a path that have another name on disk.
_ON_DISK = {
    "embed_tokens": "embed_in",
    "norm": "final_layer_norm",
    "o_proj": "dense",
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
}


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches."""

    rope: Rope = Rope(partial=0.25)  # noqa: RUF009 - frozen
    layer_norm_eps: float = 1e-5
    attention_bias: bool = True
    use_parallel_residual: bool = True
    hidden_act: str = "gelu"
    max_position_embeddings: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        decoder.check_width(self)
        if self.num_key_value_heads != (heads := self.num_attention_heads):
            raise ConfigError(
                f"This family divides hidden_size {self.hidden_size} among {heads} heads, of keys as of queries; "
                f"num_key_value_heads {self.num_key_value_heads} says otherwise."
            )

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        config = Config(
            **decoder.base_fields(fields, MODEL_TYPES, max_positions=2048, activation="gelu", rope=_rope),
            **fields.plain(layer_norm_eps=1e-5, attention_bias=True, use_parallel_residual=True),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        names = ("layer_norm_eps", "attention_bias", "use_parallel_residual", "hidden_act")
        return decoder.decoder_to_hf(self, "GPTNeoXForCausalLM", *names)


def _rope(fields: Fields, **where: int) -> Rope:
    """The rope; older files have other names for its base and its fraction of the head."""
    older: dict[str, Any] = {}
    for usual, own in (("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct")):
        top, value = fields.take(usual, None), fields.take(own, None)
        if top is not None and top != value:
            # for this family transformers does not read the common names at the top level: the value is ambiguous
            raise ConfigError(f"{fields.where}: {usual!r} must be in 'rope_parameters', or be called {own!r}.")
        if value is not None:
            older[usual] = value
    values = rope_values(fields)
    for usual, value in older.items():
        if values.get(usual, value) != value:
            raise ConfigError(f"{fields.where}: {usual!r} is {shown(values[usual])}, but an older name says {value!r}.")
    inner = Fields(older | values, f"{fields.where}, rope")
    return parse_rope(inner, **where, theta=1e4, partial=0.25)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, biased = config.hidden_size, config.attention_bias
    mlp = plain_mlp_leaves(D, config.intermediate_size, std=config.initializer_range)
    layer = layer_leaves(D, usual_attention(config, qkv_bias=biased, o_bias=biased), mlp, norm_bias=True)
    return decoder_leaves(config, [layer for _ in config.layer_kinds], norm_bias=True)


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk, or its rows in each head's block of query_key_value}."""
    return {path: _stored(path, config) for path in flatten(spec(config))}


def _stored(path: str, config: Config) -> Stored:
    if path in ("lm_head", "score"):
        return "embed_out.weight" if path == "lm_head" else "score.weight"
    where, _, name = path.rpartition(".")
    ending = "bias" if name.endswith("_bias") else "weight"
    stem = name.removesuffix("_bias")
    if where.endswith(("attention", "mlp")):  # q_bias belongs to q_proj, as input_layernorm_bias to input_layernorm
        stem = stem.removesuffix("_proj") + "_proj"
    if stem in ("q_proj", "k_proj", "v_proj"):
        first = "qkv".index(stem[0]) * config.head_dim
        rows, heads = 3 * config.num_attention_heads * config.head_dim, config.num_attention_heads
        return TensorSlice(
            f"gpt_neox.{where}.query_key_value.{ending}", first, first + config.head_dim, rows, groups=heads
        )
    return ".".join(("gpt_neox", *filter(None, (where, _ON_DISK.get(stem, stem))), ending))


unembed = decoder.unembed_layer_norm


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.layer_norm_eps, layer["attention"]
    normed = layer_norm(x, layer["input_layernorm"], layer["input_layernorm_bias"], eps=eps)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    after = x + ctx.tap("attention", project_out(weights, mixed))
    read = x if config.use_parallel_residual else after
    normed = layer_norm(read, layer["post_attention_layernorm"], layer["post_attention_layernorm_bias"], eps=eps)
    return after + ctx.tap("mlp", plain_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


_NEOX = {"model_type": "gpt_neox", "vocab_size": 50304, "max_position_embeddings": 2048, "layer_norm_eps": 1e-5}
_NEOX |= {"rotary_pct": 0.25, "rotary_emb_base": 10000, "hidden_act": "gelu", "use_parallel_residual": True}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
PRESETS: dict[str, ConfigJson] = {
    name: _NEOX | dict(zip(_SIZES, sizes, strict=True)) | rest
    for name, *sizes, rest in (
        ("gpt-neox-20b", 6144, 24576, 44, 64, {"vocab_size": 50432, "hidden_act": "gelu_fast"}),
        ("pythia-70m", 512, 2048, 6, 8, {}),
        ("pythia-160m", 768, 3072, 12, 12, {}),
        ("pythia-410m", 1024, 4096, 24, 16, {}),
        ("pythia-1b", 2048, 8192, 16, 8, {}),
        ("pythia-1.4b", 2048, 8192, 24, 16, {}),
        ("pythia-2.8b", 2560, 10240, 32, 32, {}),
        ("pythia-6.9b", 4096, 16384, 32, 32, {"vocab_size": 50432}),
        ("pythia-12b", 5120, 20480, 36, 40, {"vocab_size": 50688}),
    )
}
