"""Gemma 3 with images (arXiv 2503.19786): SigLIP's patches, averaged to a few per image, among the tokens of the text.

The tokens of an image see each other, also later ones: masks are those of `image_masks`. An image that follows another
without text between them is one span with it, as in transformers.

batch = fnmodels.prepare(config.vision, patches, positions=..., segment_ids=image_ids)
x = fnmodels.forward(params["vision"], *batch, config=config.vision)
features = gemma3.project(params, x, cells(patch_positions, image_ids, config.pooled), config=config)
inputs, _, freqs_cis = fnmodels.prepare(config.text, tokens, positions=positions, segment_ids=segment_ids)
places = gemma3.image_places(tokens, config.image_token, features.new_ones(features.shape[:2], dtype=torch.bool))
inputs = gemma3.with_images(params, inputs, features, places, config=config)
masks = gemma3.image_masks(config.text, positions, segment_ids, places)
logits = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text)
"""

from dataclasses import dataclass, field
from math import isqrt
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.inputs.image_places import cells, gather_cells, image_places, image_spans  # noqa: F401
from fnmodels.inputs.mask import Create, MaskLike, masks_of
from fnmodels.inputs.rules import Causal, Rule, SameSpan, Window
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.registry import family_of
from fnmodels.models.common.spec import norm, weight
from fnmodels.models.common.storage import StoredNames, TensorSlice
from fnmodels.models.vision import siglip_vision
from fnmodels.models.vision.common import two_towers
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.models.vision_language.common import image_prompts, vision_language
from fnmodels.models.vision_language.common.image_prompts import ImageSettings, Name
from fnmodels.models.vision_language.common.vision_language import with_images  # noqa: F401
from fnmodels.ops.linear import linear
from fnmodels.ops.norm import rms_norm_zero_centered
from fnmodels.tree import Tree

MODEL_TYPES = ("gemma3",)
features_of = vision_language.features_by_config
TRAITS = Traits(
    leftovers=(r"vision_tower\.(vision_model\.)?embeddings\.position_ids",),
    # transformers 5 writes the tower without the component that published files have.
    resaved=vision_language.IN_MEMORY_WITHOUT_VISION_MODEL,
    in_memory=vision_language.MODULES,
)
# Fields that text_config leaves out where they equal the defaults.
_TEXT = {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
_TEXT |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
_SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
_SIGLIP |= {"image_size": 896, "patch_size": 14, "vision_use_head": False}


def _preset(**sizes: int) -> dict[str, Any]:
    text = {"sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}} | sizes
    return {"model_type": "gemma3", "text_config": text, "vision_config": _SIGLIP}


_12B = {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48, "num_attention_heads": 16}
_27B = {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32}
PRESETS: dict[str, ConfigJson] = {
    "gemma-3-4b": _preset(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34),
    "gemma-3-12b": _preset(**_12B, num_key_value_heads=8),
    "gemma-3-27b": _preset(**_27B, num_key_value_heads=16, head_dim=128, query_pre_attn_scalar=168),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. image_token: the id of the tokens that features replace; image_tokens: how many an image has."""

    text: Any
    vision: siglip_vision.Config
    image_token: int
    image_tokens: int = 256
    # kept for saving only
    model_type: str = field(default="gemma3", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        side = isqrt(self.image_tokens)
        if side**2 != self.image_tokens or self.vision.side % side:
            raise ConfigError(
                f"image_tokens is {self.image_tokens}, but must be the square of a divisor of the {self.vision.side} "
                "patches of a side."
            )

    @property
    def pooled(self) -> int:
        """The side of the square of patches whose mean is a feature."""
        return self.vision.side // isqrt(self.image_tokens)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        outer.choice("model_type", MODEL_TYPES)
        text = vision_language.text_config(outer, "gemma3_text", _TEXT)
        outer.expect("tie_word_embeddings", text.tie_word_embeddings)
        if text.bidirectional:
            raise UnsupportedError(f"{outer.where}, text_config: 'use_bidirectional_attention' must be false.")
        tower = two_towers.tower_fields(outer, "vision_config", "siglip_vision_model")
        config = Config(
            text=text,
            vision=siglip_vision.Config.from_hf(tower),
            image_token=outer.integer("image_token_index", 262144, low=0),
            image_tokens=outer.integer("mm_tokens_per_image", 256),
        )
        extra = vision_language.kept(outer, "boi_token_index", "eoi_token_index")
        object.__setattr__(config, "extra", extra)
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        return vision_language.to_hf(
            self,
            "Gemma3ForConditionalGeneration",
            image_token_index=self.image_token,
            mm_tokens_per_image=self.image_tokens,
            tie_word_embeddings=self.text.tie_word_embeddings,
        )


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, and the projector's norm and weight [out, in]."""
    narrow, wide, std = config.vision.hidden_size, config.text.hidden_size, config.text.initializer_range
    projector = {"norm": norm(narrow, "embed", 0.0), "proj": weight((wide, narrow), ("projection", "embed"), std)}
    return two_towers.towers_spec(config) | {"projector": projector}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    wide, at = config.text.hidden_size, "multi_modal_projector"
    own = TensorSlice(f"{at}.mm_input_projection_weight", 0, wide, wide, transposed=True)
    names = vision_language.part_names(config, text="language_model.", vision="vision_tower.")
    return names | {"projector.norm": f"{at}.mm_soft_emb_norm.weight", "projector.proj": own}


def project(params: Tree, x: Tensor, places: Tensor, /, *, config: Config) -> Tensor:
    """Features [1, cells, text's D] of the tower's last hidden states x [rows, slots, D], normed.

    places: of the patches of each cell of `config.pooled` patches a side, see `cells`.
    """
    weights = params["projector"]
    pooled = gather_cells(x, places).mean(1)[None]
    return linear(rms_norm_zero_centered(pooled, weights["norm"], eps=config.vision.layer_norm_eps), weights["proj"])


def image_masks(
    config: Any, positions: Tensor, segment_ids: Tensor, places: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask} of the text model: causal, and each image bidirectional within itself; a window bounds the past.

    config: of the whole model, or of its text. positions, segment_ids [B, S]; places [B, S, 2], see `image_places`.
    """
    config, seen = getattr(config, "text", config), Causal() | SameSpan()
    rules: dict[str, Rule] = {"full": seen, "sliding": Window(config.sliding_window or 1) & seen}
    spans = image_spans(places, segment_ids)
    used = {kind: rules[kind] for kind in family_of(config).kinds(config)}
    return masks_of(used, positions, segment_ids, spans=spans, create=create)


def cell_side(config: Config) -> int:
    """The patches of a side of a cell, which is one feature."""
    return config.pooled


def placeholder(config: Config, name: Name) -> tuple[str, str]:
    """The token that begins an image."""
    begin = name(image_prompts.kept_id(config, ("boi_token_index",), 255999))
    return begin, begin


def read_image(image: Tensor, settings: ImageSettings, name: Name, *, config: Config) -> tuple[list[Tensor], str]:
    """(images for the tower, text in place of the placeholder), see `common.image_prompts`."""
    image_prompts.refuse(settings, "do_pan_and_scan")
    edge = config.vision.image_size
    image_prompts.expect_side(settings, "size", "height", edge)
    end = name(image_prompts.kept_id(config, ("eoi_token_index",), 256000))
    text = placeholder(config, name)[0] + name(config.image_token) * config.image_tokens + end
    return [image_prompts.resized(image, (edge, edge), settings, "bilinear")], f"\n\n{text}\n\n"
