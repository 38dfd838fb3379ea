"""Qwen3-ASR (Qwen/Qwen3-ASR-1.7B-hf): a Qwen 3 text that reads sound, a feature for each token of its encoder.

frames, at, clip_ids = fnmodels.inputs.chunk_rows([mel], config.audio)
batch = fnmodels.prepare(config.audio, frames, positions=at, segment_ids=clip_ids)
x = fnmodels.hidden(params["audio"], *batch, config=config.audio)
features = qwen3_asr.project(params, x, qwen3_asr.groups(at, clip_ids, 1), config=config)

The rest is as in `qwen2_audio.py`. A clip has any number of frames; the last second is padded with zeros.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.audio import chunk_rows, chunk_tokens, groups  # noqa: F401
from fnmodels.inputs.image_places import gather_cells, image_places  # noqa: F401
from fnmodels.models.audio import qwen3_asr_encoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.decoder import expressible
from fnmodels.models.common.family import Traits
from fnmodels.models.common.registry import family_of
from fnmodels.models.common.spec import bias, weight
from fnmodels.models.common.storage import StoredNames, renamed
from fnmodels.models.common.vision import weight_and_bias
from fnmodels.models.vision.common.two_towers import kinds, towers, towers_spec, with_prefix  # noqa: F401
from fnmodels.models.vision_language.common import vision_language
from fnmodels.models.vision_language.common.image_prompts import placeholder  # noqa: F401
from fnmodels.models.vision_language.common.vision_language import with_images  # noqa: F401
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree

MODEL_TYPES = ("qwen3_asr",)
TRAITS = Traits()
_TEXT: ConfigJson = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
_TEXT |= {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 65536, "tie_word_embeddings": True}
sound_rows = chunk_rows


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. audio_token: the id of the tokens that features replace."""

    text: Any
    audio: qwen3_asr_encoder.Config
    audio_token: int
    group: int = field(default=1, init=False)  # the encoder's tokens of a feature
    # kept for saving only
    model_type: str = field(default="qwen3_asr", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.audio.output_dim != self.text.hidden_size:
            raise ConfigError(
                f"output_dim of the encoder is {self.audio.output_dim}; features replace embeddings, of "
                f"{self.text.hidden_size} elements."
            )

    @property
    def image_token(self) -> int:
        """`audio_token`, as readers of features of any kind ask for it."""
        return self.audio_token

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        outer.choice("model_type", MODEL_TYPES)
        # transformers has the defaults of Qwen 3 for what an object leaves out, and its own without the object
        text = vision_language.text_config(outer, "qwen3", {} if values.get("text_config") else _TEXT)
        config = Config(
            text=vision_language.with_tie(text, vision_language.tied_head(outer, text, True)),
            audio=qwen3_asr_encoder.Config.from_hf(outer.take("audio_config", {})),
            audio_token=outer.integer("audio_token_id", 151676, low=0),
        )
        outer.take("token_classification_bias", None)  # of the head for forced alignment
        object.__setattr__(config, "extra", vision_language.kept(outer, "timestamp_token_id"))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        text = {name: value for name, value in self.text.to_hf().items() if name != "architectures"}
        out = {name: json.loads(value) for name, value in self.extra}
        out |= {"model_type": self.model_type, "architectures": ["Qwen3ASRForConditionalGeneration"]}
        out |= {"text_config": text, "audio_config": self.audio.to_hf(), "audio_token_id": self.audio_token}
        return expressible(self, out | {"tie_word_embeddings": self.text.tie_word_embeddings})


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, and the projector's weights [out, in]."""
    narrow, wide, std = config.audio.hidden_size, config.text.hidden_size, config.text.initializer_range
    parts: Tree = towers_spec(config)
    projector = {"up": weight((narrow, narrow), ("projection", "embed"), std), "up_bias": bias(narrow, "projection")}
    projector |= {"out": weight((wide, narrow), ("embed", "projection"), std), "out_bias": bias(wide, "embed")}
    return parts | {"projector": projector}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    text = family_of(config.text).hf_names(config.text)
    text = {path: renamed(name, r"^model\.", "model.language_model.") for path, name in text.items()}
    names: StoredNames = with_prefix(text, "text", "")
    names |= with_prefix(qwen3_asr_encoder.hf_names(config.audio), "audio", "model.audio_tower.")
    for path, name in (("up", "linear_1"), ("out", "linear_2")):
        names |= weight_and_bias(f"projector.{path}", f"model.multi_modal_projector.{name}")
    return names


def project(params: Tree, x: Tensor, places: Tensor, /, *, config: Config) -> Tensor:
    """Features [1, tokens, text's D] of the encoder's hidden states x [rows, slots, D] before its last norm.

    places: of the tokens, see `groups`.
    """
    weights = params["projector"]
    x = qwen3_asr_encoder.unembed(params["audio"], gather_cells(x, places).flatten(1)[None], config=config.audio)
    return linear(F.gelu(linear(x, weights["up"], weights["up_bias"])), weights["out"], weights["out_bias"])


def input_grid(clip: Any, config: Config) -> tuple[int, int, int]:
    """(1, 1, features) of a log-mel spectrogram [bins, frames]. ValueError for another shape."""
    return 1, 1, chunk_tokens(clip, 0, config.audio.num_mel_bins)
