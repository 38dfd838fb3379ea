"""StarCoder 2 (BigCode, arXiv 2402.19173).

A pre-norm decoder with LayerNorms, grouped-query attention, rotary embedding, a sliding window in all layers or none,
and an MLP without a gate. `use_bias` adds a bias to every projection.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import decoder_leaves, layer_leaves, plain_mlp_leaves, usual_attention
from fnmodels.ops import apply_rotary, layer_norm, plain_mlp, project_out, project_qkv
from fnmodels.tree import Tree

MODEL_TYPES = ("starcoder2",)
TRAITS = Traits(
    kinds=("full", "sliding"),
    dropout={
        "attention_dropout": ("weights",),
        "residual_dropout": ("attention", "mlp"),
        "embedding_dropout": ("embedding",),
    },
)


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches. `layer_kinds`: all "sliding" if there is a window, else all "full"."""

    norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True
    use_bias: bool = True
    hidden_act: str = "gelu_pytorch_tanh"
    sliding_window: int | None = None
    max_position_embeddings: int = 4096
    initializer_range: float = 0.018042

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        defaults: Any = {"max_positions": 4096, "tied": True, "kv_heads": 2, "activation": "gelu_pytorch_tanh"}
        usual = decoder.base_fields(fields, MODEL_TYPES, **defaults)
        usual["initializer_range"] = fields.number("initializer_range", 0.018042, above=-1e-9)
        fields.expect("norm_type", "layer_norm")
        fields.expect("mlp_type", "default")
        epsilon = fields.number("norm_epsilon", 1e-5)
        # From the training code: duplicates without effect (its "gelu" is the tanh one), and what always holds.
        fields.expect("layer_norm_epsilon", epsilon)
        fields.expect("activation_function", usual["hidden_act"], "gelu")
        for name in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "scale_attn_weights"):
            fields.expect(name, True)
        config = Config(
            **usual,
            norm_epsilon=epsilon,
            use_bias=fields.boolean("use_bias", True),
            **decoder.one_window(fields, usual["num_hidden_layers"]),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect. Raises ConfigError where the model type has no word for this model."""
        names = ("norm_epsilon", "use_bias", "hidden_act", "sliding_window")
        return decoder.decoder_to_hf(self, "Starcoder2ForCausalLM", *names)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, bias = config.hidden_size, config.use_bias
    mlp = plain_mlp_leaves(D, config.intermediate_size, std=config.initializer_range, biases=bias)
    layer = layer_leaves(D, usual_attention(config, qkv_bias=bias, o_bias=bias), mlp, norm_bias=True)
    return decoder_leaves(config, [layer for _ in config.layer_kinds], norm_bias=True)


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    names = decoder.hf_names(config)
    return {path: n.replace(".up_proj.", ".c_fc.").replace(".down_proj.", ".c_proj.") for path, n in names.items()}


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.norm_epsilon, layer["attention"]
    normed = layer_norm(x, layer["input_layernorm"], layer["input_layernorm_bias"], eps=eps)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = layer_norm(x, layer["post_attention_layernorm"], layer["post_attention_layernorm_bias"], eps=eps)
    return x + ctx.tap("mlp", plain_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and head: logits [B, S, V]."""
    normed = layer_norm(x, params["norm"], params["norm_bias"], eps=config.norm_epsilon)
    return decoder.project(params, normed, config)
