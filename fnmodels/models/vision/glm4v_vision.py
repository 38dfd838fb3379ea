"""The vision tower of GLM-4.1V, 4.5V (arXiv 2507.01006) and 5.3 and of GLM-OCR: RMSNorms, gated MLPs, rotary positions.

GLM-4.1V's has learned positions too, resampled to the grid of each image, and a norm before them; GLM-OCR's has norms
of queries and keys, and biases; GLM 5.3's is GLM-OCR's with clamped gates and values. `forward` returns the hidden
states [B, S, D] after the last norm. Images may have any size whose rows and columns of patches are multiples of
`merge`; see `common.qwen_tower` for the frames of a patch.
"""

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import vision
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import attention_leaves, bias, embedding, gated_mlp_leaves, layer_leaves, norm
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.common.vision import attention_masks, kinds  # noqa: F401
from fnmodels.models.vision.common import position_table, qwen_tower
from fnmodels.models.vision.common.qwen_tower import freqs_cis  # noqa: F401
from fnmodels.ops import apply_rotary, project_out, project_qkv, rms_norm
from fnmodels.ops.mlp import acting_mlp, clamped_glu, glu
from fnmodels.ops.moe.experts_loop import Act
from fnmodels.tree import Tree

# Model types, and what the names of their classes begin with.
_CLASSES = {"glm4v_vision": "Glm4vVision", "glm4v_moe_vision": "Glm4vMoeVision", "glm_ocr_vision": "GlmOcrVision"}
_CLASSES |= {"glm5_next_vision": "Glm5NextVision"}
MODEL_TYPES = tuple(_CLASSES)
TRAITS = Traits(inputs="patches", causal=False)
_LAYER = {"input_layernorm": "norm1", "post_attention_layernorm": "norm2", "attention.q_norm": "attn.q_norm"}
_LAYER |= {"attention.k_norm": "attn.k_norm", **{f"mlp.{n}_proj": f"mlp.{n}_proj" for n in ("gate", "up", "down")}}


@dataclass(frozen=True, kw_only=True)
class Config(qwen_tower.QwenTowerConfig):
    """Sizes and switches. layer_norm_eps is that of the RMSNorms. out_hidden_size: the text's width.

    intermediate_size: of the layers' MLPs; merger_size: of the merger's. placed: learned positions, with a norm before
    them, or else norms of queries and keys. bias: of all projections, or else of none but, with qkv_bias, q, k and v.
    swiglu_limit: of gates and values of all MLPs; None: they have none.
    """

    out_hidden_size: int = 4096
    merger_size: int = 13696
    placed: bool = True
    bias: bool = False
    qkv_bias: bool = False
    swiglu_limit: float | None = None

    @property
    def act(self) -> Act:
        """What is between the projections of every MLP."""
        if self.swiglu_limit is None:
            return functools.partial(glu, activation=self.hidden_act)
        return functools.partial(clamped_glu, activation=self.hidden_act, limit=self.swiglu_limit)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        clamped = values.get("model_type") == "glm5_next_vision"
        ocr = clamped or values.get("model_type") == "glm_ocr_vision"
        renamed = {"layer_norm_eps" if name == "rms_norm_eps" else name: value for name, value in values.items()}
        fields, usual = qwen_tower.tower_fields(
            Fields({"layer_norm_eps": 1e-5, **renamed}),
            MODEL_TYPES,
            sizes=(1024, 4096, 24, 16) if ocr else (1536, 13696, 24, 12),
            patch=14,
            activation="silu",
        )
        usual["image_size"] = fields.integer("image_size", 336)
        wide, has_bias = fields.integer("out_hidden_size", 1536 if ocr else 4096), fields.boolean("attention_bias", ocr)
        inner = usual["intermediate_size"]
        if not ocr:
            usual["intermediate_size"] = wide
        if clamped:
            inner = fields.integer("projection_intermediate_size", 10240)
        elif ocr:
            inner = wide * usual["num_channels"] // usual["frames"]
        config = Config(
            **usual,
            out_hidden_size=wide,
            merger_size=inner,
            placed=not ocr,
            bias=has_bias and ocr,
            qkv_bias=has_bias,
            swiglu_limit=fields.number("swiglu_limit", 10.0) if clamped else None,
        )
        object.__setattr__(config, "extra", fields.finish())
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        own: ConfigJson = {"out_hidden_size": self.out_hidden_size, "rms_norm_eps": self.layer_norm_eps}
        own |= {"image_size": self.image_size, "attention_bias": self.qkv_bias}
        own["intermediate_size"] = self.merger_size if self.placed else self.intermediate_size
        if self.swiglu_limit is not None:
            own |= {"projection_intermediate_size": self.merger_size, "swiglu_limit": self.swiglu_limit}
        return qwen_tower.tower_to_hf(self, _CLASSES.get(self.model_type, "Glm4vVision"), **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of the patches [D, C, T, p, p]."""
    D, heads, std, H = config.hidden_size, config.num_attention_heads, config.initializer_range, config.head_dim
    attention = attention_leaves(D, heads, heads, H, std=std, qkv_bias=config.qkv_bias, o_bias=config.bias)
    attention |= {} if config.placed else {name: norm(H, "head_dim") for name in ("q_norm", "k_norm")}
    mlp = gated_mlp_leaves(D, config.intermediate_size, std=std, biases=config.bias)
    tree: Tree = {"patch_proj": qwen_tower.patch_leaf(config), "patch_bias": bias(D, "embed")}
    if config.placed:
        tree |= {"first_norm": norm(D, "embed"), "embed_positions": embedding(config.side**2, D, std, axis="position")}
    tree["layers"] = [layer_leaves(D, attention, mlp) for _ in range(config.num_hidden_layers)]
    return tree | {"norm": norm(D, "embed")}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names = {"first_norm": "post_conv_layernorm.weight", "norm": "post_layernorm.weight"}
    names |= {"embed_positions": "embeddings.position_embedding.weight"}
    names |= vision.weight_and_bias("patch_proj", "patch_embed.proj")
    return vision.of_spec(spec(config), names | qwen_tower.layer_names(config, _LAYER))


def batch_inputs(config: Config, positions: Tensor) -> dict[str, Tensor]:
    """The entries of the position table that each patch reads; see `position_table.table_inputs`."""
    if not config.placed:
        return {}
    return position_table.table_inputs(config, positions, resample=position_table.bicubic, placed=0)


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: patches, and their positions."""
    x = vision.embed_patches(params, inputs, config=config)
    if not config.placed:
        return x
    x = rms_norm(x, params["first_norm"], eps=config.layer_norm_eps)
    return x + position_table.table_positions(params["embed_positions"], inputs)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.layer_norm_eps, layer["attention"]
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    if "q_norm" in weights:
        q, k = rms_norm(q, weights["q_norm"], eps=eps), rms_norm(k, weights["k_norm"], eps=eps)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    return x + ctx.tap("mlp", acting_mlp(layer["mlp"], normed, act=config.act, tap=ctx.tap))


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """The hidden states after the last norm, [B, S, D]."""
    return rms_norm(x, params["norm"], eps=config.layer_norm_eps)
