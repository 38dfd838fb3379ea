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

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.inputs.image_places import cells, image_places  # noqa: F401
from fnmodels.inputs.image_positions import image_positions  # noqa: F401
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.vision import glm4v_vision
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.models.vision_language.common import glm, image_prompts, qwen_vl, vision_language
from fnmodels.models.vision_language.common.glm import hf_names, placeholder, project, spec  # noqa: F401
from fnmodels.models.vision_language.common.vision_language import cell_side, with_images  # noqa: F401

features_of = vision_language.features_by_config
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
# config.json of zai-org/GLM-4.1V-9B-Thinking and zai-org/GLM-4.5V (arXiv 2507.01006).
_MROPE = {"rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]}, "partial_rotary_factor": 0.5}
_9B = {"model_type": "glm4v_text", "max_position_embeddings": 65536} | _MROPE
_106B = _MOE | {"model_type": "glm4v_moe_text", "vocab_size": 151552, "head_dim": 128} | _MROPE
del _106B["mrope_section"]
_TOWER = {"model_type": "glm4v_moe_vision", "out_hidden_size": 4096, "intermediate_size": 10944}
PRESETS: dict[str, ConfigJson] = {
    "glm-4.1v-9b": {"model_type": "glm4v", "text_config": _9B, "vision_config": {"model_type": "glm4v_vision"}},
    "glm-4.5v": {"model_type": "glm4v_moe", "text_config": _106B, "vision_config": _TOWER},
}


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
        if inner.get("model_type") == "Glm4vMoe_text":  # as transformers 4.57 writes it
            inner["model_type"] = "glm4v_moe_text"
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
        object.__setattr__(config, "extra", vision_language.kept(outer, *glm.TOKENS))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        variant = _TYPES[self.model_type]
        parts = self.vision.model_type.removesuffix("_vision")
        moe = variant.plain == "glm4_moe"
        unwritten = ("use_qk_norm", "num_nextn_predict_layers") if moe else ("attention_bias",)
        text = qwen_vl.text_to_hf(self.text, f"{parts}_text", *unwritten)
        usual_width = self.text.hidden_size // self.text.num_attention_heads
        # GLM-4.5V's heads are wider; transformers reads no width of the heads of dense texts.
        if self.model_type != "glm_ocr" and (not moe or text["head_dim"] == usual_width):
            del text["head_dim"]
        return vision_language.to_hf(
            self,
            variant.architecture,
            text_config=text,
            image_token_id=self.image_token,
            tie_word_embeddings=self.text.tie_word_embeddings,
        )


def read_image(
    image: Tensor, settings: image_prompts.ImageSettings, name: image_prompts.Name, *, config: Config
) -> tuple[list[Tensor], str]:
    """(the image for the tower, text in place of the placeholder), see `image_prompts`; bounds count all frames."""
    usual = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}
    edges = {key: image_prompts.number(settings, "size", key, value, most=100_000_000) for key, value in usual.items()}
    size = {key: value // config.vision.frames for key, value in edges.items()}
    return qwen_vl.read_image(image, {**settings, "size": size}, name, config=config)
