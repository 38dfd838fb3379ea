"""GLM 5.3 Flash with images (Z.ai, 2026): cells of patches among the tokens of its text, by the merger of GLM-4.1V.

The tower is GLM-OCR's with clamped gates and values. Nothing in the text rotates, and positions have one axis.
`load_pretrained(path, part="text")` reads the text alone, by `fnmodels.models.decoder.glm5_next`.

image = image.repeat_interleave(config.vision.frames, 0)  # [C T, H, W]: a picture is a video that stands still
patches, at, image_ids = fnmodels.inputs.patch_rows([image], config.vision)
batch = fnmodels.prepare(config.vision, patches, positions=at, segment_ids=image_ids)
x = fnmodels.forward(params["vision"], *batch, config=config.vision)
features = glm5_next.project(params, x, glm5_next.cells(at, image_ids, config.vision.merge), config=config)

The rest is as in `kimi_k25.py`. The frames of a video are images of the tower and of the text.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.inputs.image_places import cells, image_places  # noqa: F401
from fnmodels.inputs.image_sizes import padded_to_cells
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.vision import glm4v_vision
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.models.vision_language.common import glm, image_prompts, qwen_vl, vision_language
from fnmodels.models.vision_language.common.glm import hf_names, placeholder, project, spec  # noqa: F401
from fnmodels.models.vision_language.common.vision_language import (  # noqa: F401
    cell_side,
    in_memory,
    leftovers,
    with_images,
)

MODEL_TYPES = ("glm5_next",)
TRAITS = Traits()
features_of = vision_language.features_by_config


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. image_token: the id of the tokens that features replace."""

    text: Any
    vision: glm4v_vision.Config
    image_token: int
    # kept for saving only
    model_type: str = field(default="glm5_next", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        qwen_vl.check_widths(self)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        outer.choice("model_type", MODEL_TYPES)
        text = vision_language.text_config(outer, "glm5_next_text", {})
        config = Config(
            text=vision_language.with_tie(text, vision_language.tied_head(outer, text, False)),
            vision=glm4v_vision.Config.from_hf(qwen_vl.tower_values(outer, "glm5_next_vision")),
            image_token=outer.integer("image_token_id", 154854, low=0),
        )
        object.__setattr__(config, "extra", vision_language.kept(outer, *glm.TOKENS))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        own = {"image_token_id": self.image_token, "tie_word_embeddings": self.text.tie_word_embeddings}
        return vision_language.to_hf(self, "Glm5NextForConditionalGeneration", **own)


def read_image(
    image: Tensor, settings: image_prompts.ImageSettings, name: image_prompts.Name, *, config: Config
) -> tuple[list[Tensor], str]:
    """(the image for the tower, text in place of the placeholder), see `image_prompts`."""
    image_prompts.number(settings, "patch_expand_factor", "", 1, most=1)
    least = image_prompts.number(settings, "min_image_tokens", "", 16, most=100_000)
    most = image_prompts.number(settings, "max_image_tokens", "", 8000, most=100_000)
    cell = config.vision.patch_size * config.vision.merge
    picture = padded_to_cells(image, cell, least, most, how=image_prompts.how(settings))
    return [picture], name(config.image_token) * (picture.shape[1] * picture.shape[2] // cell**2)
