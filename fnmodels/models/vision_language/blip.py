"""BLIP (arXiv 2201.12086) for captions: every layer of a text attends to the hidden states of an image.

patches, at = blip.tile_rows(images, config.vision)  # floats [3, image_size, image_size] each
batch = fnmodels.prepare(config.vision, patches, positions=at)
features = fnmodels.forward(params["vision"], *batch, config=config.vision)
inputs, masks, freqs_cis = fnmodels.prepare(config.text, tokens, positions=positions, segment_ids=segment_ids)
inputs |= blip.image_memory(tokens, segment_ids, features, at, config=config)
logits = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text)

A caption begins with the image token, bos_token_id of the file, and ends with `config.text.end_token`. All tokens of
such a document see its image and no other; a document that begins with another token has no image.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.inputs.images import patch_rows
from fnmodels.models.common import vision
from fnmodels.models.common.config_json import ConfigJson, Fields, shown
from fnmodels.models.common.family import Traits
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.encoder_decoder.cross_attention import cross_mask
from fnmodels.models.vision import blip_2_vision
from fnmodels.models.vision.common import two_towers
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.models.vision.common.two_towers import towers_spec as spec  # noqa: F401
from fnmodels.models.vision_language import blip_text
from fnmodels.models.vision_language.common import image_prompts, vision_language
from fnmodels.models.vision_language.common.image_prompts import ImageSettings, Name
from fnmodels.tree import Tree

MODEL_TYPES = ("blip",)
TRAITS = Traits(leftovers=(r"text_decoder\.bert\.embeddings\.position_ids",), copies_saved=False)
_CLASS = "BlipForConditionalGeneration"
# Of contrastive learning and of training.
_IGNORED: tuple[str, ...] = ("image_text_hidden_size", "initializer_factor", "initializer_range", "label_smoothing")
_IGNORED += ("logit_scale_init_value", "projection_dim")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. image_token: the id of the first token of a text that sees an image."""

    text: blip_text.Config
    vision: blip_2_vision.Config
    image_token: int = 30522
    # kept for saving only
    model_type: str = field(default="blip", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.text.memory_size != self.vision.hidden_size:
            raise ConfigError(
                f"The text reads hidden states {self.text.memory_size} wide, and the tower's are "
                f"{self.vision.hidden_size} wide."
            )

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        outer.choice("model_type", MODEL_TYPES)
        if (declared := outer.take("architectures", [_CLASS])) != [_CLASS]:
            raise UnsupportedError(
                f"{outer.where}: 'architectures' has {shown(declared)}; only {_CLASS} is supported: BLIP's models for "
                "questions, for retrieval and of contrastive learning are not read."
            )
        outer.expect("tie_word_embeddings", True)
        tower = blip_2_vision.Config.from_hf(two_towers.tower_fields(outer, "vision_config", "blip_vision_model"))
        width = {"encoder_hidden_size": tower.hidden_size}  # whatever the text's own field says
        own = two_towers.tower_fields(outer, "text_config", "blip_text_model", **width)
        text = vision_language.read_once(outer, own, lambda one: blip_text.Config.from_hf(dict(one)))
        token = Fields(own, f"{outer.where}, text_config").integer("bos_token_id", 30522, low=0)
        config = Config(text=text, vision=tower, image_token=token)
        object.__setattr__(config, "extra", vision_language.kept(outer, ignored=_IGNORED))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        text = {name: value for name, value in self.text.to_hf().items() if name != "architectures"}
        own: ConfigJson = {"text_config": text | {"bos_token_id": self.image_token}, "tie_word_embeddings": True}
        return vision_language.to_hf(self, _CLASS, **own)


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    return vision_language.part_names(config, text="text_decoder.", vision="vision_model.")


def hf_copies(config: Config) -> dict[str, str]:
    """{name on disk: path of the parameter that it repeats}, beside the tied head."""
    copies = blip_text.hf_copies(config.text)
    return {f"text_decoder.{name}": f"text.{path}" for name, path in copies.items()}


def tile_rows(images: Sequence[Tensor], config: blip_2_vision.Config) -> tuple[Tensor, Tensor]:
    """(patches [images, tokens, C p p], positions [images, tokens, 4]), an image a row. ValueError for other sizes."""
    for image in images:
        _check_size(image, config)
    patches, positions, _ = patch_rows(images, config)
    return patches, positions


def project(params: Tree, x: Tensor, tapped: Mapping[str, Tensor], /, *, config: Config) -> Tensor:
    """Features [images, tokens, D] of the tower's hidden states x after its last layer: those after its last norm."""
    return vision.unembed(params["vision"], x, config=config.vision)


def image_memory(
    tokens: Tensor, segment_ids: Tensor, features: Tensor, positions: Tensor, /, *, config: Config
) -> dict[str, Any]:
    """{"memory" [B, K, D], "memory_mask"}, inputs of the text model; {} where there are no images.

    tokens, segment_ids: [B, S], in which the n-th document that begins with the image token, counted row by row, has
    the n-th of the features [images, tokens, D]. positions: of `tile_rows`; not read, as all patches are seen. Reads
    values: not for use in transforms. ValueError unless there are as many such documents as images.
    """
    begins = segment_ids > 0
    begins[:, 1:] &= segment_ids[:, 1:] != segment_ids[:, :-1]
    row, column = (begins & (tokens == config.image_token)).nonzero().unbind(1)
    if len(row) != len(features):
        raise ValueError(
            f"{len(row)} documents begin with the image token (id {config.image_token}), but there are "
            f"{len(features)} images; each image needs one document."
        )
    if not len(row):
        return {}
    counts = row.bincount(minlength=len(tokens))
    rank = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    memory = features.new_zeros(len(tokens), int(counts.max()), *features.shape[1:])
    memory = memory.index_put((row, rank), features).flatten(1, 2)
    owner = segment_ids.new_zeros(len(tokens), int(counts.max()))
    owner[row, rank] = segment_ids[row, column]
    owner = owner.repeat_interleave(features.shape[1], 1)
    mask = cross_mask(torch.zeros_like(segment_ids), segment_ids, torch.zeros_like(owner), owner)
    return {"memory": memory, "memory_mask": mask}


def read_image(image: Tensor, settings: ImageSettings, name: Name, *, config: Config) -> tuple[list[Tensor], str]:
    """(the image for the tower, no text: a caption begins with the image token), see `common.image_prompts`."""
    side = config.vision.image_size
    image_prompts.expect_side(settings, "size", "height", side)
    image_prompts.expect_side(settings, "size", "width", side)
    return [image_prompts.resized(image, (side, side), settings)], ""


def memory_tokens(image: Tensor, /, *, config: Config) -> int:
    """The number of hidden states of an image. ValueError for an image of other sizes."""
    _check_size(image, config.vision)
    return config.vision.side**2 + config.vision.special_tokens


def _check_size(image: Tensor, config: blip_2_vision.Config) -> None:
    side = config.image_size
    if tuple(image.shape) != (config.num_channels, side, side):
        raise ValueError(f"An image is floats [{config.num_channels}, {side}, {side}], not {list(image.shape)}.")
