"""DINOv3's ViT (arXiv 2508.10104): register tokens, and axial rotary positions from -1 to 1 over each image.

`forward` returns the hidden states [B, S, D] after the last norm, `features` that of each image's class token. The
random shift, jitter and rescaling of coordinates in its training are not part of the function.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.documents import Documents
from fnmodels.models.common import vision
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.vision import attention_masks, block, kinds, unembed  # noqa: F401
from fnmodels.ops.dtypes import in_fp64
from fnmodels.ops.rotary import Rope, frequencies
from fnmodels.tree import Tree

MODEL_TYPES = ("dinov3_vit",)
TRAITS = Traits(
    inputs="patches",
    causal=False,
    # By which transformers 5.23 saves them, beside the published ones.
    resaved={r"model\.layer\.(.*)": r"layer.\1"},
    in_memory={r"^layer\.": "model.layer."},
)
_FIELDS = {"num_register_tokens": 4, "model_type": "dinov3_vit", "architectures": ["DINOv3ViTModel"]}
PRESETS: dict[str, ConfigJson] = {
    "dinov3-vits16": _FIELDS,
    "dinov3-vitb16": _FIELDS | {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
}

_LAYER = {
    "input_layernorm": "norm1",
    "attention.q_proj": "attention.q_proj",
    "attention.k_proj": "attention.k_proj",
    "attention.v_proj": "attention.v_proj",
    "attention.o_proj": "attention.o_proj",
    "post_attention_layernorm": "norm2",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}
# Settings of training, and of backbones that other models are made of.
_IGNORED = (
    *("drop_path_rate", "pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale", "apply_layernorm"),
    *("reshape_hidden_states", "out_features", "out_indices", "stage_names"),
)
_BIASES = ("query_bias", "value_bias", "proj_bias", "mlp_bias")


@dataclass(frozen=True, kw_only=True)
class Config(vision.VisionConfig):
    """Sizes and switches."""

    layer_norm_eps: float = 1e-5
    num_register_tokens: int = 4
    rope_theta: float = 100.0
    key_bias: bool = False
    use_gated_mlp: bool = False
    layerscale_value: float = 1.0

    @property
    def special_tokens(self) -> int:
        """The class token and the registers."""
        return 1 + self.num_register_tokens

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = vision.vision_fields(fields, MODEL_TYPES, eps=1e-5, sizes=(384, 1536, 12, 6))
        for name in _BIASES:
            fields.expect(name, True)
        rope = Fields(fields.take("rope_parameters", {}), "rope_parameters")
        rope.expect("rope_type", "default")
        config = Config(
            **usual,
            **fields.plain(num_register_tokens=0, key_bias=False, use_gated_mlp=False),
            rope_theta=fields.number("rope_theta", rope.number("rope_theta", 100.0)),
            layerscale_value=fields.number("layerscale_value", 1.0, above=-1.0),
        )
        object.__setattr__(config, "extra", vision.kept_fields(fields, _IGNORED))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        names = ("num_register_tokens", "rope_theta", "key_bias", "use_gated_mlp", "layerscale_value")
        return vision.vision_to_hf(self, "DINOv3ViT", *names)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of the patches [D, C, p, p]."""
    D, std = config.hidden_size, config.initializer_range
    tree: Tree = {"class_token": vision.vector(D, std, 1, 1), "mask_token": vision.vector(D, std, 1, 1)}
    tree |= {"register_tokens": vision.vector(D, std, 1, config.num_register_tokens)} | vision.patch_leaves(config)
    gated, scale = config.use_gated_mlp, config.layerscale_value
    layer = vision.vision_layer(config, key_bias=config.key_bias, gated=gated, scale=scale)
    tree["layers"] = [layer for _ in range(config.num_hidden_layers)]
    return tree | vision.last_norm(config)


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    names = {f"{n}_token": f"embeddings.{d}_token" for n, d in (("class", "cls"), ("mask", "mask"))}
    names |= {"register_tokens": "embeddings.register_tokens"} | vision.scale_names(config, "layer.")
    names |= vision.weight_and_bias("patch_proj", "embeddings.patch_embeddings")
    names |= vision.layer_names(config, "layer.", _LAYER) | vision.weight_and_bias("norm", "norm")
    return vision.of_spec(spec(config), names)


@in_fp64
def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{"full": fp32 [B, S, H/2, 2]}: the first half of the pairs turns with the row, the second with the column.

    An angle is 2 pi times the coordinate of the patch's center, from -1 to 1 over its image, times the frequency;
    special tokens are not rotated.
    """
    centers = 2 * (positions[..., :2] + 0.5) / positions[..., 2:].clamp(min=1).double() - 1
    freqs = frequencies(Rope(theta=config.rope_theta), config.head_dim // 2, device=positions.device)
    angles = (2 * math.pi * centers[..., None] * freqs).flatten(-2).where(positions[..., :1] >= 0, 0)
    return {"full": torch.stack((angles.cos(), angles.sin()), -1).float()}


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: patches, class tokens and registers."""
    return vision.embed_patches(params, inputs, config=config)


def features(params: Tree, hidden: Tensor, documents: Documents, /, *, config: Config) -> Tensor:
    """Each image's class token, [N, D]. hidden: what `forward` returns; documents: the images."""
    return vision.class_tokens(hidden, documents)
