"""Muse Glimmer's text (Meta, 2026, 30B): Gemma 2's layer with a gate per element and scaleless norms of heads.

Embeddings are normed without a weight, and so are queries, which are then scaled, and keys. Every fourth layer from the
end sees all tokens without rotary embedding; the others slide. Norms around sublayers multiply by 1 + weight, those
after them with an eps of their own. Logits are scaled, then soft-capped.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, freqs_cis, hf_names, kinds  # noqa: F401
from fnmodels.models.common.family import Traits, parsed
from fnmodels.models.common.rope_config import rope_to_hf
from fnmodels.models.common.spec import decoder_leaves, norm, usual_attention, usual_mlp, weight
from fnmodels.ops import apply_rotary, embed_tokens, gated_mlp, project_out, project_qkv, split_heads
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.ops.norm import rms_norm, rms_norm_fp32_weight, rms_norm_zero_centered
from fnmodels.tree import Tree

MODEL_TYPES = ("muse_glimmer_text",)
TRAITS = Traits(kinds=("sliding", "full_nope", "full", "sliding_nope"))
_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches."""

    rms_norm_eps: float = 1e-5
    post_norm_eps: float = 1e-8  # of the norms after sublayers
    attention_bias: bool = False
    query_scale: float = 3.87  # of normed queries, beside 1 / sqrt(head_dim)
    logit_scale: float = 0.19611613513818404  # before the soft-cap
    final_softcap: float = 20.0
    hidden_act: str = "silu"
    sliding_window: int | None = 2048
    max_position_embeddings: int = 131072

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields({("hidden_act" if n == "hidden_activation" else n): value for n, value in values.items()})
        usual = decoder.base_fields(
            fields, MODEL_TYPES, theta=1e4, max_positions=131072, head_dim=128, kv_heads=2, activation="silu"
        )
        layers = usual["num_hidden_layers"]
        rests = [(layers - 1 - i) % 4 == 0 for i in range(layers)]
        slides = decoder.sliding_layers(fields, [not rest for rest in rests])
        turns = _turning(fields, [not rest for rest in rests], usual["rope"].theta)
        usual["layer_kinds"] = tuple(
            ("sliding" if near else "full") + "_nope" * (not turn) for near, turn in zip(slides, turns, strict=True)
        )
        config = Config(
            **usual,
            **fields.plain(rms_norm_eps=1e-5, attention_bias=False, sliding_window=2048),
            post_norm_eps=fields.number("post_norm_eps", 1e-8),
            query_scale=fields.number("qk_scale_factor", 3.87),
            logit_scale=fields.number("output_multiplier", 0.19611613513818404),
            final_softcap=fields.number("final_logit_softcapping", 20.0),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        found = parsed(self.layer_kinds)
        own: ConfigJson = {"hidden_activation": self.hidden_act, "qk_scale_factor": self.query_scale}
        own |= {"output_multiplier": self.logit_scale, "final_logit_softcapping": self.final_softcap}
        own["layer_types"] = decoder.layer_types([kind.slides for kind in found])
        own["layer_rope_theta"] = [self.rope.theta if kind.rotates else 0 for kind in found]
        own["rope_parameters"] = rope_to_hf(self.rope)
        names = ("rms_norm_eps", "attention_bias", "sliding_window", "post_norm_eps")
        return decoder.decoder_to_hf(self, "MuseGlimmerForCausalLM", *names, **own)


def _turning(fields: Fields, default: list[bool], theta: float) -> list[bool]:
    """Whether each layer is rotary, by `layer_rope_theta`: 0, or the model's theta, for one table serves all."""
    thetas = fields.take("layer_rope_theta", None)
    if thetas is None:
        return default
    if not isinstance(thetas, list) or len(thetas) != len(default) or any(t not in (0, theta) for t in thetas):
        raise ConfigError(
            f"{fields.where}: 'layer_rope_theta' is {shown(thetas)}, but must have 0 or {theta:g}, the rope_theta of "
            f"the model, for each of {len(default)} layers."
        )
    return [t != 0 for t in thetas]


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]; norms around sublayers are initialized to 0, since 1 is added to them."""
    D, H, biased = config.hidden_size, config.head_dim, config.attention_bias
    attention = usual_attention(config, qkv_bias=biased, o_bias=biased)
    gates = (config.num_attention_heads * H, D)
    attention["gate_proj"] = weight(gates, ("heads", "embed"), config.initializer_range, unit=H)
    layer: Tree = {name: norm(D, "embed", 0.0) for name in _NORMS} | {"attention": attention, "mlp": usual_mlp(config)}
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: normed token embeddings, zeros for padding; given embeddings are not normed."""
    tokens = inputs["tokens"] if isinstance(inputs, dict) else inputs
    x = embed_tokens(params["embed_tokens"], inputs)
    if tokens.is_floating_point():
        return x
    return rms_norm(decoder.without_padding(x, inputs), None, eps=config.rms_norm_eps)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights, eps, after = layer["attention"], config.rms_norm_eps, config.post_norm_eps
    normed = rms_norm_zero_centered(x, layer["input_layernorm"], eps=eps)
    q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
    q, k = rms_norm(q, None, eps=eps) * config.query_scale, rms_norm(k, None, eps=eps)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    gate = split_heads(elementwise(torch.sigmoid, linear(normed, weights["gate_proj"])), config.head_dim)
    mixed = project_out(weights, ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5) * gate)
    mixed = rms_norm_zero_centered(mixed, layer["post_attention_layernorm"], eps=after)
    x = ctx.tap("middle", x + ctx.tap("attention", mixed))
    normed = rms_norm_zero_centered(x, layer["pre_feedforward_layernorm"], eps=eps)
    fed = gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap)
    return x + ctx.tap("mlp", rms_norm_zero_centered(fed, layer["post_feedforward_layernorm"], eps=after))


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm, output head, scale and soft-cap: logits [B, S, V]."""
    logits = decoder.project(params, rms_norm_fp32_weight(x, params["norm"], eps=config.rms_norm_eps), config)
    if not decoder.is_lm(config):
        return logits
    cap = config.final_softcap
    return cap * elementwise(torch.tanh, logits * config.logit_scale / cap)
