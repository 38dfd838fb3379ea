"""StarCoder 2 (arXiv 2402.19173).

A pre-norm decoder with LayerNorms, grouped queries, rotary embedding, a window on every layer or on none, and an MLP
without a gate. One switch puts a bias on every projection.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import Create, MaskLike, causal_masks
from fnmodels.models.common.config_json import Fields
from fnmodels.models.common.decoder import check_decoder, decoder_name, decoder_sizes, decoder_to_hf
from fnmodels.models.common.rope_config import rope_from_hf, rope_to_hf
from fnmodels.models.common.spec import attention_leaves, embedding, layer_norm_leaves, plain_mlp_leaves, weight
from fnmodels.ops.attention.select import attention
from fnmodels.ops.embedding import embed_tokens
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import ACTIVATIONS, plain_mlp
from fnmodels.ops.norm import layer_norm
from fnmodels.ops.qkv import project_out, project_qkv
from fnmodels.ops.rotary import Rope, apply_rotary, rotary_table
from fnmodels.options import Kernel
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("starcoder2",)
TAPS = ("attention", "middle", "mlp")


@dataclass(frozen=True)
class Config:
    """Sizes and switches. `layer_kinds` is all "full", or all "sliding" where there is a window; left empty, "full"."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    rope: Rope = Rope()  # noqa: RUF009 - frozen
    norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True
    use_bias: bool = True
    hidden_act: str = "gelu_pytorch_tanh"
    sliding_window: int | None = None
    layer_kinds: tuple[str, ...] = ()
    max_position_embeddings: int = 4096
    initializer_range: float = 0.018042
    # kept for saving only
    model_type: str = field(default="starcoder2", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_decoder(self, ("full", "sliding"))

    @staticmethod
    def from_hf(values: dict[str, Any]) -> Config:
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        sizes = decoder_sizes(fields, max_positions=4096, tied=True, kv_heads=2)
        sizes["initializer_range"] = fields.number("initializer_range", 0.018042, above=-1e-9)
        where = {"head_dim": sizes["head_dim"], "max_positions": sizes["max_position_embeddings"]}
        fields.expect("norm_type", "layer_norm")
        fields.expect("mlp_type", "default")
        window = fields.integer("sliding_window", 0, low=0) or None
        epsilon = fields.number("norm_epsilon", 1e-5)
        activation = fields.choice("hidden_act", tuple(ACTIVATIONS), "gelu_pytorch_tanh")
        # Of the training code: second names, which nobody reads (its "gelu" is the tanh one), and what is so anyway.
        fields.expect("layer_norm_epsilon", epsilon)
        fields.expect("activation_function", activation, "gelu")
        for name in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "scale_attn_weights"):
            fields.expect(name, True)
        config = Config(
            **sizes,
            rope=rope_from_hf(fields, theta=1e4, **where),
            norm_epsilon=epsilon,
            use_bias=fields.boolean("use_bias", True),
            hidden_act=activation,
            sliding_window=window,
            layer_kinds=("sliding" if window else "full",) * sizes["num_hidden_layers"],
            model_type=model_type,
        )
        object.__setattr__(config, "extra", fields.finish())
        return config

    def to_hf(self) -> dict[str, Any]:
        """A config.json in the current dialect. Raises ConfigError where the model type has no word for this model."""
        own = {name: getattr(self, name) for name in ("norm_epsilon", "use_bias", "hidden_act", "sliding_window")}
        return decoder_to_hf(self, "Starcoder2ForCausalLM", rope_parameters=rope_to_hf(self.rope), **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, H, std = config.hidden_size, config.head_dim, config.initializer_range
    heads, kv_heads, bias = config.num_attention_heads, config.num_key_value_heads, config.use_bias

    def layer() -> Tree:
        return {
            **layer_norm_leaves("input_layernorm", D, "embed"),
            "attention": attention_leaves(D, heads, kv_heads, H, std=std, qkv_bias=bias, o_bias=bias),
            **layer_norm_leaves("post_attention_layernorm", D, "embed"),
            "mlp": plain_mlp_leaves(D, config.intermediate_size, std=std, biases=bias),
        }

    tree: Tree = {
        "embed_tokens": embedding(config.vocab_size, D, std),
        "layers": [layer() for _ in range(config.num_hidden_layers)],
        **layer_norm_leaves("norm", D, "embed"),
    }
    if not config.tie_word_embeddings:
        tree["lm_head"] = weight((config.vocab_size, D), ("vocab", "embed"), std)
    return tree


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    names = {path: decoder_name(path) for path in flatten(spec(config))}
    return {path: n.replace(".up_proj.", ".c_fc.").replace(".down_proj.", ".c_proj.") for path, n in names.items()}


def kinds(config: Config) -> tuple[str, ...]:
    """The kind of each layer, the keys of masks and freqs_cis."""
    return config.layer_kinds


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}; positions and segment_ids [B, S]. create: see `fnmodels.inputs.mask.build_mask`."""
    return causal_masks(config.layer_kinds, config.sliding_window, positions, segment_ids, create=create)


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, R/2, 2]}."""
    return dict.fromkeys(config.layer_kinds, rotary_table(config.rope, config.head_dim, positions, length))


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]."""
    return embed_tokens(params["embed_tokens"], inputs)


def block(
    layer: Tree,
    x: Tensor,
    mask: MaskLike,
    freqs: Tensor,
    /,
    *,
    config: Config,
    kind: str,
    kernel: Kernel = "auto",
    layout: Layout | None = None,
    taps: tuple[str, ...] = (),
) -> tuple[Tensor, dict[str, Tensor]]:
    """One layer: x [B, S, D] -> (x, {tap: tensor})."""
    eps, weights = config.norm_epsilon, layer["attention"]
    normed = layer_norm(x, layer["input_layernorm"], layer["input_layernorm_bias"], eps=eps)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = attention(q, k, v, mask, kernel=kernel, scale=config.head_dim**-0.5, layout=layout)
    attended = project_out(weights, mixed)
    middle = x + attended
    normed = layer_norm(middle, layer["post_attention_layernorm"], layer["post_attention_layernorm_bias"], eps=eps)
    fed = plain_mlp(layer["mlp"], normed, activation=config.hidden_act)
    named = {"attention": attended, "middle": middle, "mlp": fed}
    return middle + fed, {name: named[name] for name in taps}


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and head: logits [B, S, V]. A tied head reads the embedding's one leaf."""
    head = params["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    return linear(layer_norm(x, params["norm"], params["norm_bias"], eps=config.norm_epsilon), head)
