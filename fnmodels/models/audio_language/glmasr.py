"""GLM-ASR (zai-org/GLM-ASR-Nano-2512): a Llama text that hears; four tokens of its encoder are a feature.

frames, at, clip_ids = fnmodels.inputs.frame_rows([mel], config.audio)
batch = fnmodels.prepare(config.audio, frames, positions=at, segment_ids=clip_ids)
x = fnmodels.hidden(params["audio"], *batch, config=config.audio)
features = glmasr.project(params, x, glmasr.groups(at, clip_ids, config.group), config=config)

The rest is as in `qwen2_audio.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.audio import check_spectrum, groups  # noqa: F401
from fnmodels.inputs.image_places import gather_cells, image_places  # noqa: F401
from fnmodels.models.audio import glmasr_encoder
from fnmodels.models.common import vision
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import bias, weight
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.vision.common.two_towers import kinds, towers, towers_spec  # noqa: F401
from fnmodels.models.vision_language.common import vision_language
from fnmodels.models.vision_language.common.image_prompts import placeholder  # noqa: F401
from fnmodels.models.vision_language.common.vision_language import with_images  # noqa: F401
from fnmodels.tree import Tree

MODEL_TYPES = ("glmasr",)
TRAITS = Traits(
    resaved={**vision_language.IN_MEMORY, r"model\.(audio_tower\..*)": r"\1"},
    in_memory={**vision_language.MODULES, r"^audio_tower\.": "model.audio_tower."},
)
_TEXT: ConfigJson = {"vocab_size": 59264, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
_TEXT |= {"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. audio_token: the id of the tokens that features replace; group: the encoder's tokens of a feature."""

    text: Any
    audio: glmasr_encoder.Config
    audio_token: int
    # kept for saving only
    model_type: str = field(default="glmasr", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.audio.intermediate_size % self.audio.hidden_size:
            raise ConfigError(
                f"intermediate_size of the encoder is {self.audio.intermediate_size}; features have as many elements, "
                f"so that it must be a multiple of hidden_size, {self.audio.hidden_size}."
            )

    @property
    def group(self) -> int:
        """The encoder's tokens of a feature."""
        return self.audio.intermediate_size // self.audio.hidden_size

    @property
    def image_token(self) -> int:
        """`audio_token`, as readers of features of any kind ask for it."""
        return self.audio_token

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        outer.choice("model_type", MODEL_TYPES)
        outer.expect("projector_hidden_act", "gelu")
        text = vision_language.text_config(outer, "llama", _TEXT)
        audio = outer.take("audio_config", {})
        if not isinstance(audio, Mapping):
            raise ConfigError(f"{outer.where}: 'audio_config' must be an object.")
        config = Config(
            text=vision_language.with_tie(text, vision_language.tied_head(outer, text, True)),
            audio=glmasr_encoder.Config.from_hf({"model_type": "glmasr_encoder", **audio}),
            audio_token=outer.integer("audio_token_id", 59260, low=0),
        )
        object.__setattr__(config, "extra", vision_language.kept(outer))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        own: ConfigJson = {"audio_token_id": self.audio_token, "projector_hidden_act": "gelu"}
        own["tie_word_embeddings"] = self.text.tie_word_embeddings
        return vision_language.to_hf(self, "GlmAsrForConditionalGeneration", **own)


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, and the projector's weights [out, in]."""
    narrow, wide, std = config.audio.intermediate_size, config.text.hidden_size, config.text.initializer_range
    up = {"up": weight((2 * wide, narrow), ("projection", "embed"), std), "up_bias": bias(2 * wide, "projection")}
    out = {"out": weight((wide, 2 * wide), ("embed", "projection"), std), "out_bias": bias(wide, "embed")}
    return towers_spec(config) | {"projector": up | out}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names = vision_language.part_names(config, text="language_model.", audio="audio_tower.")
    return names | vision_language.mlp_names(True)


def project(params: Tree, x: Tensor, places: Tensor, /, *, config: Config) -> Tensor:
    """Features [1, groups, text's D] of the encoder's hidden states x [rows, slots, D] before its last norm.

    places: of the tokens of each group, see `groups`.
    """
    x = vision.unembed(params["audio"], x, config=config.audio)
    return vision_language.mlp(params["projector"], gather_cells(x, places).flatten(1)[None])


def input_grid(clip: Any, config: Config) -> tuple[int, int, int]:
    """(1, 1, features) of a log-mel spectrogram [bins, frames]. ValueError for another shape, and without a feature."""
    frames = check_spectrum(clip, 0, config.audio.num_mel_bins)
    if frames < 2 * config.group:
        raise ValueError(f"A clip has {frames} frames, and a feature is made of {2 * config.group}: pad it.")
    return 1, 1, frames // 2 // config.group
