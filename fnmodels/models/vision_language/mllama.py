"""Llama 3.2 Vision (Meta, 2024): layers of the text attend to the tiles of images; see `mllama_text.py`.

patches, at = mllama_vision.tile_rows(images, config.vision)  # floats [3, rows * side, columns * side] each
batch = fnmodels.prepare(config.vision, patches, positions=at)
x, tapped = fnmodels.hidden(params["vision"], *batch, config=config.vision, taps=mllama.taps(config))
features = mllama.project(params, x, tapped, config=config)
inputs, masks, freqs_cis = fnmodels.prepare(config.text, tokens, positions=positions, segment_ids=segment_ids)
inputs |= mllama.image_memory(tokens, segment_ids, features, at, config=config)
logits = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text)

A text has one image token for each image. The tokens from there on to the next image token see this image; those after
several image tokens in a row see all of these images. Documents of one row do not see each other's images. A token
before the first image sees none, as in Meta's code; transformers lets it see all images and the empty tiles.
Features of inner layers are what `intermediate_layers_indices` read, as in Meta's code; transformers 5 takes what they
return, which published weights were not trained with.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.image_sizes import on_canvas
from fnmodels.inputs.mask import Mask
from fnmodels.inputs.rules import Causal
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import bias, weight
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.common.vision import weight_and_bias
from fnmodels.models.vision import mllama_vision
from fnmodels.models.vision.common import two_towers
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.models.vision.mllama_vision import tile_rows  # noqa: F401
from fnmodels.models.vision_language import mllama_text
from fnmodels.models.vision_language.common import image_prompts, vision_language
from fnmodels.models.vision_language.common.image_prompts import ImageSettings, Name, placeholder  # noqa: F401
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree

MODEL_TYPES = ("mllama",)
TRAITS = Traits(
    resaved={**vision_language.IN_MEMORY, r"model\.(vision_model\..*)": r"\1"},
    in_memory={**vision_language.MODULES, r"^vision_model\.": "model.vision_model."},
)
# config.json of meta-llama/Llama-3.2-11B-Vision and -11B-Vision-Instruct.
_TEXT: ConfigJson = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 40}
_TEXT |= {"num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0}
_TEXT |= {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
}
PRESETS: dict[str, ConfigJson] = {
    name: {
        "model_type": "mllama",
        "text_config": {"model_type": "mllama_text_model"} | _TEXT,
        "vision_config": {"model_type": "mllama_vision_model", "image_size": side},
    }
    for name, side in (("llama-3.2-11b-vision", 448), ("llama-3.2-11b-vision-instruct", 560))
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. image_token: the id of the token from which on a text sees an image."""

    text: mllama_text.Config
    vision: mllama_vision.Config
    image_token: int
    # kept for saving only
    model_type: str = field(default="mllama", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        outer.choice("model_type", MODEL_TYPES)
        own = outer.take("text_config", {})
        if not isinstance(own, Mapping):
            raise ConfigError(f"{outer.where}: 'text_config' must be an object.")
        text = vision_language.read_once(
            outer, {"model_type": "mllama_text_model", **own}, lambda one: mllama_text.Config.from_hf(dict(one))
        )
        if vision_language.tied_head(outer, text, False):
            outer.expect("tie_word_embeddings", False)
        config = Config(
            text=vision_language.with_outer_head(outer, text),
            vision=mllama_vision.Config.from_hf(two_towers.tower_fields(outer, "vision_config", "mllama_vision_model")),
            image_token=outer.integer("image_token_index", 128256, low=0),
        )
        object.__setattr__(config, "extra", vision_language.kept(outer))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        own: ConfigJson = {"image_token_index": self.image_token, "tie_word_embeddings": False}
        return vision_language.to_hf(self, "MllamaForConditionalGeneration", **own)


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, and the projector's weight [out, in]."""
    narrow, wide = config.vision.features, config.text.hidden_size
    out = weight((wide, narrow), ("projection", "embed"), config.text.initializer_range)
    return two_towers.towers_spec(config) | {"projector": {"out": out, "out_bias": bias(wide, "projection")}}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names = vision_language.part_names(config, text="language_model.", vision="vision_model.")
    return names | weight_and_bias("projector.out", "multi_modal_projector")


def taps(config: Config) -> tuple[str, ...]:
    """The taps of the tower that `project` reads."""
    return tuple(f"layers.{layer}.input" for layer in sorted(set(config.vision.read_layers)))


def project(params: Tree, x: Tensor, tapped: Mapping[str, Tensor], /, *, config: Config) -> Tensor:
    """Features [images, tokens, text's D] of hidden states x [images, tokens, D] of the tower and values of `taps`."""
    read = [tapped[f"layers.{layer}.input"] for layer in config.vision.read_layers]
    joined = torch.cat((x, torch.stack(read, -1).flatten(-2)), -1) if read else x
    return linear(joined, params["projector"]["out"], params["projector"]["out_bias"])


def image_memory(
    tokens: Tensor, segment_ids: Tensor, features: Tensor, positions: Tensor, /, *, config: Config
) -> dict[str, Any]:
    """{"memory" [B, K, D], "memory_mask"}, inputs of the text model; {} where there are no images.

    tokens, segment_ids: [B, S], in which the n-th image token, counted row by row, is the n-th of the features [images,
    tokens, D]. positions: [images, tokens, 4], of `mllama_vision.tile_rows`. Reads values: not for use in transforms.
    ValueError unless there are as many image tokens as images.
    """
    where = (tokens == config.image_token) & (segment_ids > 0)
    row, column = where.nonzero().unbind(1)
    if len(row) != len(features):
        raise ValueError(
            f"The text has {len(row)} image tokens (id {config.image_token}), but there are {len(features)} images; "
            "each image needs one token."
        )
    if not len(row):
        return {}
    groups = _groups(where, segment_ids)
    image, slot = mllama_vision.shows_picture(config.vision, positions).nonzero().unbind(1)
    owner = row[image]
    counts = owner.bincount(minlength=len(tokens))
    rank = torch.arange(len(owner), device=owner.device) - (counts.cumsum(0) - counts)[owner]
    memory = features.new_zeros(len(tokens), int(counts.max()), features.shape[-1])
    memory = memory.index_put((owner, rank), features[image, slot])
    places, seen = torch.zeros(2, *memory.shape[:2], dtype=torch.long, device=tokens.device)
    places[owner, rank], seen[owner, rank] = column[image], groups[owner, column[image]]
    order = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return {"memory": memory, "memory_mask": Mask(order, groups, places, seen, None, None, Causal())}


def read_image(image: Tensor, settings: ImageSettings, name: Name, *, config: Config) -> tuple[list[Tensor], str]:
    """(images for the tower, text in place of the placeholder), see `common.image_prompts`."""
    side = config.vision.image_size
    image_prompts.expect_side(settings, "size", "height", side)
    most = image_prompts.number(settings, "max_image_tiles", "", 4, most=config.vision.max_tiles)
    fitted = on_canvas(image, side, most, how=image_prompts.how(settings, "bilinear"))
    return [fitted], name(config.image_token)


def memory_tokens(image: Tensor, /, *, config: Config) -> int:
    """The number of features of an image that tokens see. ValueError for an image of other sizes."""
    rows, columns = mllama_vision.aspect_of(image, config.vision)
    return rows * columns * (config.vision.side**2 + 1)


def _groups(where: Tensor, segment_ids: Tensor) -> Tensor:
    """int64 [B, S]: which run of image tokens of its document each token follows, from 1 in the row; 0: none.

    where: bool [B, S], at image tokens.
    """
    same = torch.zeros_like(where)
    same[:, 1:] = segment_ids[:, 1:] == segment_ids[:, :-1]
    begins = where.clone()
    begins[:, 1:] &= ~(where[:, :-1] & same[:, 1:])
    groups = begins.cumsum(1)
    before = (groups - begins.long()).where(~same, 0).cummax(1).values  # of the documents before
    return groups.where((groups > before) & (segment_ids > 0), 0)
