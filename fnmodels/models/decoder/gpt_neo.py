"""GPT-Neo (EleutherAI, 2021), also of TinyStories (arXiv 2305.07759).

GPT-2 with weights [out, in], biases in the output projections and the MLP alone, scores that are not scaled, and a
sliding window in every second layer.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, kinds, older  # noqa: F401
from fnmodels.models.common.decoder.older import embed_placed as embed  # noqa: F401
from fnmodels.models.common.decoder.older import no_freqs as freqs_cis  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import decoder_leaves, layer_leaves, plain_mlp_leaves, usual_attention
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("gpt_neo",)
TRAITS = Traits(
    dropout={
        "attention_dropout": ("weights",),
        "resid_dropout": ("attention", "mlp"),
        "embed_dropout": ("embedding",),
    },
    kinds=("full_nope", "sliding_nope"),
    leftovers=(r"transformer\.h\.\d+\.attn\.attention\.(masked_)?bias",),  # mask buffers in older files
)
_NAMES = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "window_size": "sliding_window"}
_NAMES |= {"layer_norm_epsilon": "layer_norm_eps", "activation_function": "hidden_act"}
_KINDS = {"global": "full_nope", "local": "sliding_nope"}
_ON_DISK = {
    "model.embed_tokens.weight": "transformer.wte.weight",
    "model.embed_positions.weight": "transformer.wpe.weight",
    "model.layers.": "transformer.h.",
    "model.norm.": "transformer.ln_f.",
    ".self_attn.": ".attn.attention.",
    ".o_proj.": ".out_proj.",
    ".input_layernorm.": ".ln_1.",
    ".post_attention_layernorm.": ".ln_2.",
    ".up_proj.": ".c_fc.",
    ".down_proj.": ".c_proj.",
}


@dataclass(frozen=True)
class Config(older.PlacedConfig):
    """Sizes and switches."""

    tie_word_embeddings: bool = True
    hidden_act: str = "gelu_new"
    sliding_window: int | None = None
    max_position_embeddings: int = 2048

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields, usual = older.older_fields(
            values, MODEL_TYPES, _NAMES, positions=2048, tied=True, activation="gelu_new"
        )
        types = fields.take("attention_types", [[["global", "local"], 12]])
        most = usual["num_hidden_layers"] + 1  # a file may repeat them for ever
        try:
            listed = [kind for names, count in types for _ in range(min(count, most)) for kind in names]
            layer_kinds = tuple(_KINDS[kind] for kind in listed)
        except (TypeError, ValueError, KeyError):
            layer_kinds = ()
        if len(layer_kinds) != usual["num_hidden_layers"]:
            raise ConfigError(
                f"{fields.where}: 'attention_types' is {shown(types)}, but must name {usual['num_hidden_layers']} "
                'layers as [[["global", "local"], 12]] names 24.'
            )
        fields.expect("attention_layers", listed)  # the same, written out
        window = fields.integer("sliding_window", 256)
        config = Config(**usual, layer_kinds=layer_kinds, sliding_window=window)
        return decoder.finished(config, fields, older.UNUSED)

    def to_hf(self) -> ConfigJson:
        """A config.json under the names of published files."""
        theirs = {kind: name for name, kind in _KINDS.items()}
        types = [[[theirs[kind]], 1] for kind in self.layer_kinds]
        own = {"attention_types": types, "window_size": self.sliding_window}
        return older.older_to_hf(self, "GPTNeoForCausalLM", _NAMES, **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, inner, std = config.hidden_size, config.intermediate_size, config.initializer_range
    layer = layer_leaves(D, usual_attention(config, o_bias=True), plain_mlp_leaves(D, inner, std=std), norm_bias=True)
    tree = decoder_leaves(config, [layer for _ in config.layer_kinds], norm_bias=True)
    return {"embed_positions": older.position_table(config)} | tree


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    names = {path: decoder.decoder_name(path) for path in flatten(spec(config))}
    for ours, theirs in _ON_DISK.items():
        names = {path: name.replace(ours, theirs) for path, name in names.items()}
    return names


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    return older.layer_norm_layer(layer, x, mask, ctx, config=config, scale=1.0)


unembed = decoder.unembed_layer_norm

_SIZES = ("hidden_size", "num_layers", "num_heads")
PRESETS = {
    name: {"model_type": "gpt_neo", "vocab_size": 50257, "attention_types": [[["global", "local"], sizes[1] // 2]]}
    | dict(zip(_SIZES, sizes, strict=True))
    for name, *sizes in (
        ("gpt-neo-125m", 768, 12, 12),
        ("gpt-neo-1.3b", 2048, 24, 16),
        ("gpt-neo-2.7b", 2560, 32, 20),
    )
}
