"""Qwen2-Audio (arXiv 2407.10759), Voxtral (arXiv 2507.13264), Audio Flamingo 3 (arXiv 2507.08128): sound in a text.

Whisper's encoder, whose tokens of 20 ms are averaged in pairs or, in Voxtral, joined in fours, and a projector.

frames, at, clip_ids = fnmodels.inputs.frame_rows([mel], config.audio)
batch = fnmodels.prepare(config.audio, frames, positions=at, segment_ids=clip_ids)
x = fnmodels.hidden(params["audio"], *batch, config=config.audio)
features = qwen2_audio.project(params, x, qwen2_audio.groups(at, clip_ids, config.group), config=config)
inputs, masks, freqs_cis = fnmodels.prepare(config.text, tokens, positions=positions, segment_ids=segment_ids)
places = qwen2_audio.image_places(tokens, config.audio_token, features.new_ones(features.shape[:2]) > 0)
inputs = qwen2_audio.with_images(params, inputs, features, places, config=config)
logits = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text)

The published models hear 30 s. Qwen2-Audio and Audio Flamingo 3 do not attend to silence after a clip: its tokens are
padding, segment 0, though the last token before it reads one frame of it.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.audio import groups  # noqa: F401
from fnmodels.inputs.image_places import gather_cells, image_places  # noqa: F401
from fnmodels.models.common.config_json import LAYERS_LIMIT, ConfigJson, Fields
from fnmodels.models.common.decoder import expressible
from fnmodels.models.common.family import Traits
from fnmodels.models.common.registry import family_of
from fnmodels.models.common.spec import bias, weight
from fnmodels.models.common.storage import Stored, StoredNames, renamed
from fnmodels.models.common.vision import weight_and_bias
from fnmodels.models.encoder_decoder import transformer, whisper
from fnmodels.models.vision.common.two_towers import kinds, towers, towers_spec, with_prefix  # noqa: F401
from fnmodels.models.vision_language.common import vision_language
from fnmodels.models.vision_language.common.image_prompts import placeholder  # noqa: F401
from fnmodels.models.vision_language.common.vision_language import with_images  # noqa: F401
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree


@dataclass(frozen=True)
class _Type:
    """Constants of a model type. projector: the names of its layers on disk. biases: whether it may have some."""

    architecture: str
    text: str
    encoder: str
    token: tuple[str, int]
    projector: tuple[str, ...] = ("linear_1", "linear_2")
    short: bool = True  # the encoder's fields have Whisper's names
    group: int = 2
    biases: bool = True


_TYPES = {
    "qwen2_audio": _Type(
        "Qwen2AudioForConditionalGeneration",
        "qwen2",
        "qwen2_audio_encoder",
        ("audio_token_index", 151646),
        ("linear",),
    ),
    "voxtral": _Type(
        "VoxtralForConditionalGeneration",
        "llama",
        "voxtral_encoder",
        ("audio_token_id", 24),
        short=False,
        group=4,
        biases=False,
    ),
    "audioflamingo3": _Type(
        "AudioFlamingo3ForConditionalGeneration",
        "qwen2",
        "audioflamingo3_encoder",
        ("audio_token_id", 151669),
        short=False,
    ),
}
MODEL_TYPES = tuple(_TYPES)
TRAITS = Traits(
    resaved={
        **vision_language.IN_MEMORY,
        r"model\.(audio_tower\..*)": r"\1",
    },
    in_memory={**vision_language.MODULES, r"^audio_tower\.": "model.audio_tower."},
)
# What Voxtral's text_config leaves out.
_VOXTRAL: dict[str, Any] = {
    "vocab_size": 131072,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 30,
}
_VOXTRAL |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
_VOXTRAL |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e8}
# config.json of Qwen/Qwen2-Audio-7B and of mistralai/Voxtral-Mini-3B-2507 and -Small-24B-2507.
_QWEN: dict[str, Any] = {"model_type": "qwen2", "vocab_size": 156032, "hidden_size": 4096, "intermediate_size": 11008}
_QWEN |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-5}
_QWEN |= {"rope_theta": 10000.0, "max_position_embeddings": 8192}
_SMALL = {"hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40}
PRESETS: dict[str, ConfigJson] = {
    "qwen2-audio-7b": {"model_type": "qwen2_audio", "text_config": _QWEN},
    "voxtral-mini-3b": {"model_type": "voxtral", "text_config": {"model_type": "llama"} | _VOXTRAL},
    "voxtral-small-24b": {"model_type": "voxtral", "text_config": {"model_type": "llama"} | _VOXTRAL | _SMALL},
}
# Ours: (Whisper's name in files, the usual one, the default).
_SIZES = {
    "hidden_size": ("d_model", "hidden_size", 1280),
    "num_hidden_layers": ("encoder_layers", "num_hidden_layers", 32),
    "num_attention_heads": ("encoder_attention_heads", "num_attention_heads", 20),
    "intermediate_size": ("encoder_ffn_dim", "intermediate_size", 5120),
    "num_mel_bins": ("num_mel_bins", "num_mel_bins", 128),
    "max_position_embeddings": ("max_source_positions", "max_source_positions", 1500),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. audio_token: the id of the tokens that features replace; group: the encoder's tokens of a feature.

    joined: a group is concatenated and not averaged. deep: the projector has two layers.
    """

    text: Any
    audio: whisper.Config
    audio_token: int
    group: int = 2
    joined: bool = False
    deep: bool = True
    projector_bias: bool = True
    # kept for saving only
    model_type: str = field(default="qwen2_audio", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @property
    def image_token(self) -> int:
        """`audio_token`, as readers of features of any kind ask for it."""
        return self.audio_token

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        model_type = outer.choice("model_type", MODEL_TYPES)
        variant = _TYPES[model_type]
        outer.expect("projector_hidden_act", "gelu")
        for name in ("vocab_size", "hidden_size"):  # compared below
            outer.take(name, None)
        rope = (values.get("text_config") or {}).get("rope_parameters")
        defaults = {name: value for name, value in _VOXTRAL.items() if name != "rope_theta" or not rope}
        text = vision_language.text_config(outer, variant.text, defaults if model_type == "voxtral" else {})
        for name in ("vocab_size", "hidden_size"):
            outer.expect(name, getattr(text, name))
        audio = _encoder(Fields(outer.take("audio_config", {}), f"{outer.where}, audio_config"), variant)
        joined = model_type == "voxtral"
        config = Config(
            text=vision_language.with_tie(text, vision_language.tied_head(outer, text, text.tie_word_embeddings)),
            audio=audio,
            audio_token=outer.integer(*variant.token, low=0),
            group=audio.intermediate_size // audio.hidden_size if joined else variant.group,
            joined=joined,
            deep=len(variant.projector) > 1,
            projector_bias=outer.boolean("projector_bias", True) if variant.biases else False,
            model_type=model_type,
        )
        object.__setattr__(config, "extra", vision_language.kept(outer))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        variant = _TYPES[self.model_type]
        text = {name: value for name, value in self.text.to_hf().items() if name != "architectures"}
        audio = _encoder_to_hf(self.audio, variant)
        out = {name: json.loads(value) for name, value in self.extra} | {"model_type": self.model_type}
        out |= {"architectures": [variant.architecture], "text_config": text, "audio_config": audio}
        out |= {variant.token[0]: self.audio_token, "tie_word_embeddings": self.text.tie_word_embeddings}
        if self.deep:
            out["projector_hidden_act"] = "gelu"
        if self.deep and variant.biases:
            out["projector_bias"] = self.projector_bias
        return expressible(self, out)


def _encoder(fields: Fields, variant: _Type) -> whisper.Config:
    """Whisper's encoder from `audio_config`."""
    fields.choice("model_type", (variant.encoder,), variant.encoder)
    fields.expect("scale_embedding", False)
    fields.expect("is_encoder_decoder", False)
    for name in ("vocab_size", "tie_word_embeddings", "num_hidden_layers"):  # an encoder has no tokens
        if variant.short or name != "num_hidden_layers":
            fields.take(name, None)
    sizes: dict[str, Any] = {}
    for name, (short, usual, default) in _SIZES.items():
        deep = {"high": LAYERS_LIMIT} if name == "num_hidden_layers" else {}
        sizes[name] = fields.integer(short if variant.short else usual, default, **deep)
    act = fields.choice("activation_function", ("gelu",), "gelu")
    std = fields.number("initializer_range", fields.number("init_std", 0.02, above=-1e-9), above=-1e-9)
    config = whisper.Config(vocab_size=1, **sizes, stack="encoder", hidden_act=act, initializer_range=std)
    fields.finish(("encoder_layerdrop", "layerdrop", "activation_dropout", "head_dim", "num_key_value_heads"))
    return config


def _encoder_to_hf(config: whisper.Config, variant: _Type) -> ConfigJson:
    sizes = {(short if variant.short else usual): getattr(config, name) for name, (short, usual, _) in _SIZES.items()}
    own_fields = {"model_type": variant.encoder, "activation_function": config.hidden_act}
    return sizes | own_fields | {"initializer_range": config.initializer_range}


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, and the projector's weights [out, in]."""
    narrow, wide = config.audio.hidden_size * (config.group if config.joined else 1), config.text.hidden_size
    std, biases = config.text.initializer_range, config.projector_bias
    if config.deep:
        projector: Tree = vision_language.mlp_leaves(narrow, wide, std, biases=biases)
    else:
        projector = {"out": weight((wide, narrow), ("projection", "embed"), std)}
        projector |= {"out_bias": bias(wide, "projection")} if biases else {}
    parts = towers_spec(config)
    return parts | {"projector": projector}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    text = with_prefix(family_of(config.text).hf_names(config.text), "text", "language_model.")
    audio = {path: renamed(name, r"^(model\.)?encoder\.", "") for path, name in whisper.hf_names(config.audio).items()}
    names: dict[str, Stored] = text | with_prefix(audio, "audio", "audio_tower.")
    layers = dict(zip(("up", "out") if config.deep else ("out",), _TYPES[config.model_type].projector, strict=True))
    for path, name in layers.items():
        layer_names = weight_and_bias(f"projector.{path}", f"multi_modal_projector.{name}")
        names |= {
            leaf: name for leaf, name in layer_names.items() if config.projector_bias or not leaf.endswith("_bias")
        }
    return names


def project(params: Tree, x: Tensor, places: Tensor, /, *, config: Config) -> Tensor:
    """Features [1, groups, text's D] of the encoder's hidden states x [rows, slots, D] before its last norm.

    places: of the tokens of each group, see `groups`.
    """
    weights = params["projector"]
    if config.joined:
        x = gather_cells(transformer.final_norm(params["audio"], x), places).flatten(1)[None]
    else:
        x = transformer.final_norm(params["audio"], gather_cells(x, places).mean(1)[None])
    if config.deep:
        x = F.gelu(linear(x, weights["up"], weights.get("up_bias")))
    return linear(x, weights["out"], weights.get("out_bias"))


def input_grid(clip: Any, config: Config) -> tuple[int, int, int]:
    """(1, 1, features) of a log-mel spectrogram [bins, frames]. ValueError for another shape."""
    bins = config.audio.num_mel_bins
    most = 2 * config.audio.max_position_embeddings
    if not isinstance(clip, Tensor) or clip.ndim != 2 or clip.shape[0] != bins or clip.shape[1] % 2:
        shown = list(clip.shape) if isinstance(clip, Tensor) else f"a {type(clip).__name__}"
        raise ValueError(
            f"A clip is a log-mel spectrogram [{bins}, frames] with an even number of frames, not {shown}."
        )
    if not 2 * config.group <= clip.shape[1] <= most:
        raise ValueError(f"A clip has {clip.shape[1]} frames; it must have from {2 * config.group} to {most}.")
    return 1, 1, clip.shape[1] // 2 // config.group
