"""Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL (arXiv 2502.13923): cells of 2 x 2 patches among the tokens of Qwen 2.

Positions have three axes. The two have towers of their own, and norms like them before the merger.

image = image.repeat_interleave(config.vision.frames, 0)  # [C T, H, W]: a picture is a video that stands still
patches, at, image_ids = fnmodels.inputs.patch_rows([image], config.vision)
batch = fnmodels.prepare(config.vision, patches, positions=at, segment_ids=image_ids)
x = fnmodels.hidden(params["vision"], *batch, config=config.vision)
features = qwen2_5_vl.project(params, x, qwen2_5_vl.cells(at, image_ids, config.vision.merge))
places = qwen2_5_vl.image_places(tokens, config.image_token, features.new_ones(features.shape[:2]) > 0)
positions = qwen2_5_vl.image_positions(tokens == config.image_token, segment_ids, grids)  # grids of cells
batch = fnmodels.prepare(config.text, tokens, positions=positions, segment_ids=segment_ids)
inputs = qwen2_5_vl.with_images(params, batch[0], features, places, config=config)
logits = fnmodels.forward(params["text"], inputs, *batch[1:], config=config.text)

The frames of a video are images of the tower, and one grid of the text, whose interval is the time between two pairs of
frames in seconds times `config.vision.tokens_per_second`.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.inputs.image_places import cells, image_places  # noqa: F401
from fnmodels.inputs.image_positions import image_positions  # noqa: F401
from fnmodels.models.common import vision
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import layer_norm_leaves, norm
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.vision import qwen2_5_vl_vision, qwen2_vl_vision
from fnmodels.models.vision.common import two_towers
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.models.vision_language.common import qwen_vl, vision_language
from fnmodels.models.vision_language.common.qwen_vl import placeholder, read_image  # noqa: F401
from fnmodels.models.vision_language.common.vision_language import cell_side, features_of, with_images  # noqa: F401
from fnmodels.ops.norm import layer_norm, rms_norm
from fnmodels.tree import Tree

# The class of the model, and the family of its tower.
_TYPES: dict[str, tuple[str, Any]] = {
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", qwen2_vl_vision),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", qwen2_5_vl_vision),
}
MODEL_TYPES = tuple(_TYPES)
# Names that transformers has in memory, and files that were saved from there.
TRAITS = Traits(
    resaved={r"(?:model\.)?language_model\.(.*)": r"model.\1", r"model\.visual\.(.*)": r"visual.\1"},
    in_memory={r"^model\.": "model.language_model.", r"^visual\.": "model.visual."},
)
_TEXT: dict[str, Any] = {"vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80}
_TEXT |= {"num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80}
_TEXT |= {"sliding_window": 4096, "rope_theta": 1e6, "mrope_section": [16, 24, 24]}


def _preset(layers: int, tied: bool, hidden: int, **sizes: int) -> dict[str, Any]:
    text = {"hidden_size": hidden, "num_hidden_layers": layers, "rms_norm_eps": 1e-6} | sizes
    text["max_position_embeddings"] = 128000
    vision = {"hidden_size": 1280, "out_hidden_size": hidden, "tokens_per_second": 2}
    vision |= {"intermediate_size": 3456} if layers > 36 else {}
    return {"model_type": "qwen2_5_vl", "tie_word_embeddings": tied, "text_config": text, "vision_config": vision}


_3B = {"intermediate_size": 11008, "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936}
_2B = {"num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936}
_7B = {"intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}


def _second(layers: int, tied: bool, hidden: int, **sizes: int) -> dict[str, Any]:
    """A preset of Qwen2-VL, whose tower has one size."""
    values = _preset(layers, tied, hidden, **sizes)
    text = values["text_config"] | {"max_position_embeddings": 32768}
    return values | {"model_type": "qwen2_vl", "text_config": text, "vision_config": {"hidden_size": hidden}}


PRESETS: dict[str, ConfigJson] = {
    "qwen2-vl-2b": _second(28, True, 1536, intermediate_size=8960, **_2B),
    "qwen2-vl-7b": _second(28, False, 3584, **_7B),
    "qwen2-vl-72b": _second(80, False, 8192),
    "qwen2.5-vl-3b": _preset(36, True, 2048, **_3B),
    "qwen2.5-vl-7b": _preset(28, False, 3584, **_7B),
    "qwen2.5-vl-32b": _preset(64, False, 5120, intermediate_size=27648, num_attention_heads=40),
    "qwen2.5-vl-72b": _preset(80, False, 8192),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. image_token: the id of the tokens that features replace."""

    text: Any
    vision: Any
    image_token: int
    # kept for saving only
    model_type: str = field(default="qwen2_5_vl", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        qwen_vl.check_widths(self)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        model_type = outer.choice("model_type", MODEL_TYPES)
        tower = qwen_vl.tower_values(outer, f"{model_type}_vision")
        inner = qwen_vl.text_values(outer)
        config = Config(
            text=qwen_vl.text_config(outer, inner, f"{model_type}_text", "qwen2", defaults=_TEXT),
            vision=_TYPES[model_type][1].Config.from_hf(tower),
            image_token=outer.integer("image_token_id", 151655, low=0),
            model_type=model_type,
        )
        object.__setattr__(config, "extra", vision_language.kept(outer, *qwen_vl.TOKENS))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        return vision_language.to_hf(
            self,
            _TYPES[self.model_type][0],
            text_config=qwen_vl.text_to_hf(self.text, f"{self.model_type}_text"),
            image_token_id=self.image_token,
            tie_word_embeddings=self.text.tie_word_embeddings,
        )


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, and "merger"."""
    narrow = config.vision.hidden_size
    merger = layer_norm_leaves("norm", narrow, "embed") if _has_layer_norms(config) else {"norm": norm(narrow, "embed")}
    merger |= qwen_vl.merger_leaves(config.vision, config.text.hidden_size)
    return two_towers.towers_spec(config) | {"merger": merger}


def _has_layer_norms(config: Config) -> bool:
    return isinstance(config.vision, qwen2_vl_vision.Config)


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names = vision_language.nested_names(config, text="model.", vision="visual.")
    norms = vision.weight_and_bias("merger.norm", "visual.merger.ln_q")
    names |= norms if _has_layer_norms(config) else {"merger.norm": norms["merger.norm"]}
    for ours, theirs in (("up", 0), ("out", 2)):
        names |= vision.weight_and_bias(f"merger.{ours}", f"visual.merger.mlp.{theirs}")
    return names


def project(params: Tree, x: Tensor, places: Tensor, /) -> Tensor:
    """Features [1, cells, text's D] of the tower's hidden states x [rows, slots, D].

    places: of the patches of each cell of `config.vision.merge` patches a side, see `cells`.
    """
    weights = params["merger"]
    if "norm_bias" in weights:
        normed = layer_norm(x, weights["norm"], weights["norm_bias"], eps=qwen_vl.EPS)
    else:
        normed = rms_norm(x, weights["norm"], eps=qwen2_5_vl_vision.EPS)
    return qwen_vl.merged(weights, vision_language.joined(normed, places))
