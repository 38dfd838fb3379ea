"""PaliGemma and PaliGemma 2 (arXiv 2407.07726, 2412.03555): SigLIP's patches before a text of Gemma 1 or 2.

A prompt sees all of itself, images included, and the answer is causal: masks are those of `prompt_masks`, for token
types [B, S] that are 0 in the prompt and 1 in the answer. A window bounds the answer alone. The positions of
transformers begin at 1, which changes nothing: only distances are read.

batch = fnmodels.prepare(config.vision, patches, positions=..., segment_ids=image_ids)
x = fnmodels.forward(params["vision"], *batch, config=config.vision)
features = paligemma.project(params, x, paligemma.cells(patch_positions, image_ids, 1))
places = paligemma.image_places(tokens, config.image_token, features.new_ones(features.shape[:2]) > 0)
inputs, masks, freqs_cis = fnmodels.prepare(
    config, tokens, positions=positions, segment_ids=segment_ids, places=places, token_types=token_types
)
inputs = paligemma.with_images(params, inputs, features, places, config=config)
logits = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text)
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.image_places import cells, gather_cells, image_places  # noqa: F401
from fnmodels.inputs.mask import Create, MaskLike, masks_of
from fnmodels.inputs.rules import Causal, Rule, SameSpan, Window
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.registry import family_of
from fnmodels.models.common.spec import bias, weight
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.common.vision import weight_and_bias
from fnmodels.models.vision import siglip_vision
from fnmodels.models.vision.common import two_towers
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.models.vision_language.common import image_prompts, vision_language
from fnmodels.models.vision_language.common.image_prompts import ImageSettings, Name, placeholder  # noqa: F401
from fnmodels.models.vision_language.common.vision_language import features_of, with_images  # noqa: F401
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree

MODEL_TYPES = ("paligemma",)
TRAITS = Traits(
    leftovers=(r"vision_tower\.(vision_model\.)?embeddings\.position_ids",),
    resaved=vision_language.IN_MEMORY_WITHOUT_VISION_MODEL,
    in_memory=vision_language.MODULES,
)
# Fields that text_config leaves out where they equal the defaults.
_TEXT = {"vocab_size": 257152, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18}
_TEXT |= {"num_attention_heads": 8, "num_key_value_heads": 1}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "vision_use_head": False,
}
_SIGLIP |= {"num_hidden_layers": 27, "num_attention_heads": 16, "patch_size": 14, "image_size": 224}
# What transformers adds to the objects of the parts, or publishes there without a meaning.
_ADDED = ("num_image_tokens", "projection_dim", "projector_hidden_act")


def _preset(model_type: str, **sizes: int) -> dict[str, Any]:
    text = {"model_type": model_type, "vocab_size": 257216, "num_key_value_heads": 4} | sizes
    own = {"image_token_index": 257152, "projection_dim": sizes["hidden_size"]}
    return {"model_type": "paligemma", "text_config": text, "vision_config": _SIGLIP} | own


_SMALL = {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8}
_MIDDLE = {"hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42, "num_attention_heads": 16}
_LARGE = {"hidden_size": 4608, "intermediate_size": 36864, "num_hidden_layers": 46, "num_attention_heads": 32}
_LARGE |= {"num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 144}
PRESETS: dict[str, ConfigJson] = {
    "paligemma-3b": _preset("gemma", **_TEXT | {"vocab_size": 257216}),
    "paligemma2-3b": _preset("gemma2", **_SMALL),
    "paligemma2-10b": _preset("gemma2", **_MIDDLE, num_key_value_heads=8),
    "paligemma2-28b": _preset("gemma2", **_LARGE),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. image_token: the id of the tokens that features replace."""

    text: Any
    vision: siglip_vision.Config
    image_token: int
    # kept for saving only
    model_type: str = field(default="paligemma", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        parts = {name: values.get(name) or {} for name in ("text_config", "vision_config")}
        for name, part in parts.items():
            if isinstance(part, dict):
                # prompts see all of themselves, which transformers writes into the text's object
                own = {"use_bidirectional_attention": None} if part.get("use_bidirectional_attention") is True else {}
                parts[name] = {key: value for key, value in (part | own).items() if key not in _ADDED}
        outer = Fields({**values, **parts})
        outer.choice("model_type", MODEL_TYPES)
        for name in ("vocab_size", "hidden_size"):  # the default ones in most files, which nothing reads
            outer.take(name, None)
        text = vision_language.text_config(outer, "gemma", _TEXT)
        width = outer.integer("projection_dim", 2048)
        if width != text.hidden_size:
            raise ConfigError(
                f"{outer.where}: projection_dim is {width}; features replace embeddings, of {text.hidden_size} "
                "elements."
            )
        tower = two_towers.tower_fields(outer, "vision_config", "siglip_vision_model")
        config = Config(
            text=vision_language.with_tie(text, vision_language.tied_head(outer, text, True)),
            vision=siglip_vision.Config.from_hf({**_SIGLIP, "intermediate_size": 4096, **tower}),
            image_token=outer.integer("image_token_index", 256000, low=0),
        )
        object.__setattr__(config, "extra", vision_language.kept(outer, ignored=("_vocab_size", "ignore_index")))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        return vision_language.to_hf(
            self,
            "PaliGemmaForConditionalGeneration",
            image_token_index=self.image_token,
            projection_dim=self.text.hidden_size,
            hidden_size=self.text.hidden_size,
            tie_word_embeddings=self.text.tie_word_embeddings,
        )


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, and the projector's weight [out, in]."""
    narrow, wide, std = config.vision.hidden_size, config.text.hidden_size, config.text.initializer_range
    projector = {"out": weight((wide, narrow), ("projection", "embed"), std), "out_bias": bias(wide, "projection")}
    return two_towers.towers_spec(config) | {"projector": projector}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names = vision_language.part_names(config, text="language_model.", vision="vision_tower.")
    return names | weight_and_bias("projector.out", "multi_modal_projector.linear")


def project(params: Tree, x: Tensor, places: Tensor, /) -> Tensor:
    """Features [1, patches, text's D] of the tower's last hidden states x [rows, slots, D], normed.

    places: of the patches, see `cells`.
    """
    weights = params["projector"]
    return linear(gather_cells(x, places).flatten(0, 1)[None], weights["out"], weights["out_bias"])


def prompt_masks(
    config: Any, positions: Tensor, segment_ids: Tensor, token_types: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask} of the text model: causal, and each prompt bidirectional within itself.

    config: of the whole model, or of its text. positions, segment_ids [B, S]; token_types [B, S]: 0 in the prompt, 1 in
    the answer.
    """
    config = getattr(config, "text", config)
    rules: dict[str, Rule] = {"full": Causal(), "sliding": Window(config.sliding_window or 1) & Causal()}
    used = {kind: rules[kind] | SameSpan() for kind in family_of(config).kinds(config)}
    spans = ((token_types == 0) & (segment_ids > 0)).long()
    return masks_of(used, positions, segment_ids, spans=spans, create=create)


def cell_side(config: Config) -> int:
    """The patches of a side of a cell, which is one feature."""
    return 1


def read_image(image: Tensor, settings: ImageSettings, name: Name, *, config: Config) -> tuple[list[Tensor], str]:
    """(images for the tower, text in place of the placeholder), see `common.image_prompts`."""
    edge = config.vision.image_size
    image_prompts.expect_side(settings, "size", "height", edge)
    return [image_prompts.resized(image, (edge, edge), settings)], name(config.image_token) * config.vision.side**2
