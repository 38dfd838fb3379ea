"""Step 3.7 Flash (StepFun, 2026) with images: a picture and the crops of it among the tokens of Step 3.5's text.

`load_pretrained(path, part="text")` reads the text alone, by `fnmodels.models.decoder.step3p5`.

patches, at, image_ids = fnmodels.inputs.patch_rows(images, config.vision, length=...)
batch = fnmodels.prepare(config.vision, patches, positions=at, segment_ids=image_ids)
x = fnmodels.forward(params["vision"], *batch, config=config.vision)
features = step3p7.project(params, x, step3p7.cells(at, image_ids, 4), config=config)
inputs, masks, freqs_cis = fnmodels.prepare(config.text, tokens, positions=positions, segment_ids=segment_ids)
places = step3p7.image_places(tokens, config.image_token, features.new_ones(features.shape[:2]) > 0)
inputs = step3p7.with_images(params, inputs, features, places, config=config)
logits = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text)
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.image_places import image_places  # noqa: F401
from fnmodels.inputs.image_sizes import whole_and_crops
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import bias, weight
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.common.vision import weight_and_bias
from fnmodels.models.vision import step3p5_vision
from fnmodels.models.vision.common import two_towers
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.models.vision_language.common import image_prompts, vision_language
from fnmodels.models.vision_language.common.image_prompts import ImageSettings, Name, placeholder  # noqa: F401
from fnmodels.models.vision_language.common.vision_language import in_memory, leftovers, with_images  # noqa: F401
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree

MODEL_TYPES = ("step3p7",)
TRAITS = Traits(
    resaved={  # of transformers' class without a head
        r"language_model\.(.*)": r"model.\1",
        r"multi_modal_projector\.(.*)": r"vit_large_projector.\1",
    },
    in_memory={
        **step3p5_vision.IN_MEMORY,
        r"^model\.": "model.language_model.",
        r"^vision_model\.": "model.vision_model.",
        r"^vit_large_projector\.": "model.multi_modal_projector.",
    },
)
features_of = vision_language.features_by_config
# What processors read: how many tokens a picture and a crop have.
_PROCESSOR: tuple[str, ...] = ("image_token_len", "patch_token_len", "im_start_token", "im_end_token", "im_patch_token")
_PROCESSOR += ("use_im_start_end", "vision_select_layer")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. image_token: the id of the tokens that features replace."""

    text: Any
    vision: step3p5_vision.Config
    image_token: int
    projector_bias: bool = False
    # kept for saving only
    model_type: str = field(default="step3p7", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        outer.choice("model_type", MODEL_TYPES)
        outer.expect("understand_projector_stride", 2)
        text = vision_language.text_config(outer, "step3p5", {})
        config = Config(
            text=vision_language.with_tie(text, vision_language.tied_head(outer, text, False)),
            vision=step3p5_vision.Config.from_hf(_tower_fields(outer)),
            image_token=outer.integer("image_token_id", 151679, low=0),
            projector_bias=outer.boolean("projector_bias", False),
        )
        object.__setattr__(config, "extra", vision_language.kept(outer, ignored=_PROCESSOR))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        own = {"image_token_id": self.image_token, "projector_bias": self.projector_bias}
        tied = self.text.tie_word_embeddings
        return vision_language.to_hf(self, "Step3p7ForConditionalGeneration", tie_word_embeddings=tied, **own)


def _tower_fields(outer: Fields) -> ConfigJson:
    """The object of the tower, whose type has another name in published files than in transformers."""
    fields = two_towers.tower_fields(outer, "vision_config", "step3p5_vision")
    return fields | ({"model_type": "step3p5_vision"} if fields["model_type"] == "perception_encoder" else {})


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, and the projector's weight [out, in]."""
    narrow, wide = 4 * config.vision.hidden_size, config.text.hidden_size
    projector: Tree = {"out": weight((wide, narrow), ("projection", "embed"), config.text.initializer_range)}
    projector |= {"out_bias": bias(wide, "projection")} if config.projector_bias else {}
    return two_towers.towers_spec(config) | {"projector": projector}


def in_memory_forms(config: Config) -> StoredNames:
    """{path: its place in transformers' module} of q, k and v of the tower."""
    forms = step3p5_vision.in_memory_forms(config.vision, "model.vision_model.")
    return {f"vision.{path}": stored for path, stored in forms.items()}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names: StoredNames = vision_language.part_names(config, text="", vision="vision_model.")
    own = weight_and_bias("projector.out", "vit_large_projector")
    return names | (own if config.projector_bias else {"projector.out": own["projector.out"]})


def cells(positions: Tensor, segment_ids: Tensor, side: int) -> Tensor:
    """The patches that each feature reads, int64 [features, 9, 9, 2]: see `step3p5_vision.windows`; side: 4."""
    return step3p5_vision.windows(positions, segment_ids)


def cell_side(config: Config) -> int:
    """The patches of a side of a feature's cell."""
    return step3p5_vision.STRIDE


def project(params: Tree, x: Tensor, places: Tensor, /, *, config: Config) -> Tensor:
    """Features [1, cells, text's D] of the tower's hidden states x [rows, slots, D]; places: of `cells`."""
    weights = params["projector"]
    return linear(step3p5_vision.downsampled(params["vision"], x, places), weights["out"], weights.get("out_bias"))


def read_image(image: Tensor, settings: ImageSettings, name: Name, *, config: Config) -> tuple[list[Tensor], str]:
    """(crops of the picture, and then all of it; text in place of the placeholder), see `common.image_prompts`."""
    side, cell = config.vision.image_size, config.vision.patch_size * step3p5_vision.STRIDE
    image_prompts.expect_side(settings, "size", "height", side)
    crop = image_prompts.number(settings, "patch_size", "", 504, most=side)
    if crop % cell:
        raise ConfigError(f"'patch_size' is {crop}, but crops must be multiples of {cell} pixels.")
    most = image_prompts.number(settings, "max_image_size", "", 3024, most=100_000)
    how = image_prompts.how(settings, "bilinear")
    whole, crops, columns = whole_and_crops(image, side, crop, most=most, how=how)
    feature = name(config.image_token)
    text = f"<im_start>{feature * (side // cell) ** 2}<im_end>"
    own = f"<patch_start>{feature * (crop // cell) ** 2}<patch_end>"
    ends = ["<patch_newline>" * ((n + 1) % columns == 0 and n + 1 < len(crops)) for n in range(len(crops))]
    return [*crops, whole], "".join(own + end for end in ends) + text
