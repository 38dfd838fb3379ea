"""InternVL's vision tower (arXiv 2312.14238): layer scales, LayerNorms or, with norms of queries and keys, RMSNorms.

Qianfan-OCR's (Baidu, 2026) is the same under the names of InternVL's own files.

`forward` returns the hidden states [B, S, D] of the last layer, which have no norm unless `final_norm`.
"""

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import vision
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import norm
from fnmodels.models.common.storage import StoredNames, fuse
from fnmodels.models.common.vision import attention_masks, freqs_cis, kinds  # noqa: F401
from fnmodels.models.vision.common import position_table
from fnmodels.ops import plain_mlp, project_out, rms_norm, split_heads
from fnmodels.ops.linear import linears
from fnmodels.ops.norm import layer_norm
from fnmodels.tree import Tree, flatten

_CLASSES = {"internvl_vision": "InternVLVision", "qianfan_ocr_vision": "QianfanOCRVision"}
MODEL_TYPES = tuple(_CLASSES)
TRAITS = Traits(inputs="patches", causal=False)
EPS = 1e-6  # of the norms of queries and keys, fixed in the reference
batch_inputs = functools.partial(position_table.table_inputs, resample=position_table.bicubic)

_LAYER = {
    "input_layernorm": "layernorm_before",
    "attention.q_proj": "attention.q_proj",
    "attention.k_proj": "attention.k_proj",
    "attention.v_proj": "attention.v_proj",
    "attention.o_proj": "attention.projection_layer",
    "attention.q_norm": "attention.q_norm",
    "attention.k_norm": "attention.k_norm",
    "post_attention_layernorm": "layernorm_after",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
}
_OWN_LAYER = {"input_layernorm": "norm1", "post_attention_layernorm": "norm2", "attention.o_proj": "attn.proj"}
_OWN_LAYER |= {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}


@dataclass(frozen=True, kw_only=True)
class Config(vision.VisionConfig):
    """Sizes and switches. rms: the norms of layers are RMSNorms; qk_norm: over all heads of queries and of keys."""

    attention_bias: bool = False
    qk_norm: bool = False
    rms: bool = False
    layer_scale: float = 0.1
    final_norm: bool = False

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = vision.vision_fields(fields, MODEL_TYPES, eps=1e-6, sizes=(1024, 4096, 24, 16), patch=14, image=448)
        is_qianfan = usual["model_type"] == "qianfan_ocr_vision"
        fields.expect("use_mask_token", False)
        if is_qianfan:  # no file shows the names of norms of queries and keys
            fields.expect("use_qk_norm", False)
        fields.expect("use_absolute_position_embeddings", True)
        config = Config(
            **usual,
            attention_bias=fields.boolean("attention_bias", is_qianfan),
            qk_norm=fields.boolean("use_qk_norm", False),
            rms=fields.choice("norm_type", ("layer_norm", "rms_norm"), "layer_norm") == "rms_norm",
            layer_scale=fields.number("layer_scale_init_value", 0.1),
            final_norm=not fields.boolean("use_mean_pooling", True),
        )
        object.__setattr__(
            config, "extra", fields.finish(("drop_path_rate", "projection_dropout") if is_qianfan else ())
        )
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        fields: ConfigJson = {"use_qk_norm": self.qk_norm, "norm_type": "rms_norm" if self.rms else "layer_norm"}
        fields |= {"use_mean_pooling": not self.final_norm, "layer_scale_init_value": self.layer_scale}
        sizes = {name: [getattr(self, name)] * 2 for name in ("image_size", "patch_size")}
        return vision.vision_to_hf(
            self, _CLASSES.get(self.model_type, "InternVLVision"), "attention_bias", **fields, **sizes
        )


# Of `in_memory`, of models with Qianfan's tower too.
OWN_IN_MEMORY = {
    r"encoder\.layers\.": "layers.",
    r"\.attn\.proj\.": ".attention.projection_layer.",
    r"\.attn\.qkv\.": ".attention.{leaf}_proj.",
    r"\.ls([12])$": r".lambda_\1",
    r"\.norm1\.": ".layernorm_before.",
    r"\.norm2\.": ".layernorm_after.",
    r"embeddings\.class_embedding$": "embeddings.cls_token",
    r"embeddings\.position_embedding$": "embeddings.position_embeddings",
    r"embeddings\.patch_embedding\.": "embeddings.patch_embeddings.projection.",
}


