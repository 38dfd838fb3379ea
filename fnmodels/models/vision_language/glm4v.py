"""GLM-4.1V, GLM-4.5V and GLM-4.6V (arXiv 2507.01006), GLM-OCR: cells of patches among the tokens of GLM-4.

Positions have three axes. A convolution over a cell and a gated MLP make its feature.

image = image.repeat_interleave(config.vision.frames, 0)  # [C T, H, W]: a picture is a video that stands still
patches, at, image_ids = fnmodels.inputs.patch_rows([image], config.vision)
batch = fnmodels.prepare(config.vision, patches, positions=at, segment_ids=image_ids)
x = fnmodels.forward(params["vision"], *batch, config=config.vision)
features = glm4v.project(params, x, glm4v.cells(at, image_ids, config.vision.merge), config=config)
places = glm4v.image_places(tokens, config.image_token, features.new_ones(features.shape[:2]) > 0)
positions = glm4v.image_positions(tokens == config.image_token, segment_ids, grids)  # grids of cells
batch = fnmodels.prepare(config.text, tokens, positions=positions, segment_ids=segment_ids)
inputs = glm4v.with_images(params, batch[0], features, places, config=config)
logits = fnmodels.forward(params["text"], inputs, *batch[1:], config=config.text)

The frames of a video are images of the tower and of the text.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.image_places import cells, image_places  # noqa: F401
from fnmodels.inputs.image_positions import image_positions  # noqa: F401
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.spec import Leaf, Normal, bias, gated_mlp_leaves, layer_norm_leaves, weight
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.common.vision import weight_and_bias
from fnmodels.models.vision import glm4v_vision
from fnmodels.models.vision.common import two_towers
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.models.vision_language.common import image_prompts, qwen_vl, vision_language
from fnmodels.models.vision_language.common.vision_language import cell_side, with_images  # noqa: F401
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import gated_mlp
from fnmodels.ops.norm import layer_norm
from fnmodels.tree import Tree

features_of = vision_language.features_by_config
EPS = 1e-5  # of the merger's LayerNorm, fixed in the reference
_GLM4: dict[str, Any] = {"vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40}
_GLM4 |= {"num_attention_heads": 32, "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5}
_GLM4 |= {"rope_theta": 1e4, "mrope_section": [8, 12, 12], "attention_bias": True}
_OCR = _GLM4 | {"vocab_size": 59392, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16}
_OCR |= {"num_attention_heads": 16, "num_key_value_heads": 8, "attention_bias": False}
_MOE = _GLM4 | {"vocab_size": 151424, "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96}
_MOE |= {"num_key_value_heads": 8, "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_routed_experts": 128}
_MOE |= {"n_shared_experts": 1, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
_MOE |= {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "max_position_embeddings": 65536}


@dataclass(frozen=True)
class _Type:
    """Constants of a model type. parts: the prefix of the model types of its text and its tower."""

    architecture: str
    parts: str
    plain: str = "glm4"
    text: dict[str, Any] = field(default_factory=lambda: _GLM4)
    token: int = 151343


_TYPES = {
    "glm4v": _Type("Glm4vForConditionalGeneration", "glm4v"),
    "glm46v": _Type("Glm46VForConditionalGeneration", "glm4v"),
    "glm4v_moe": _Type("Glm4vMoeForConditionalGeneration", "glm4v_moe", "glm4_moe", _MOE, 151363),
    "glm_ocr": _Type("GlmOcrForConditionalGeneration", "glm_ocr", "glm4", _OCR, 59280),
}
MODEL_TYPES = tuple(_TYPES)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. image_token: the id of the tokens that features replace."""

    text: Any
    vision: glm4v_vision.Config
    image_token: int
    # kept for saving only
    model_type: str = field(default="glm4v", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        qwen_vl.check_widths(self)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        variant = _TYPES[outer.choice("model_type", MODEL_TYPES)]
        inner, parts = qwen_vl.text_values(outer), variant.parts
        said = {**inner, **(inner.get("rope_parameters") or {})}
        if variant.plain == "glm4" and said.get("partial_rotary_factor") is None:
            inner["partial_rotary_factor"] = 1.0
        if inner.get("head_dim") is None:
            sizes = variant.text | inner
            inner["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
        config = Config(
            text=qwen_vl.text_config(outer, inner, f"{parts}_text", variant.plain, defaults=variant.text),
            vision=glm4v_vision.Config.from_hf(qwen_vl.tower_values(outer, f"{parts}_vision")),
            image_token=outer.integer("image_token_id", variant.token, low=0),
            model_type=values["model_type"],
        )
        object.__setattr__(config, "extra", vision_language.kept(outer, *_TOKENS))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        variant = _TYPES[self.model_type]
        parts = self.vision.model_type.removesuffix("_vision")
        moe = variant.plain == "glm4_moe"
        unwritten = ("use_qk_norm", "num_nextn_predict_layers") if moe else ("attention_bias",)
        text = qwen_vl.text_to_hf(self.text, f"{parts}_text", *unwritten)
        if self.model_type != "glm_ocr":
            del text["head_dim"]
        return vision_language.to_hf(
            self,
            variant.architecture,
            text_config=text,
            image_token_id=self.image_token,
            tie_word_embeddings=self.text.tie_word_embeddings,
        )


_TOKENS = ("video_token_id", "image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id")


_OUTSIDE = {"embed": "embed", "mlp": "projection"}  # tensor parallelism shards MLPs of layers alone


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, and "merger": a convolution over a cell, and a gated MLP."""
    narrow, wide, m = config.vision.hidden_size, config.text.hidden_size, config.vision.merge
    std, axes = config.text.initializer_range, ("projection", "embed", "patch_row", "patch_column")
    merger: Tree = {"conv": Leaf((wide, narrow, m, m), torch.float32, axes, Normal(std))}
    merger |= {
        "conv_bias": bias(wide, "embed"),
        "proj": weight((wide, wide), ("projection", "embed"), std),
    } | layer_norm_leaves("norm", wide, "embed")
    mlp = gated_mlp_leaves(wide, config.vision.merger_size, std=std)
    merger["mlp"] = {
        name: replace(leaf, axes=tuple(_OUTSIDE[axis] for axis in leaf.axes)) for name, leaf in mlp.items()
    }
    return two_towers.towers_spec(config) | {"merger": merger}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    at = "model.visual."
    names = vision_language.nested_names(config, text="model.language_model.", vision=at)
    names |= weight_and_bias("merger.conv", f"{at}downsample") | {"merger.proj": f"{at}merger.proj.weight"}
    names |= weight_and_bias("merger.norm", f"{at}merger.post_projection_norm")
    return names | {f"merger.mlp.{n}_proj": f"{at}merger.{n}_proj.weight" for n in ("gate", "up", "down")}


def project(params: Tree, x: Tensor, places: Tensor, /, *, config: Config) -> Tensor:
    """Features [1, cells, text's D] of the tower's hidden states x [rows, slots, D].

    places: of the patches of each cell of `config.vision.merge` patches a side, see `cells`.
    """
    weights = params["merger"]
    kernel = weights["conv"].permute(0, 2, 3, 1).flatten(1)  # of a cell's patches, row by row
    x = linear(linear(vision_language.joined(x, places), kernel, weights["conv_bias"]), weights["proj"])
    x = F.gelu(layer_norm(x, weights["norm"], weights["norm_bias"], eps=EPS))
    return gated_mlp(weights["mlp"], x, activation=config.vision.hidden_act)


def placeholder(config: Config, name: image_prompts.Name) -> tuple[str, str]:
    """The token of features; chat templates put it between those that begin and end an image."""
    pad = name(config.image_token)
    return pad, f"<|begin_of_image|>{pad}<|end_of_image|>"


def read_image(
    image: Tensor, settings: image_prompts.ImageSettings, name: image_prompts.Name, *, config: Config
) -> tuple[list[Tensor], str]:
    """(the image for the tower, text in place of the placeholder), see `image_prompts`; bounds count all frames."""
    usual = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}
    edges = {key: image_prompts.number(settings, "size", key, value, most=100_000_000) for key, value in usual.items()}
    size = {key: value // config.vision.frames for key, value in edges.items()}
    return qwen_vl.read_image(image, {**settings, "size": size}, name, config=config)
