"""Pixtral's vision tower (arXiv 2410.07073): RMSNorms, a gated MLP, no biases, and a rotary position on two axes.

`forward` returns the hidden states [B, S, D] of the last layer, which have no norm. Images may have any size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.models.common import vision
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import attention_leaves, gated_mlp_leaves, layer_leaves, norm
from fnmodels.models.common.vision import attention_masks, kinds  # noqa: F401
from fnmodels.ops import apply_rotary, gated_mlp, project_out, project_qkv, rms_norm
from fnmodels.ops.dtypes import in_fp64
from fnmodels.ops.rotary import Rope, frequencies
from fnmodels.tree import Tree

MODEL_TYPES = ("pixtral",)
TRAITS = Traits(inputs="patches", causal=False)
EPS = 1e-5  # of every norm, fixed in the reference

_LAYER = {
    "input_layernorm": "attention_norm",
    "attention.q_proj": "attention.q_proj",
    "attention.k_proj": "attention.k_proj",
    "attention.v_proj": "attention.v_proj",
    "attention.o_proj": "attention.o_proj",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.gate_proj",
    "mlp.up_proj": "feed_forward.up_proj",
    "mlp.down_proj": "feed_forward.down_proj",
}


@dataclass(frozen=True, kw_only=True)
class Config(vision.VisionConfig):
    """Sizes and switches. layer_norm_eps is not read. image_size: the largest side that the processor makes."""

    rope_theta: float = 10000.0

    @property
    def special_tokens(self) -> int:
        """0: every token of an image is a patch."""
        return 0

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = vision.vision_fields(fields, MODEL_TYPES, eps=EPS, sizes=(1024, 4096, 24, 16), image=1024)
        fields.expect("head_dim", usual["hidden_size"] // usual["num_attention_heads"])
        rope = Fields(fields.take("rope_parameters", {}), "rope_parameters")
        rope.expect("rope_type", "axial", "default")
        theta = fields.number("rope_theta", rope.number("rope_theta", 10000.0))
        config = Config(**usual, rope_theta=theta)
        object.__setattr__(config, "extra", fields.finish())
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        rope = {"rope_type": "axial", "rope_theta": self.rope_theta}
        return vision.vision_to_hf(self, "PixtralVision", layer_norm_eps=None, rope_parameters=rope)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of the patches [D, C, p, p]."""
    D, heads, std = config.hidden_size, config.num_attention_heads, config.initializer_range
    attention = attention_leaves(D, heads, heads, config.head_dim, std=std)
    layer = layer_leaves(D, attention, gated_mlp_leaves(D, config.intermediate_size, std=std))
    tree: Tree = {**vision.patch_leaves(config, biases=False), "first_norm": norm(D, "embed")}
    return tree | {"layers": [layer for _ in range(config.num_hidden_layers)]}


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    names = {"patch_proj": "patch_conv.weight", "first_norm": "ln_pre.weight"}
    return vision.of_spec(spec(config), names | vision.layer_names(config, "transformer.layers.", _LAYER))


@in_fp64
def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{"full": fp32 [B, S, H/2, 2]}: the even frequencies turn with the row, then the odd ones with the column."""
    freqs = frequencies(Rope(theta=config.rope_theta), config.head_dim, device=positions.device)
    rows, columns = positions[..., :1].double() * freqs[::2], positions[..., 1:2].double() * freqs[1::2]
    angles = torch.cat((rows, columns), -1)
    return {"full": torch.stack((angles.cos(), angles.sin()), -1).float()}


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: normalized patches."""
    return rms_norm(vision.embed_patches(params, inputs, config=config), params["first_norm"], eps=EPS)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights = layer["attention"]
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=EPS), head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=EPS)
    return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """The hidden states, unchanged."""
    return x
