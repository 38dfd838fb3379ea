"""Gemma 4 with images (Google, 2026): averaged patches among the tokens of the text model. Audio is not read.

12B (`gemma4_unified`) has no tower: its patches are larger, and each is a feature.

In the larger models the tokens of an image see each other in sliding layers; masks are those of `image_masks`.
`load_pretrained(path, part="text")` reads the text alone, by `fnmodels.models.decoder.gemma4`.

patches, at, image_ids = fnmodels.inputs.patch_rows(images, config.vision, length=...)
batch = fnmodels.prepare(config.vision, patches, positions=at, segment_ids=image_ids)
x = fnmodels.forward(params["vision"], *batch, config=config.vision)
features = gemma4.project(params, x, gemma4.cells(at, image_ids, config.vision.pooled), config=config)
inputs, _, freqs_cis = fnmodels.prepare(config.text, tokens, positions=positions, segment_ids=segment_ids)
places = gemma4.image_places(tokens, config.image_token, features.new_ones(features.shape[:2]) > 0)
inputs = gemma4.with_images(params, inputs, features, places, config=config)
masks = gemma4.image_masks(config, positions, segment_ids, places)
logits = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.image_places import cells, gather_cells, image_places, image_spans  # noqa: F401
from fnmodels.inputs.image_sizes import fit_patches
from fnmodels.inputs.mask import Create, MaskLike, masks_of
from fnmodels.inputs.rules import Causal, Rule, SameSpan, Window
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import LayerKind, Traits, function_of
from fnmodels.models.common.registry import family_of
from fnmodels.models.common.spec import bias, norm, weight
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.vision import gemma4_unified_vision, gemma4_vision
from fnmodels.models.vision.common import two_towers
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.models.vision_language.common import image_prompts, vision_language
from fnmodels.models.vision_language.common.image_prompts import ImageSettings, Name, placeholder  # noqa: F401
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.linear import linear
from fnmodels.ops.norm import rms_norm
from fnmodels.tree import Tree

_TYPES: dict[str, Any] = {"gemma4": gemma4_vision, "gemma4_unified": gemma4_unified_vision}
_ARCHITECTURES = {"gemma4": "Gemma4", "gemma4_unified": "Gemma4Unified"}
MODEL_TYPES = tuple(_TYPES)
features_of = vision_language.features_by_config
TRAITS = Traits(
    unread={"audio": r"model\.(audio_tower|embed_audio)\..*"},
    resaved={
        r"model\.embed_vision\.((?:patch_|pos_).*)": r"model.vision_embedder.\1",
        r"model\.embed_vision\.multimodal_embedder\.(.*)": r"model.embed_vision.\1",
    },
)
# Fields that text_config leaves out where they equal the defaults.
_TEXT: dict[str, Any] = {"vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30}
_TEXT |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
_BIDIRECTIONAL = {"gemma4": None, "gemma4_unified": "vision"}  # where a file does not say
_TOKENS = ("boi_token_id", "eoi_token_id", "video_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. image_token: the id of the tokens that features replace; pad_token: what they are for the layers.

    bidirectional: whether the tokens of an image see each other in sliding layers.
    """

    text: Any
    vision: gemma4_vision.Config | gemma4_unified_vision.Config
    image_token: int
    pad_token: int = 0
    bidirectional: bool = False
    # kept for saving only
    model_type: str = field(default="gemma4", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        model_type = outer.choice("model_type", MODEL_TYPES)
        if outer.take("vision_config", None) is None:
            raise ConfigError(
                f"{outer.where} has no 'vision_config': its text is read by fnmodels.models.decoder.gemma4."
            )
        text = vision_language.text_config(outer, f"{model_type}_text", _TEXT)
        inner, tower = Fields(values["text_config"], f"{outer.where}, text_config"), _TYPES[model_type].Config
        config = Config(
            text=vision_language.with_tie(text, outer.boolean("tie_word_embeddings", True)),
            vision=tower.from_hf(two_towers.tower_fields(outer, "vision_config", f"{model_type}_vision")),
            image_token=outer.integer("image_token_id", 258880, low=0),
            pad_token=inner.integer("pad_token_id", 0, low=0),
            bidirectional=inner.take("use_bidirectional_attention", _BIDIRECTIONAL[model_type]) == "vision",
            model_type=model_type,
        )
        ignored = ("audio_config", "audio_token_id", "vision_soft_tokens_per_image")
        object.__setattr__(config, "extra", vision_language.kept(outer, *_TOKENS, ignored=ignored))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect, without audio."""
        text_fields = {
            "pad_token_id": self.pad_token,
            "use_bidirectional_attention": "vision" if self.bidirectional else None,
        }
        text = {name: value for name, value in self.text.to_hf().items() if name != "architectures"}
        return vision_language.to_hf(
            self,
            f"{_ARCHITECTURES[self.model_type]}ForConditionalGeneration",
            text_config=text | text_fields,
            image_token_id=self.image_token,
            tie_word_embeddings=self.text.tie_word_embeddings,
        )


def in_memory(config: Config) -> dict[str, str]:
    """{pattern in a published name: what transformers' modules have there}."""
    if config.model_type == "gemma4":
        return {}
    return {r"\.embed_vision\.": ".embed_vision.multimodal_embedder.", r"\.vision_embedder\.": ".embed_vision."}


def leftovers(config: Config) -> tuple[str, ...]:
    """The text model's leftovers, by their names in files of this model."""
    text = [pattern.removeprefix("model.") for pattern in function_of(family_of(config.text), "leftovers")(config.text)]
    return tuple(rf"model\.language_model\.{pattern}" for pattern in text)


def _standardizes(config: Config) -> bool:
    return isinstance(config.vision, gemma4_vision.Config) and config.vision.standardize


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, the projection [out, in], and vectors that are not trained."""
    narrow, wide, std = config.vision.hidden_size, config.text.hidden_size, config.text.initializer_range
    projector: Tree = {"proj": weight((wide, narrow), ("projection", "embed"), std)}
    if _standardizes(config):
        fixed = {"shift": bias(narrow, "embed"), "scale": norm(narrow, "embed")}
        projector |= {name: replace(leaf, trainable=False) for name, leaf in fixed.items()}
    return two_towers.towers_spec(config) | {"projector": projector}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    at = "model.vision_tower." if config.model_type == "gemma4" else "model.vision_embedder."
    names = vision_language.nested_names(config, text="model.language_model.", vision=at)
    names["projector.proj"] = "model.embed_vision.embedding_projection.weight"
    if _standardizes(config):
        names |= {"projector.shift": f"{at}std_bias", "projector.scale": f"{at}std_scale"}
    return names


def project(params: Tree, x: Tensor, places: Tensor, /, *, config: Config) -> Tensor:
    """Features [1, cells, text's D] of the tower's hidden states x [rows, slots, D].

    places: of the patches of each cell of `config.vision.pooled` patches a side, see `cells`.
    """
    weights = params["projector"]
    # in fp32 at least, as the reference: the scale leaves the range of fp16
    pooled = upcast(upcast(gather_cells(x, places)).mean(1)[None].to(x.dtype)) * config.vision.feature_scale
    if _standardizes(config):
        pooled = (pooled - upcast(weights["shift"])) * upcast(weights["scale"])
    return linear(rms_norm(pooled.to(x.dtype), None, eps=config.vision.layer_norm_eps), weights["proj"])


def with_images(
    params: Tree, inputs: Mapping[str, Any], features: Tensor, places: Tensor, *, config: Config
) -> dict[str, Any]:
    """As `vision_language.with_images`; the layers' further inputs are those of padding at images."""
    joined = vision_language.with_images(params, inputs, features, places, config=config)
    if "token_ids" in inputs:
        joined["token_ids"] = torch.where(places[..., 0] >= 0, config.pad_token, inputs["token_ids"])
    return joined


def image_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, places: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask} of the text model: causal; images are bidirectional in sliding layers if `config.bidirectional`.

    positions, segment_ids [B, S]; places [B, S, 2], see `image_places`. A window bounds the past.
    """
    seen: Rule = Causal() | SameSpan() if config.bidirectional else Causal()
    window = Window(config.text.sliding_window or 1)
    every = family_of(config.text).kinds(config.text)
    rules: dict[str, Rule] = {kind: window & seen if LayerKind.parse(kind).slides else Causal() for kind in every}
    return masks_of(rules, positions, segment_ids, spans=image_spans(places, segment_ids), create=create)


def cell_side(config: Config) -> int:
    """The patches of a side of a cell, which is one feature."""
    return config.vision.pooled


def read_image(image: Tensor, settings: ImageSettings, name: Name, *, config: Config) -> tuple[list[Tensor], str]:
    """(images for the tower, text in place of the placeholder), see `common.image_prompts`."""
    most = image_prompts.number(settings, "max_soft_tokens", "", 280, most=20_000)
    cell = config.vision.patch_size * config.vision.pooled
    picture = image_prompts.resized(image, fit_patches(image, cell, most), settings)
    begin = name(image_prompts.kept_id(config, ("boi_token_id",), 255999))
    end = name(image_prompts.kept_id(config, ("eoi_token_id", "eoi_token_index"), 258882))
    return [picture], begin + name(config.image_token) * (picture.shape[1] * picture.shape[2] // cell**2) + end
