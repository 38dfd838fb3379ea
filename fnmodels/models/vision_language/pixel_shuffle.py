"""Cells of patches, joined and projected, among the tokens of a text model: how most wrappers read images.

DeepSeek-VL (arXiv 2403.05525), Idefics 3 (arXiv 2408.12637), SmolVLM (arXiv 2504.05299), InternVL 3 (arXiv 2504.10479),
Aya Vision (arXiv 2505.08751), Command A Vision (Cohere, 2025), LFM2-VL (Liquid AI, 2025) and Qianfan-OCR (Baidu, 2026).
They differ in the size of a cell, in the norm and the MLP behind it, and in names: `_TYPES` says how.

patches, at, image_ids = fnmodels.inputs.patch_rows(images, config.vision, length=...)
batch = fnmodels.prepare(config.vision, patches, positions=at, segment_ids=image_ids)
x = fnmodels.hidden(params["vision"], *batch, config=config.vision)
features = pixel_shuffle.project(params, x, pixel_shuffle.cells(at, image_ids, config.merge), config=config)
inputs, masks, freqs_cis = fnmodels.prepare(config.text, tokens, positions=positions, segment_ids=segment_ids)
places = pixel_shuffle.image_places(tokens, config.image_token, features.new_ones(features.shape[:2]) > 0)
inputs = pixel_shuffle.with_images(params, inputs, features, places, config=config)
logits = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.image_places import cells, image_places  # noqa: F401
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.registry import family_for, family_of
from fnmodels.models.common.spec import Leaf, bias, layer_norm_leaves, weight
from fnmodels.models.common.storage import Stored, StoredNames, fuse
from fnmodels.models.common.vision import weight_and_bias
from fnmodels.models.vision import internvl_vision
from fnmodels.models.vision.common import two_towers
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.models.vision_language.common import vision_language
from fnmodels.models.vision_language.common.image_prompts import placeholder  # noqa: F401
from fnmodels.models.vision_language.common.pixel_shuffle_presets import PRESETS  # noqa: F401
from fnmodels.models.vision_language.common.vision_language import with_images  # noqa: F401
from fnmodels.ops.linear import linear
from fnmodels.ops.mlp import glu
from fnmodels.ops.norm import layer_norm
from fnmodels.tree import Tree

features_of = vision_language.features_by_config


@dataclass(frozen=True)
class _Type:
    """Constants of a model type. names: of norm, up and out on disk; text, vision: prefixes of the parts' names.

    text_type, tower_type: where the objects have none, with the fields that they then leave out. token, merge, inner:
    (field, default) of the image token, a cell's side and the MLP's width (0: the text's width). gated: the MLP is a
    gated one, whose gate is the second half of `up`. norm: (field, default) of its eps.
    """

    architecture: str
    text_type: str
    tower_type: str
    names: dict[str, str]
    token: tuple[str, int]
    text: str = "model.language_model."
    vision: str = "model.vision_tower."
    tied: bool = True
    text_defaults: dict[str, Any] = field(default_factory=dict)
    merge: tuple[str, int] = ("downsample_factor", 2)
    inner: tuple[str, int] = ("", 0)
    gated: bool = False
    norm: tuple[str, float] = ("", 0.0)
    tower_norm: bool = True  # whether cells are of the tower's hidden states after its last norm


_AT = "multi_modal_projector."
_MLP = {"up": f"model.{_AT}linear_1", "out": f"model.{_AT}linear_2"}
_OLD = {"up": f"{_AT}linear_1", "out": f"{_AT}linear_2"}  # of models whose files are older than the "model."
_OLD_PARTS: dict[str, Any] = {"text": "language_model.", "vision": "vision_tower."}
_LLAMA = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
_IDEFICS: dict[str, Any] = {"names": {"out": "model.connector.modality_projection.proj"}, "text": "model.text_model."}
_IDEFICS |= {"vision": "model.vision_model.", "token": ("image_token_id", 128257), "merge": ("scale_factor", 2)}
_IDEFICS |= {"tied": False, "text_defaults": _LLAMA}
_TYPES = {
    "deepseek_vl": _Type(
        "DeepseekVLForConditionalGeneration",
        "llama",
        "siglip_vision_model",
        {"up": "model.aligner.linear1", "out": "model.aligner.linear2"},
        ("image_token_id", 100015),
        vision="model.vision_model.",
        text_defaults=_LLAMA,
        merge=("", 1),
    ),
    "aya_vision": _Type(
        "AyaVisionForConditionalGeneration",
        "cohere2",
        "siglip_vision_model",
        {"norm": f"{_AT}layernorm"} | _OLD,
        ("image_token_index", 255036),
        **_OLD_PARTS,
        inner=("alignment_intermediate_size", 0),
        gated=True,
        norm=("adapter_layer_norm_eps", 1e-6),
        tower_norm=False,
    ),
    "cohere2_vision": _Type(
        "Cohere2VisionForConditionalGeneration",
        "cohere2",
        "siglip_vision_model",
        _MLP,
        ("image_token_id", 255036),
        inner=("alignment_intermediate_size", 36864),
        gated=True,
    ),
    "lfm2_vl": _Type(
        "Lfm2VlForConditionalGeneration",
        "lfm2",
        "siglip2_vision_model",
        {"norm": f"model.{_AT}layer_norm"} | _MLP,
        ("image_token_id", 396),
        inner=("projector_hidden_size", 2560),
        norm=("", 1e-5),
    ),
    "internvl": _Type(
        "InternVLForConditionalGeneration",
        "qwen2",
        "internvl_vision",
        {"norm": f"{_AT}layer_norm"} | _OLD,
        ("image_token_id", 151667),
        **_OLD_PARTS,
        norm=("", 1e-5),
    ),
    "qianfan_ocr": _Type(
        "QianfanOCRForConditionalGeneration",
        "qwen3",
        "qianfan_ocr_vision",
        {"norm": "mlp1.0", "up": "mlp1.1", "out": "mlp1.3"},
        ("image_token_id", 151667),
        text="language_model.",
        vision="vision_model.",
        tied=False,
        norm=("", 1e-5),
    ),
    "idefics3": _Type("Idefics3ForConditionalGeneration", "llama", "idefics3_vision", **_IDEFICS),
    "smolvlm": _Type("SmolVLMForConditionalGeneration", "llama", "smolvlm_vision", **_IDEFICS),
}
MODEL_TYPES = tuple(_TYPES)
_BUCKETED = ("idefics3", "smolvlm")  # whose files give the tower the name of the whole model, too
_RATIO = ("internvl", "qianfan_ocr")  # whose files have a ratio of sides for a cell, and whose towers a class token
TRAITS = Traits(
    leftovers=(r"(model\.)?vision_(tower|model)\.(vision_model\.)?embeddings\.position_ids",),
    # transformers 5 writes SigLIP without the component that published files have.
    resaved={
        # transformers 5.24 undoes a name of Qianfan-OCR's tower on the text.
        r"language_model\.model\.encoder\.layers\.(.*)": r"language_model.model.layers.\1",
        r"(model\.vision_(?:tower|model))\.((?!vision_model\.).*)": r"\1.vision_model.\2",
        **vision_language.IN_MEMORY_WITHOUT_VISION_MODEL,
        **vision_language.IN_MEMORY,
    },
    in_memory={r"^(model\.vision_(?:tower|model)\.)vision_model\.": r"\1", **vision_language.MODULES},
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. image_token: the id of the tokens that features replace; merge: the patches of a side of a cell.

    inner: the width of the MLP behind the cells, 0: one projection. norm_eps: of the LayerNorm before it, 0: none.
    tower_norm: whether the tower's last norm comes before the cells.
    """

    text: Any
    vision: Any
    image_token: int
    merge: int = 2
    inner: int = 0
    gated: bool = False
    norm_eps: float = 0.0
    projector_bias: bool = True
    tower_norm: bool = True
    # kept for saving only
    model_type: str = field(default="internvl", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        model_type = outer.choice("model_type", MODEL_TYPES)
        variant = _TYPES[model_type]
        outer.expect("projector_hidden_act", "gelu")
        outer.expect("vision_feature_layer", -1, [-1])
        outer.expect("vision_feature_select_strategy", "default" if model_type in _RATIO else "full")
        if "tie_embedding" in values:  # in files of LFM2-VL
            outer.expect("tie_embedding", outer.boolean("tie_word_embeddings", True))
        outer = _without_resampler(outer, variant)
        text = vision_language.text_config(outer, variant.text_type, variant.text_defaults)
        text = vision_language.with_tie(text, vision_language.tied_head(outer, text, variant.tied))
        tower = two_towers.tower_fields(outer, "vision_config", variant.tower_type)
        if tower["model_type"] == model_type and model_type in _BUCKETED:  # in published files
            tower["model_type"] = variant.tower_type
        width = (text.hidden_size if variant.inner[1] == 0 else variant.inner[1]) if "up" in variant.names else 0
        merge = _from_ratio(outer) if model_type in _RATIO else variant.merge[1]
        has_norm = outer.boolean("projector_use_layernorm", True) if model_type == "lfm2_vl" else variant.norm[1] > 0
        config = Config(
            text=text,
            vision=family_for(tower["model_type"]).Config.from_hf(tower),
            image_token=outer.integer(*variant.token, low=0),
            merge=outer.integer(variant.merge[0], merge) if variant.merge[0] else merge,
            inner=outer.integer(variant.inner[0], width) if variant.inner[0] else width,
            gated=variant.gated,
            norm_eps=(outer.number(*variant.norm) if variant.norm[0] else variant.norm[1]) if has_norm else 0.0,
            projector_bias="up" in variant.names and outer.boolean("projector_bias", True),
            tower_norm=variant.tower_norm,
            model_type=model_type,
        )
        object.__setattr__(config, "extra", vision_language.kept(outer, ignored=_PROCESSOR))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        variant = _TYPES[self.model_type]
        fields: dict[str, Any] = {
            variant.token[0]: self.image_token,
            variant.merge[0]: self.merge,
            variant.inner[0]: self.inner,
        }
        fields[variant.norm[0]] = self.norm_eps
        if self.model_type in _RATIO:
            del fields[variant.merge[0]]
            fields["downsample_ratio"] = 1 / self.merge
        if self.model_type == "lfm2_vl":
            fields |= {"projector_use_layernorm": self.norm_eps > 0, "projector_bias": self.projector_bias}
        fields.pop("", None)
        tied = {"tie_word_embeddings": self.text.tie_word_embeddings}
        return vision_language.to_hf(self, variant.architecture, **fields, **tied)


# What processors read: sizes of the sequences of tiles, and the like.
_PROCESSOR: tuple[str, ...] = ("image_seq_length", "max_splits_per_img", "image_seq_len", "do_image_splitting")
_PROCESSOR += ("max_image_tokens", "min_image_tokens", "max_num_patches", "max_pixels_tolerance", "tile_size")
_PROCESSOR += ("encoder_patch_size", "max_tiles", "min_tiles", "use_image_special_tokens", "use_thumbnail")


def _without_resampler(outer: Fields, variant: _Type) -> Fields:
    """Without the settings of a resampler, which files of Idefics 3 and SmolVLM have in text_config and do not use."""
    text = outer.values.get("text_config")
    if variant.merge[0] != "scale_factor" or not isinstance(text, Mapping):
        return outer
    inner = Fields(text, f"{outer.where}, text_config")
    inner.expect("use_resampler", False)
    inner.expect("pixel_shuffle_factor", outer.values.get("scale_factor") or variant.merge[1])
    unused = ("perceiver_config", *inner.read)
    rest = Fields({**outer.values, "text_config": {n: x for n, x in text.items() if n not in unused}}, outer.where)
    rest.read.update(outer.read)
    return rest


def _from_ratio(outer: Fields) -> int:
    """The side of a cell from InternVL's `downsample_ratio`."""
    return int(1 / outer.number("downsample_ratio", 0.5, high=1.0))


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, and the projector's norm and weights [out, in]."""
    cell, wide = config.vision.hidden_size * config.merge**2, config.text.hidden_size
    std, half = config.text.initializer_range, config.inner // (1 + config.gated)
    projector: dict[str, Leaf] = layer_norm_leaves("norm", cell, "embed") if config.norm_eps else {}
    for name in ("gate", "up")[not config.gated :] if config.inner else ():
        projector |= {name: weight((half, cell), ("projection", "embed"), std)}
        projector |= {f"{name}_bias": bias(half, "projection")} if config.projector_bias else {}
    projector["out"] = weight((wide, half or cell), ("embed", "projection" if half else "embed"), std)
    projector |= {"out_bias": bias(wide, "embed")} if config.projector_bias else {}
    return two_towers.towers_spec(config) | {"projector": projector}


_QIANFAN_IN_MEMORY = {
    **{rf"^mlp1\.{i}\.": f"model.{_AT}{name}." for i, name in ((0, "layer_norm"), (1, "linear_1"), (3, "linear_2"))},
    r"^vision_model\.": "model.vision_tower.",
    **internvl_vision.OWN_IN_MEMORY,
}


def in_memory(config: Config) -> dict[str, str]:
    """{pattern in a name on disk: what transformers' module is called}, beside the trait's."""
    return _QIANFAN_IN_MEMORY if config.model_type == "qianfan_ocr" else {}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    variant, half = _TYPES[config.model_type], config.inner // 2
    named = vision_language.part_names if variant.text == "language_model." else vision_language.nested_names
    names: dict[str, Stored] = named(config, text=variant.text, vision=variant.vision)
    for path, name in variant.names.items():
        names |= weight_and_bias(f"projector.{path}", name)
    for suffix, kind in (("", "weight"), ("_bias", "bias")) if config.gated else ():
        rows = {f"projector.up{suffix}": half, f"projector.gate{suffix}": half}
        names |= fuse(f"{variant.names['up']}.{kind}", rows)
    kept = {f"projector.{leaf}" for leaf in spec(config)["projector"]}
    return {path: name for path, name in names.items() if not path.startswith("projector.") or path in kept}


def tower(params: Tree, config: Config) -> tuple[Tree, Any]:
    """(params, Config) of the tower, for `fnmodels.hidden`: its last norm is a part of `project`."""
    return params["vision"], config.vision


def project(params: Tree, x: Tensor, places: Tensor, /, *, config: Config) -> Tensor:
    """Features [1, cells, text's D] of the tower's hidden states x [rows, slots, D] before its last norm.

    places: of the patches of each cell of `config.merge` patches a side, see `cells`.
    """
    weights = params["projector"]
    if config.tower_norm:
        x = family_of(config.vision).unembed(params["vision"], x, config=config.vision)
    x = vision_language.joined(x, places)
    if config.norm_eps:
        x = layer_norm(x, weights["norm"], weights["norm_bias"], eps=config.norm_eps)
    if config.inner:
        up = linear(x, weights["up"], weights.get("up_bias"))
        gate = linear(x, weights["gate"], weights.get("gate_bias")) if config.gated else None
        x = F.gelu(up) if gate is None else glu(gate, up, activation="silu")
    return linear(x, weights["out"], weights.get("out_bias"))


def cell_side(config: Config) -> int:
    """The patches of a side of a cell, which is one feature."""
    return config.merge
