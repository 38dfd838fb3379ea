"""Qwen3-VL (arXiv 2511.21631): cells of 2 x 2 patches among the tokens of Qwen 3, with positions of three axes.

The text model is dense or, of qwen3_vl_moe, a mixture of experts.
Outputs of earlier layers of the tower are added to the first layers of the text model (DeepStack, arXiv 2406.04334).

image = image.repeat_interleave(config.vision.frames, 0)  # [C T, H, W]: a picture is a video that stands still
patches, at, image_ids = fnmodels.inputs.patch_rows([image], config.vision)
batch = fnmodels.prepare(config.vision, patches, positions=at, segment_ids=image_ids)
x, tapped = fnmodels.hidden(params["vision"], *batch, config=config.vision, taps=qwen3_vl.taps(config))
features = qwen3_vl.project(params, x, tapped, qwen3_vl.cells(at, image_ids, config.vision.merge), config=config)
places = qwen3_vl.image_places(tokens, config.image_token, features[0].new_ones(features[0].shape[:2]) > 0)
positions = qwen3_vl.image_positions(tokens == config.image_token, segment_ids, grids)  # grids of cells
batch = fnmodels.prepare(config.text, tokens, positions=positions, segment_ids=segment_ids)
inputs = qwen3_vl.with_images(params, batch[0], features[0], places, config=config)
edits = qwen3_vl.deepstack(features[1:], places)
logits = fnmodels.forward(params["text"], inputs, *batch[1:], config=config.text, edits=edits)
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels import tree
from fnmodels.errors import ConfigError
from fnmodels.inputs.image_places import add_features, cells, image_places  # noqa: F401
from fnmodels.inputs.image_positions import image_positions  # noqa: F401
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.moe import transposed_experts
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.vision import qwen3_vl_vision
from fnmodels.models.vision.common import two_towers
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.models.vision_language.common import qwen_vl, vision_language
from fnmodels.models.vision_language.common.qwen_vl import placeholder, read_image  # noqa: F401
from fnmodels.models.vision_language.common.vision_language import cell_side, with_images  # noqa: F401
from fnmodels.options import Edit
from fnmodels.tree import Tree

_TEXT: dict[str, Any] = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32}
_TEXT |= {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 128000}
_TEXT |= {"rope_theta": 5e5, "mrope_section": [24, 20, 20]}
_MOE: dict[str, Any] = _TEXT | {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24}
_MOE |= {"num_attention_heads": 16, "num_key_value_heads": 16, "moe_intermediate_size": 1408}
_MOE |= {"num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": True}
del _MOE["head_dim"]  # by default the width by the number of heads
# The family of the text, the fields that text_config leaves out where they equal the defaults, the model's class.
_TYPES: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3_vl": ("qwen3", _TEXT, "Qwen3VLForConditionalGeneration"),
    "qwen3_vl_moe": ("qwen3_moe", _MOE, "Qwen3VLMoeForConditionalGeneration"),
}
MODEL_TYPES = tuple(_TYPES)
TRAITS = Traits(turned_in_memory=True)


def _preset(layers: int, tied: bool, tower: dict[str, Any], hidden: int, **sizes: int) -> dict[str, Any]:
    text = {"hidden_size": hidden, "num_hidden_layers": layers, "num_key_value_heads": 8, "rope_theta": 5e6} | sizes
    text["max_position_embeddings"] = 262144
    vision = tower | {"out_hidden_size": hidden}
    return {"model_type": "qwen3_vl", "tie_word_embeddings": tied, "text_config": text, "vision_config": vision}


_SMALL = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
_A3B = {
    "head_dim": 128,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
_A22B = _A3B | {"num_attention_heads": 64, "moe_intermediate_size": 1536, "intermediate_size": 12288}
_A3B = _A3B | {"num_attention_heads": 32, "moe_intermediate_size": 768}
PRESETS: dict[str, ConfigJson] = {
    "qwen3-vl-2b": _preset(28, True, _SMALL, 2048, intermediate_size=6144, num_attention_heads=16),
    "qwen3-vl-4b": _preset(36, True, _SMALL, 2560, intermediate_size=9728),
    "qwen3-vl-8b": _preset(36, False, {}, 4096, intermediate_size=12288),
    "qwen3-vl-30b-a3b": _preset(48, False, {}, 2048, **_A3B) | {"model_type": "qwen3_vl_moe"},
    "qwen3-vl-235b-a22b": _preset(94, False, {}, 4096, **_A22B) | {"model_type": "qwen3_vl_moe"},
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. image_token: the id of the tokens that features replace."""

    text: Any
    vision: qwen3_vl_vision.Config
    image_token: int
    # kept for saving only
    model_type: str = field(default="qwen3_vl", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        qwen_vl.check_widths(self)
        if len(self.vision.deepstack) > self.text.num_hidden_layers:
            raise ConfigError(
                f"deepstack_visual_indexes has {len(self.vision.deepstack)} entries, one for each of the first text "
                f"layers, which are only {self.text.num_hidden_layers}."
            )

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        model_type = outer.choice("model_type", MODEL_TYPES)
        plain, defaults, _ = _TYPES[model_type]
        inner = qwen_vl.text_values(outer)
        Fields(inner, f"{outer.where}, text_config").expect("use_sliding_window", False)
        if model_type == "qwen3_vl_moe":  # whose text says true where transformers 5 saves it, and nothing reads it
            inner["tie_word_embeddings"] = outer.boolean("tie_word_embeddings", False)
        if "num_local_experts" in inner:  # as transformers 5 calls what files call num_experts
            defaults = {name: value for name, value in defaults.items() if name != "num_experts"}
        tower = qwen_vl.tower_values(outer, f"{model_type}_vision")
        config = Config(
            text=qwen_vl.text_config(outer, inner, f"{model_type}_text", plain, defaults=defaults),
            vision=qwen3_vl_vision.Config.from_hf(tower),
            image_token=outer.integer("image_token_id", 151655, low=0),
            model_type=model_type,
        )
        object.__setattr__(config, "extra", vision_language.kept(outer, *qwen_vl.TOKENS))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        slides = ("sliding_window", "use_sliding_window", "layer_types")
        return vision_language.to_hf(
            self,
            _TYPES[self.model_type][2],
            text_config=qwen_vl.text_to_hf(self.text, f"{self.model_type}_text", *slides),
            image_token_id=self.image_token,
            tie_word_embeddings=self.text.tie_word_embeddings,
        )


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, "merger", and in "deepstack" a merger for each layer that the text reads."""
    tower, width = config.vision, config.text.hidden_size
    mergers: Tree = {"merger": qwen_vl.normed_merger_leaves(tower, width)}
    if tower.deepstack:
        mergers["deepstack"] = [qwen_vl.normed_merger_leaves(tower, width, joined_first=True) for _ in tower.deepstack]
    return two_towers.towers_spec(config) | mergers


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names = vision_language.nested_names(config, text="model.language_model.", vision="model.visual.")
    for path in tree.flatten(two_towers.towers_spec(config)):
        where, _, leaf = path.rpartition(".")
        if where.endswith(".experts") and leaf == "down_proj":  # [E, in, out] in files, gate and up in one
            there = f"model.language_model.{where.removeprefix('text.')}"
            wide, inner = config.text.hidden_size, config.text.moe_intermediate_size
            names |= transposed_experts(where, there, wide, inner, in_turn=False)
    names |= qwen_vl.normed_merger_names("merger", "model.visual.merger")
    for i in range(len(config.vision.deepstack)):
        names |= qwen_vl.normed_merger_names(f"deepstack.{i}", f"model.visual.deepstack_merger_list.{i}")
    return names


def taps(config: Config) -> tuple[str, ...]:
    """The taps of the tower that `project` reads."""
    return tuple(f"layers.{i}.output" for i in config.vision.deepstack)


def project(
    params: Tree, x: Tensor, tapped: Mapping[str, Tensor], places: Tensor, /, *, config: Config
) -> list[Tensor]:
    """Features [1, cells, text's D]: those that replace embeddings, then those for each of the first text layers.

    x: the tower's hidden states [rows, slots, D]; tapped: those of `taps`; places: of the patches of each cell of
    `config.vision.merge` patches a side, see `cells`.
    """
    features = [qwen_vl.project(params["merger"], x, places)]
    for name, merger in zip(taps(config), params.get("deepstack", ()), strict=True):
        features.append(qwen_vl.project(merger, tapped[name], places, joined_first=True))
    return features


def deepstack(features: Sequence[Tensor], places: Tensor) -> dict[str, Edit]:
    """Edits, for `forward` of the text model: feature i is added to the output of layer i at its places [B, S, 2]."""
    return {
        f"layers.{i}.output": functools.partial(_added, features=layer_features, places=places)
        for i, layer_features in enumerate(features)
    }


def _added(value: Tensor, name: str, *, features: Tensor, places: Tensor) -> Tensor:
    return add_features(value, features, places)


def features_of(
    params: Tree, x: Tensor, tapped: Mapping[str, Tensor], places: Tensor, /, *, config: Config
) -> tuple[Tensor, ...]:
    """`project` as `fnmodels.image_text` calls it, as a tuple whose first features replace embeddings."""
    return tuple(project(params, x, tapped, places, config=config))
