"""StableLM (3B-4E1T, Zephyr, StableLM 2: arXiv 2402.17834).

The Llama block with LayerNorms and rotary embedding on a quarter of each head. Members differ in biases of q, k and v,
in a norm of its own for every head of queries and keys, and in whether attention and MLP read one norm side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import Create, MaskLike, causal_masks
from fnmodels.models.common.config_json import Fields
from fnmodels.models.common.decoder import check_decoder, decoder_name, decoder_sizes, decoder_to_hf
from fnmodels.models.common.rope_config import rope_from_hf, rope_to_hf
from fnmodels.models.common.spec import attention_leaves, embedding, gated_mlp_leaves, layer_norm_leaves, norm, weight
from fnmodels.ops.attention.select import attention
from fnmodels.ops.embedding import embed_tokens
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import ACTIVATIONS, gated_mlp
from fnmodels.ops.norm import layer_norm, upcast
from fnmodels.ops.qkv import project_out, project_qkv
from fnmodels.ops.rotary import Rope, apply_rotary, rotary_table
from fnmodels.options import Kernel
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("stablelm",)
TAPS = ("attention", "mlp")
LEFTOVERS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)  # a buffer that older files hold


@dataclass(frozen=True)
class Config:
    """Sizes and switches. `layer_kinds` is "full" for every layer."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    rope: Rope = Rope(partial=0.25)  # noqa: RUF009 - frozen
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False
    hidden_act: str = "silu"
    layer_kinds: tuple[str, ...] = ()
    max_position_embeddings: int = 4096
    initializer_range: float = 0.02
    # kept for saving only
    model_type: str = field(default="stablelm", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_decoder(self, ("full",))
        if self.head_dim * self.num_attention_heads != self.hidden_size:
            raise ConfigError(
                f"This family divides hidden_size {self.hidden_size} among {self.num_attention_heads} heads; "
                f"head_dim {self.head_dim} says otherwise."
            )

    @staticmethod
    def from_hf(values: dict[str, Any]) -> Config:
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        sizes = decoder_sizes(fields, max_positions=4096, tied=False, kv_heads=32)
        where = {"head_dim": sizes["head_dim"], "max_positions": sizes["max_position_embeddings"]}
        config = Config(
            **sizes,
            rope=rope_from_hf(fields, theta=1e4, partial=0.25, **where),
            layer_norm_eps=fields.number("layer_norm_eps", 1e-5),
            use_qkv_bias=fields.boolean("use_qkv_bias", False),
            qk_layernorm=fields.boolean("qk_layernorm", False),
            use_parallel_residual=fields.boolean("use_parallel_residual", False),
            hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            model_type=model_type,
        )
        object.__setattr__(config, "extra", fields.finish())
        return config

    def to_hf(self) -> dict[str, Any]:
        """A config.json in the current dialect."""
        own = ("layer_norm_eps", "use_qkv_bias", "qk_layernorm", "use_parallel_residual", "hidden_act")
        # Always said: left out, it would be a quarter.
        rope = rope_to_hf(self.rope) | {"partial_rotary_factor": self.rope.partial}
        rest = {name: getattr(self, name) for name in own}
        return decoder_to_hf(self, "StableLmForCausalLM", rope_parameters=rope, **rest)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]. Norms of heads are lists, a leaf for each head, as on disk."""
    D, H, std = config.hidden_size, config.head_dim, config.initializer_range
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads

    def layer() -> Tree:
        attention: Tree = attention_leaves(D, heads, kv_heads, H, std=std, qkv_bias=config.use_qkv_bias)
        if config.qk_layernorm:
            attention |= {"q_norms": [norm(H, "head_dim")] * heads, "k_norms": [norm(H, "head_dim")] * kv_heads}
        tree = {
            **layer_norm_leaves("input_layernorm", D, "embed"),
            "attention": attention,
            "mlp": gated_mlp_leaves(D, config.intermediate_size, std=std),
        }
        own_norm = {} if config.use_parallel_residual else layer_norm_leaves("post_attention_layernorm", D, "embed")
        return tree | own_norm

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
    return {path: name.replace("_norms.", "_layernorm.norms.") for path, name in names.items()}


def kinds(config: Config) -> tuple[str, ...]:
    """The kind of each layer, the keys of masks and freqs_cis."""
    return config.layer_kinds


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}; positions and segment_ids [B, S]. create: see `fnmodels.inputs.mask.build_mask`."""
    return causal_masks(config.layer_kinds, None, positions, segment_ids, create=create)


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, R/2, 2]}."""
    return dict.fromkeys(config.layer_kinds, rotary_table(config.rope, config.head_dim, positions, length))


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]."""
    return embed_tokens(params["embed_tokens"], inputs)


def _norm_heads(x: Tensor, weights: list[Tensor], eps: float) -> Tensor:
    """A LayerNorm on each head of x [B, S, N, H], with a weight [H] for each of the N."""
    heads = layer_norm(upcast(x), None, None, eps=eps).unbind(-2)
    return torch.stack([head * upcast(w) for head, w in zip(heads, weights, strict=True)], dim=-2).to(x.dtype)


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
    eps, weights = config.layer_norm_eps, layer["attention"]
    normed = layer_norm(x, layer["input_layernorm"], layer["input_layernorm_bias"], eps=eps)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    if config.qk_layernorm:
        q, k = _norm_heads(q, weights["q_norms"], eps), _norm_heads(k, weights["k_norms"], eps)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = attention(q, k, v, mask, kernel=kernel, scale=config.head_dim**-0.5, layout=layout)
    attended = project_out(weights, mixed)
    if not config.use_parallel_residual:
        own, own_bias = layer["post_attention_layernorm"], layer["post_attention_layernorm_bias"]
        normed = layer_norm(x + attended, own, own_bias, eps=eps)
    fed = gated_mlp(layer["mlp"], normed, activation=config.hidden_act)
    named = {"attention": attended, "mlp": fed}
    return x + attended + fed, {name: named[name] for name in taps}


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and head: logits [B, S, V]. A tied head reads the embedding's one leaf."""
    head = params["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    return linear(layer_norm(x, params["norm"], params["norm_bias"], eps=config.layer_norm_eps), head)
