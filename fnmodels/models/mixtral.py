"""Mixtral (arXiv 2401.04088): the Llama block with a mixture of experts in the place of every MLP."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import Create, MaskLike, causal_masks
from fnmodels.models.common.config_json import Fields
from fnmodels.models.common.decoder import check_decoder, decoder_name, decoder_sizes, decoder_to_hf
from fnmodels.models.common.moe import check_experts, expert_names, experts_from_hf
from fnmodels.models.common.rope_config import rope_from_hf, rope_to_hf
from fnmodels.models.common.spec import attention_leaves, decoder_leaves, layer_leaves, moe_leaves
from fnmodels.models.common.storage import Stored
from fnmodels.ops.attention.select import attention
from fnmodels.ops.embedding import embed_tokens
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import ACTIVATIONS, glu
from fnmodels.ops.moe.experts import Experts
from fnmodels.ops.moe.layer import KEPT, MOE_TAPS, moe
from fnmodels.ops.moe.router import RouterDtypes, softmax_top_k
from fnmodels.ops.norm import rms_norm
from fnmodels.ops.qkv import project_out, project_qkv
from fnmodels.ops.rotary import Rope, apply_rotary, rotary_table
from fnmodels.options import Kernel
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("mixtral",)
KINDS = ("full_moe", "sliding_moe")
ROUTED = True
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="wide")
TAPS = ("attention", "middle", "mlp", *MOE_TAPS)


@dataclass(frozen=True)
class Config:
    """Sizes and switches. `layer_kinds` names one of KINDS per layer; left empty, every layer is "full_moe"."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of one expert
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    num_local_experts: int
    num_experts_per_tok: int
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    rope: Rope = Rope(1e6)  # noqa: RUF009 - frozen
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    sliding_window: int | None = None
    layer_kinds: tuple[str, ...] = ()
    max_position_embeddings: int = 131072
    initializer_range: float = 0.02
    # kept for saving only
    model_type: str = field(default="mixtral", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_decoder(self, KINDS)
        check_experts(self.num_local_experts, self.num_experts_per_tok)

    @staticmethod
    def from_hf(values: dict[str, Any]) -> Config:
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        sizes = decoder_sizes(fields, max_positions=131072, tied=False, kv_heads=8)
        where = {"head_dim": sizes["head_dim"], "max_positions": sizes["max_position_embeddings"]}
        fields.expect("router_jitter_noise", 0, 0.0)
        window = fields.integer("sliding_window", 0, low=0) or None
        experts, chosen = experts_from_hf(fields, 8, 2, sizes["num_hidden_layers"])
        config = Config(
            **sizes,
            num_local_experts=experts,
            num_experts_per_tok=chosen,
            rope=rope_from_hf(fields, theta=1e6, **where),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
            hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            sliding_window=window,
            layer_kinds=("full_moe" if window is None else "sliding_moe",) * sizes["num_hidden_layers"],
            model_type=model_type,
        )
        object.__setattr__(config, "extra", fields.finish())
        return config

    def to_hf(self) -> dict[str, Any]:
        """A config.json in the current dialect."""
        own = ("rms_norm_eps", "hidden_act", "sliding_window", "num_local_experts", "num_experts_per_tok")
        rope = rope_to_hf(self.rope)
        return decoder_to_hf(
            self, "MixtralForCausalLM", rope_parameters=rope, **{name: getattr(self, name) for name in own}
        )


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, H, std = config.hidden_size, config.head_dim, config.initializer_range

    def layer() -> Tree:
        attention = attention_leaves(D, config.num_attention_heads, config.num_key_value_heads, H, std=std)
        return layer_leaves(D, attention, moe_leaves(D, config.num_local_experts, config.intermediate_size, std=std))

    return decoder_leaves(config, [layer() for _ in range(config.num_hidden_layers)])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}; each expert is a tensor of its own there."""
    names: dict[str, Stored] = {}
    for path in flatten(spec(config)):
        head, _, last = path.rpartition(".")
        where = f"model.{head}".replace(".mlp", ".block_sparse_moe")
        if last == "router":
            names[path] = f"{where}.gate.weight"
        elif head.endswith("experts"):
            number = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[last]
            names[path] = expert_names(where, config.num_local_experts, f"{number}.weight")
        else:
            names[path] = decoder_name(path)
    return names


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
    table = rotary_table(config.rope, config.head_dim, positions, length)
    return dict.fromkeys(sorted(set(config.layer_kinds)), table)


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
    valid: Tensor | None = None,
    routing: Tensor | None = None,
    experts: str | Experts = "auto",
) -> tuple[Tensor, dict[str, Tensor]]:
    """One layer: x [B, S, D] -> (x, {counts, router_logits, tap: tensor}). valid, routing, experts: see
    `ops.moe.layer`.
    """
    eps, weights = config.rms_norm_eps, layer["attention"]
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = attention(q, k, v, mask, kernel=kernel, scale=config.head_dim**-0.5, layout=layout)
    attended = project_out(weights, mixed)
    middle = x + attended
    chosen, dtype = config.num_experts_per_tok, ROUTER.output_dtype(x.dtype)
    fed, routed = moe(
        layer["mlp"],
        rms_norm(middle, layer["post_attention_layernorm"], eps=eps),
        functools.partial(softmax_top_k, k=chosen, renormalize=True, dtype=dtype),
        valid=valid,
        routing=routing,
        experts=experts,
        act=functools.partial(glu, activation=config.hidden_act),
        kernel=kernel,
    )
    named = {"attention": attended, "middle": middle, "mlp": fed, **routed}
    return middle + fed, {name: named[name] for name in (*KEPT, *taps)}


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and head: logits [B, S, V]. A tied head reads the embedding's one leaf."""
    head = params["embed_tokens"] if config.tie_word_embeddings else params["lm_head"]
    return linear(rms_norm(x, params["norm"], eps=config.rms_norm_eps), head)