def in_memory(config: Config) -> dict[str, str]:
    """{pattern in a name on disk: what transformers' module is called}."""
    return OWN_IN_MEMORY if config.model_type == "qianfan_ocr_vision" else {}


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of the patches [D, C, p, p]."""
    D, std = config.hidden_size, config.initializer_range
    tree: Tree = {"class_token": vision.vector(D, std, 1, 1), **vision.patch_leaves(config)}
    tree["embed_positions"] = vision.vector(D, std, 1, 1 + config.side**2, axis="position")
    layer = vision.vision_layer(config, qkv_bias=config.attention_bias, scale=config.layer_scale)
    heads = {name: norm(D, "heads", unit=config.head_dim) for name in ("q_norm", "k_norm")}
    layer["attention"] |= heads if config.qk_norm else {}
    if config.rms:
        layer = {name: leaf for name, leaf in layer.items() if not name.endswith("layernorm_bias")}
    tree["layers"] = [layer for _ in range(config.num_hidden_layers)]
    return tree | (vision.last_norm(config) if config.final_norm else {})


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    if config.model_type == "qianfan_ocr_vision":
        return _own_names(config)
    names = {"class_token": "embeddings.cls_token", "embed_positions": "embeddings.position_embeddings"}
    names |= vision.weight_and_bias("patch_proj", "embeddings.patch_embeddings.projection")
    names |= vision.layer_names(config, "encoder.layer.", _LAYER) | vision.weight_and_bias("norm", "layernorm")
    for i in range(config.num_hidden_layers):
        names |= {f"layers.{i}.{path}_scale": f"encoder.layer.{i}.lambda_{n}" for n, path in _SCALES}
    return vision.of_spec(spec(config), names)


def _own_names(config: Config) -> StoredNames:
    """The names in InternVL's own files, where q, k and v are fused."""
    at = "encoder.layers."
    names = {"class_token": "embeddings.class_embedding", "embed_positions": "embeddings.position_embedding"}
    names |= vision.weight_and_bias("patch_proj", "embeddings.patch_embedding")
    names |= vision.layer_names(config, at, _OWN_LAYER) | vision.weight_and_bias("norm", "layernorm")
    stored_names: dict[str, Any] = dict(names)
    for i in range(config.num_hidden_layers):
        stored_names |= {f"layers.{i}.{path}_scale": f"{at}{i}.ls{n}" for n, path in _SCALES}
        for ours, theirs in (("proj", "weight"), ("bias", "bias")):
            rows = {f"layers.{i}.attention.{name}_{ours}": config.hidden_size for name in "qkv"}
            stored_names |= fuse(f"{at}{i}.attn.qkv.{theirs}", rows)
    return {path: stored_names[path] for path in flatten(spec(config))}


_SCALES = ((1, "attention"), (2, "mlp"))


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: patches, class tokens and their positions."""
    placed = position_table.table_positions(params["embed_positions"][0], inputs)
    return vision.embed_patches(params, inputs, config=config) + placed


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights = layer["attention"]
    q, k, v = linears(_normed(layer, "input_layernorm", x, config), weights, "qkv")
    if config.qk_norm:
        q, k = rms_norm(q, weights["q_norm"], eps=EPS), rms_norm(k, weights["k_norm"], eps=EPS)
    q, k, v = (split_heads(t, config.head_dim) for t in (q, k, v))
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed) * layer["attention_scale"]))
    normed = _normed(layer, "post_attention_layernorm", x, config)
    y = plain_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.shown)
    return x + ctx.tap("mlp", y * layer["mlp_scale"])


def _normed(layer: Tree, name: str, x: Tensor, config: Config) -> Tensor:
    if config.rms:
        return rms_norm(x, layer[name], eps=config.layer_norm_eps)
    return layer_norm(x, layer[name], layer[f"{name}_bias"], eps=config.layer_norm_eps)


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """The hidden states [B, S, D], after the last LayerNorm with `final_norm`."""
    return vision.unembed(params, x, config=config) if config.final_norm else x
