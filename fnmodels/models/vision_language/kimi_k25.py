"""Kimi K2.5, K2.6 and K2.7 with images (Moonshot AI, 2026): MoonViT's cells of patches among the tokens of Kimi K2.

`load_pretrained(path, part="text")` reads the text alone, by `fnmodels.models.decoder.deepseek`. Videos are not read.

patches, at, image_ids = fnmodels.inputs.patch_rows(images, config.vision, length=...)
batch = fnmodels.prepare(config.vision, patches, positions=at, segment_ids=image_ids)
x = fnmodels.forward(params["vision"], *batch, config=config.vision)
features = kimi_k25.project(params, x, kimi_k25.cells(at, image_ids, config.vision.merge), config=config)
inputs, masks, freqs_cis = fnmodels.prepare(config.text, tokens, positions=positions, segment_ids=segment_ids)
places = kimi_k25.image_places(tokens, config.image_token, features.new_ones(features.shape[:2]) > 0)
inputs = kimi_k25.with_images(params, inputs, features, places, config=config)
logits = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text)
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.inputs.image_places import cells, image_places  # noqa: F401
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.common.vision import weight_and_bias
from fnmodels.models.vision import kimi_k25_vision
from fnmodels.models.vision.common import two_towers
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.models.vision_language.common import qwen_vl, vision_language
from fnmodels.models.vision_language.common.image_prompts import placeholder  # noqa: F401
from fnmodels.models.vision_language.common.vision_language import cell_side, with_images  # noqa: F401
from fnmodels.ops.norm import layer_norm
from fnmodels.tree import Tree

MODEL_TYPES = ("kimi_k25",)
# transformers 5.24 undoes names of the tower in the text as well, and saves others that are nobody's.
TRAITS = Traits(
    resaved={
        r"language_model\.model\.blocks\.(.*)": r"language_model.model.layers.\1",
        r"vision_tower\.encoder\.(patch_embed\..*)": r"vision_tower.\1",
        r"model\.(mm_projector\..*)": r"\1",
    },
    in_memory={
        **vision_language.MODULES,
        **kimi_k25_vision.IN_MEMORY,
        r"^mm_projector\.": "model.mm_projector.",
        r"\.mm_projector\.proj\.0\.": ".mm_projector.in_proj.",
        r"\.mm_projector\.proj\.2\.": ".mm_projector.out_proj.",
    },
)
features_of = vision_language.features_by_config
_TOKENS = ("video_token_id", "vision_start_token_id", "vision_end_token_id")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. image_token: the id of the tokens that features replace; norm_eps: of the merger's norm."""

    text: Any
    vision: kimi_k25_vision.Config
    image_token: int
    norm_eps: float = 1e-5
    # kept for saving only
    model_type: str = field(default="kimi_k25", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        outer.choice("model_type", MODEL_TYPES)
        text = vision_language.text_config(outer, "deepseek_v3", {})
        tower = two_towers.tower_fields(outer, "vision_config", "kimi_k25_vision")
        if tower["model_type"] == "kimi_k25":  # in published files
            tower["model_type"] = "kimi_k25_vision"
        vision = kimi_k25_vision.Config.from_hf(tower)
        outer.expect("projection_hidden_size", vision.hidden_size)
        config = Config(
            text=vision_language.with_tie(text, vision_language.tied_head(outer, text, _tied(values))),
            vision=vision,
            image_token=outer.integer("image_token_id", outer.take("media_placeholder_token_id", 163605), low=0),
            norm_eps=outer.number("projection_layer_norm_eps", tower.get("projector_ln_eps", 1e-5)),
        )
        object.__setattr__(config, "extra", vision_language.kept(outer, *_TOKENS))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        return vision_language.to_hf(
            self,
            "Kimi_K25ForConditionalGeneration",
            image_token_id=self.image_token,
            projection_hidden_size=self.vision.hidden_size,
            projection_layer_norm_eps=self.norm_eps,
            tie_word_embeddings=self.text.tie_word_embeddings,
        )


def _tied(values: ConfigJson) -> bool:
    """Published files say so in the text alone; transformers' default is that the head is tied."""
    return bool(
        (values.get("text_config") or {}).get("tie_word_embeddings", "media_placeholder_token_id" not in values)
    )


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, and "merger"."""
    merger = qwen_vl.normed_merger_leaves(config.vision, config.text.hidden_size)
    return two_towers.towers_spec(config) | {"merger": merger}


def in_memory_forms(config: Config) -> StoredNames:
    """{path: its place in transformers' module} of q, k and v of the tower."""
    forms = kimi_k25_vision.in_memory_forms(config.vision, "model.vision_tower.")
    return {f"vision.{path}": stored for path, stored in forms.items()}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names = vision_language.part_names(config, text="language_model.", vision="vision_tower.")
    for path, name in (("norm", "pre_norm"), ("up", "proj.0"), ("out", "proj.2")):
        names |= weight_and_bias(f"merger.{path}", f"mm_projector.{name}")
    return names


def project(params: Tree, x: Tensor, places: Tensor, /, *, config: Config) -> Tensor:
    """Features [1, cells, text's D] of the tower's hidden states x [rows, slots, D].

    places: of the patches of each cell of `config.vision.merge` patches a side, see `cells`.
    """
    weights = params["merger"]
    normed = layer_norm(x, weights["norm"], weights["norm_bias"], eps=config.norm_eps)
    return qwen_vl.merged(weights, vision_language.joined(normed, places))
