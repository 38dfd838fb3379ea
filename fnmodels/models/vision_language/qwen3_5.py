"""Qwen3.5 with images: the tower of Qwen3-VL, without DeepStack, among the tokens of Qwen3.5's text models.

`load_pretrained(path, part="text")` reads the text alone, by `fnmodels.models.decoder.qwen3_next`.

image = image.repeat_interleave(config.vision.frames, 0)  # [C T, H, W]: a picture is a video that stands still
patches, at, image_ids = fnmodels.inputs.patch_rows([image], config.vision)
batch = fnmodels.prepare(config.vision, patches, positions=at, segment_ids=image_ids)
x = fnmodels.hidden(params["vision"], *batch, config=config.vision)
features = qwen3_5.project(params, x, qwen3_5.cells(at, image_ids, config.vision.merge))
places = qwen3_5.image_places(tokens, config.image_token, features.new_ones(features.shape[:2]) > 0)
positions = qwen3_5.image_positions(tokens == config.image_token, segment_ids, grids)  # grids of cells
batch = fnmodels.prepare(config.text, tokens, positions=positions, segment_ids=segment_ids)
inputs = qwen3_5.with_images(params, batch[0], features, places, config=config)
logits = fnmodels.forward(params["text"], inputs, *batch[1:], config=config.text)
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.errors import UnsupportedError
from fnmodels.inputs.image_places import cells, image_places  # noqa: F401
from fnmodels.inputs.image_positions import image_positions  # noqa: F401
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.vision import qwen3_vl_vision
from fnmodels.models.vision.common import two_towers
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.models.vision_language.common import qwen_vl, vision_language
from fnmodels.models.vision_language.common.qwen_vl import placeholder, read_image  # noqa: F401
from fnmodels.models.vision_language.common.vision_language import (  # noqa: F401
    cell_side,
    features_of,
    leftovers,
    with_images,
)
from fnmodels.tree import Tree

_USUAL: dict[str, Any] = {"vocab_size": 248320, "num_attention_heads": 16}
_USUAL |= {"rope_theta": 1e4, "mrope_section": [11, 11, 10]}
_DENSE = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32}
_MOE = {"hidden_size": 2048, "num_hidden_layers": 40}
# Fields that text_config leaves out where they equal the defaults, and the name of the model's class.
_TYPES: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3_5": (_USUAL | _DENSE, "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe": (_USUAL | _MOE, "Qwen3_5MoeForConditionalGeneration"),
}
MODEL_TYPES = tuple(_TYPES)
_ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
_ROPE |= {"mrope_interleaved": True}
_TEXT: dict[str, Any] = {"vocab_size": 248320, "head_dim": 256, "rope_parameters": _ROPE}
_TEXT |= {"max_position_embeddings": 262144}
# (blocks, width, inner width, heads) of the towers.
_TOWERS = {"small": (12, 768, 3072, 12), "middle": (24, 1024, 4096, 16), "large": (27, 1152, 4304, 16)}


def _preset(
    model_type: str, width: int, layers: int, heads: tuple[int, int, int], tower: str = "large", **rest: Any
) -> ConfigJson:
    """heads: of queries, of keys, and of the values of linear layers."""
    names = ("num_attention_heads", "num_key_value_heads", "linear_num_value_heads")
    text = _TEXT | {"hidden_size": width, "num_hidden_layers": layers} | dict(zip(names, heads, strict=True)) | rest
    sizes = dict(zip(("depth", "hidden_size", "intermediate_size", "num_heads"), _TOWERS[tower], strict=True))
    tied = {"tie_word_embeddings": tower != "large"}  # said in both objects
    return {
        "model_type": model_type,
        **tied,
        "text_config": {"model_type": f"{model_type}_text"} | text | tied,
        "vision_config": {"model_type": f"{model_type}_vision", "out_hidden_size": width} | sizes,
    }


def _dense(inner: int, *sizes: Any) -> ConfigJson:
    return _preset("qwen3_5", *sizes, intermediate_size=inner)


def _sparse(experts: int, chosen: int, inner: int, *sizes: Any) -> ConfigJson:
    own: dict[str, Any] = {"num_experts": experts, "num_experts_per_tok": chosen}
    own |= {"moe_intermediate_size": inner, "shared_expert_intermediate_size": inner}
    return _preset("qwen3_5_moe", *sizes, **own)


# config.json of Qwen/Qwen3.5-*.
PRESETS: dict[str, ConfigJson] = {
    "qwen3.5-0.8b": _dense(3584, 1024, 24, (8, 2, 16), "small"),
    "qwen3.5-2b": _dense(6144, 2048, 24, (8, 2, 16), "middle"),
    "qwen3.5-4b": _dense(9216, 2560, 32, (16, 4, 32), "middle"),
    "qwen3.5-9b": _dense(12288, 4096, 32, (16, 4, 32)),
    "qwen3.5-27b": _dense(17408, 5120, 64, (24, 4, 48)),
    "qwen3.5-35b-a3b": _sparse(256, 8, 512, 2048, 40, (16, 2, 32)),
    "qwen3.5-122b-a10b": _sparse(256, 8, 1024, 3072, 48, (32, 2, 64)),
    "qwen3.5-397b-a17b": _sparse(512, 10, 1024, 4096, 60, (32, 2, 64)),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. image_token: the id of the tokens that features replace."""

    text: Any
    vision: qwen3_vl_vision.Config
    image_token: int
    # kept for saving only
    model_type: str = field(default="qwen3_5", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        qwen_vl.check_widths(self)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        model_type = outer.choice("model_type", MODEL_TYPES)
        text_type, tower_type = f"{model_type}_text", f"{model_type}_vision"
        tower = qwen_vl.tower_values(outer, tower_type)
        if tower.setdefault("deepstack_visual_indexes", []):
            raise UnsupportedError(f"{outer.where}, vision_config: 'deepstack_visual_indexes' must be empty.")
        text = qwen_vl.text_config(
            outer, qwen_vl.text_values(outer), text_type, text_type, defaults=_TYPES[model_type][0]
        )
        config = Config(
            text=text,
            vision=qwen3_vl_vision.Config.from_hf(tower),
            image_token=outer.integer("image_token_id", 248056, low=0),
            model_type=model_type,
        )
        object.__setattr__(config, "extra", vision_language.kept(outer, *qwen_vl.TOKENS))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        tower = self.vision.to_hf()
        return vision_language.to_hf(
            self,
            _TYPES[self.model_type][1],
            text_config=qwen_vl.text_to_hf(self.text, f"{self.model_type}_text"),
            vision_config={n: v for n, v in tower.items() if n not in ("architectures", "deepstack_visual_indexes")},
            image_token_id=self.image_token,
            tie_word_embeddings=self.text.tie_word_embeddings,
        )


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, and "merger"."""
    merger = qwen_vl.normed_merger_leaves(config.vision, config.text.hidden_size)
    return two_towers.towers_spec(config) | {"merger": merger}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names = vision_language.nested_names(config, text="model.language_model.", vision="model.visual.")
    return names | qwen_vl.normed_merger_names("merger", "model.visual.merger")


def project(params: Tree, x: Tensor, places: Tensor, /) -> Tensor:
    """Features [1, cells, text's D] of the tower's hidden states x [rows, slots, D].

    places: of the patches of each cell of `config.vision.merge` patches a side, see `cells`.
    """
    return qwen_vl.project(params["merger"], x, places)
