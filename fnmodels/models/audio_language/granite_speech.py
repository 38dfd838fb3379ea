"""Granite Speech (arXiv 2505.08699): a Granite text that hears by a conformer, whose frames a Q-Former reads.

frames, at, clip_ids = fnmodels.inputs.audio.spectrum_rows([spectrum], config.audio)
batch = fnmodels.prepare(config.audio, frames, positions=at, segment_ids=clip_ids)
x, tapped = fnmodels.hidden(params["audio"], *batch, config=config.audio, taps=granite_speech.taps(config))
features = granite_speech.project(params, x, granite_speech.groups(at, clip_ids, config.group), tapped, config=config)

The rest is as in `qwen2_audio.py`. A spectrum [160, frames] has two log-mel frames of 80 bins in each frame. A window
of 15 frames, the last one filled with zeros, becomes 3 features. Published models have adapters of the text for prompts
with sound: `params.lora.load_adapters(folder, config, params)` returns params with them; a text alone is read without.
Logits are divided by the text's `logits_scaling`, which transformers' class leaves out.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.audio import check_spectrum, spectrum_rows
from fnmodels.inputs.audio import windows as groups  # noqa: F401
from fnmodels.inputs.image_places import image_places  # noqa: F401
from fnmodels.models.audio import granite_speech_encoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.decoder import expressible
from fnmodels.models.common.family import Traits
from fnmodels.models.common.q_former import (
    QFormer,
    q_former,
    q_former_leaves,
    q_former_names,
    q_former_of,
    q_former_to_hf,
)
from fnmodels.models.common.spec import bias, weight
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.common.vision import weight_and_bias
from fnmodels.models.vision.common.two_towers import kinds, towers, towers_spec  # noqa: F401
from fnmodels.models.vision_language.common import vision_language
from fnmodels.models.vision_language.common.image_prompts import placeholder  # noqa: F401
from fnmodels.models.vision_language.common.vision_language import with_raw_images as with_images  # noqa: F401
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree

_TYPES = {"granite_speech": "GraniteSpeech", "granite_speech_plus": "GraniteSpeechPlus"}
MODEL_TYPES = tuple(_TYPES)
TRAITS = Traits(
    leftovers=granite_speech_encoder.TRAITS.leftovers,
    resaved={**vision_language.IN_MEMORY, r"model\.((?:encoder|projector)\..*)": r"\1"},
    in_memory={**vision_language.MODULES, r"^(encoder|projector)\.": r"model.\1."},
)
sound_rows = spectrum_rows


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. audio_token: the id of the tokens that features replace; group: the frames of a window; queries: of
    the Q-Former, which are the features of a window."""

    text: Any
    audio: granite_speech_encoder.Config
    q_former: QFormer
    audio_token: int
    group: int = 15
    queries: int = 3
    # kept for saving only
    model_type: str = field(default="granite_speech", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if not hasattr(self.text, "embedding_multiplier"):
            raise ConfigError(f"The text of {self.model_type} must be a Granite, not {self.text.model_type!r}.")
        if self.q_former.encoder_hidden_size != self.audio.features:
            raise ConfigError(
                f"encoder_hidden_size of the projector is {self.q_former.encoder_hidden_size}; the encoder's frames "
                f"have {self.audio.features} elements."
            )

    @property
    def image_token(self) -> int:
        """`audio_token`, as readers of features of any kind ask for it."""
        return self.audio_token

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        model_type = outer.choice("model_type", MODEL_TYPES)
        text = vision_language.text_config(outer, "granite", {})
        group, rate = outer.integer("window_size", 15), outer.integer("downsample_rate", 5)
        if group % rate:
            raise ConfigError(f"{outer.where}: 'window_size' {group} is not a multiple of 'downsample_rate' {rate}.")
        config = Config(
            text=vision_language.with_tie(text, vision_language.tied_head(outer, text, True)),
            audio=granite_speech_encoder.Config.from_hf(outer.take("encoder_config", {})),
            q_former=q_former_of(outer.take("projector_config", {}), f"{outer.where}, projector_config"),
            audio_token=outer.integer("audio_token_index", 49155, low=0),
            group=group,
            queries=group // rate,
            model_type=model_type,
        )
        outer.take("initializer_range", None)  # the parts have their own
        object.__setattr__(config, "extra", vision_language.kept(outer, "has_lora_adapter"))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        text = {name: value for name, value in self.text.to_hf().items() if name != "architectures"}
        out = {name: json.loads(value) for name, value in self.extra} | {"model_type": self.model_type}
        out |= {"architectures": [f"{_TYPES[self.model_type]}ForConditionalGeneration"], "text_config": text}
        out |= {"encoder_config": self.audio.to_hf(), "projector_config": q_former_to_hf(self.q_former)}
        out |= {"audio_token_index": self.audio_token, "window_size": self.group}
        out |= {"downsample_rate": self.group // self.queries}
        return expressible(self, out | {"tie_word_embeddings": self.text.tie_word_embeddings})


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, and the Q-Former with an output projection [out, in]."""
    wide, std = config.text.hidden_size, config.q_former.initializer_range
    projector = q_former_leaves(config.q_former, config.queries) | {"out_bias": bias(wide, "embed")}
    projector["out"] = weight((wide, config.q_former.hidden_size), ("embed", "projection"), std)
    return towers_spec(config) | {"projector": projector}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names = vision_language.part_names(config, text="language_model.", audio="encoder.")
    names |= {f"projector.{path}": name for path, name in q_former_names(config.q_former, "projector.qformer.").items()}
    return names | {"projector.queries": "projector.query"} | weight_and_bias("projector.out", "projector.linear")


def taps(config: Config) -> tuple[str, ...]:
    """The taps of the encoder that `project` reads."""
    return tuple(f"layers.{layer - 1}.output" if layer else "embed" for layer in config.audio.joined)


def project(
    params: Tree, x: Tensor, places: Tensor, tapped: Mapping[str, Tensor] | None = None, /, *, config: Config
) -> Tensor:
    """Features [1, windows * queries, text's D] of the encoder's hidden states x [rows, slots, D].

    places: of the frames of each window, see `groups`. tapped: the values of `taps`.
    """
    x = torch.cat([*((tapped or {})[name] for name in taps(config)), x], -1)
    row, slot = places.clamp(min=0).unbind(-1)
    windows = x[row, slot].where(places[..., :1] >= 0, 0)
    weights = params["projector"]
    return linear(q_former(weights, windows, config.q_former), weights["out"], weights["out_bias"]).flatten(0, 1)[None]


def input_grid(clip: Any, config: Config) -> tuple[int, int, int]:
    """(1, 1, features) of a spectrum [bins, frames]. ValueError for another shape."""
    return 1, 1, -(-check_spectrum(clip, 0, config.audio.num_mel_bins) // config.group) * config.queries
