"""Voxtral Realtime (mistralai/Voxtral-Mini-4B-Realtime-2602): a text that is written while the sound is heard.

frames, at, clip_ids = fnmodels.inputs.audio.causal_rows([mel], config.audio)
batch = fnmodels.prepare(config.audio, frames, positions=at, segment_ids=clip_ids)
x = fnmodels.forward(params["audio"], *batch, config=config.audio)
features = voxtral_realtime.project(params, x, voxtral_realtime.groups(at, clip_ids, config.group))
inputs, masks, freqs_cis = fnmodels.prepare(config.text, tokens, positions=positions, segment_ids=segment_ids)
places = voxtral_realtime.sound_places(segment_ids, [mel.shape[1] // 8])
inputs = voxtral_realtime.with_sound(params, inputs, features, places, config=config)
logits = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text)

Every token has a feature, of 80 ms, that is added to its embedding: the n-th of a document that of 4 n tokens of the
encoder on. In generation each new token needs its own: `prepare_step`, `with_sound` and `decode` make a step, and the
encoder hears further frames by the same with a cache of its own. `dataclasses.replace(config.text, delay=n)` is a model
that is n tokens behind the sound.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.audio import groups  # noqa: F401
from fnmodels.inputs.image_places import add_features, gather_cells
from fnmodels.models.audio_language import voxtral_realtime_stack as stack
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.vision.common.two_towers import kinds, towers, towers_spec  # noqa: F401
from fnmodels.models.vision_language.common import vision_language
from fnmodels.ops.embedding import embed_tokens
from fnmodels.tree import Tree

MODEL_TYPES = ("voxtral_realtime",)
TRAITS = Traits(
    resaved={**vision_language.IN_MEMORY, r"model\.(audio_tower\..*)": r"\1"},
    in_memory={**vision_language.MODULES, r"^audio_tower\.": "model.audio_tower."},
)
_TEXT: ConfigJson = {"vocab_size": 131072, "hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 26}
_TEXT |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
_TEXT |= {"sliding_window": 8192}
_AUDIO: ConfigJson = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32}
_AUDIO |= {"num_attention_heads": 32}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. group: the encoder's tokens of a feature."""

    text: stack.Config
    audio: stack.Config
    group: int = 4
    # kept for saving only
    model_type: str = field(default="voxtral_realtime", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        outer.choice("model_type", MODEL_TYPES)
        outer.expect("projector_hidden_act", "gelu")
        parts = {name: outer.take(f"{name}_config", {}) for name in ("text", "audio")}
        for name, part in parts.items():
            if not isinstance(part, Mapping):
                raise ConfigError(f"{outer.where}: '{name}_config' must be an object.")
        rope = {} if parts["text"].get("rope_parameters") else {"rope_theta": 1e6}
        known = {"model_type": "voxtral_realtime_text", **_TEXT, **rope}
        text = vision_language.read_once(outer, parts["text"], lambda own: stack.Config.from_hf({**known, **own}))
        hears: ConfigJson = {"model_type": "voxtral_realtime_encoder", **_AUDIO, **parts["audio"]}
        Fields(hears, f"{outer.where}, audio_config").choice("model_type", ("voxtral_realtime_encoder",))
        audio = stack.Config.from_hf(hears)
        text = vision_language.with_tie(text, vision_language.tied_head(outer, text, True))
        delayed = replace(text, delay=outer.integer(stack.DELAY, 6, low=0))
        object.__setattr__(delayed, "extra", text.extra)
        config = Config(text=delayed, audio=audio, group=outer.integer("downsample_factor", 4))
        outer.take("hidden_size", None)  # of the text
        object.__setattr__(config, "extra", vision_language.kept(outer, "audio_length_per_tok"))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        own: ConfigJson = {stack.DELAY: self.text.delay, "downsample_factor": self.group}
        text = self.text.to_hf()
        own["text_config"] = {name: text[name] for name in text if name not in ("architectures", stack.DELAY)}
        own |= {"projector_hidden_act": "gelu", "tie_word_embeddings": self.text.tie_word_embeddings}
        return vision_language.to_hf(self, "VoxtralRealtimeForConditionalGeneration", **own)


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, and the projector's weights [out, in]."""
    narrow, wide = config.audio.hidden_size * config.group, config.text.hidden_size
    projector = vision_language.mlp_leaves(narrow, wide, config.text.initializer_range, biases=False)
    return towers_spec(config) | {"projector": projector}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    names = vision_language.part_names(config, text="language_model.", audio="audio_tower.")
    return names | vision_language.mlp_names(False)


def project(params: Tree, x: Tensor, places: Tensor, /) -> Tensor:
    """Features [1, groups, text's D] of the encoder's hidden states x [rows, slots, D] after its last norm.

    places: of the tokens of each group, see `groups`.
    """
    return vision_language.mlp(params["projector"], gather_cells(x, places).flatten(1)[None])


def sound_places(segment_ids: Tensor, counts: Sequence[int]) -> Tensor:
    """places int64 [B, S, 2], (0, n): the n-th token of a document has the n-th feature of its clip, (-1, -1): none.

    segment_ids: [B, S]. counts: the features of each document's clip, row after row. Reads values: not for use in
    transforms. ValueError unless there are as many clips as documents.
    """
    rows = torch.arange(len(segment_ids), device=segment_ids.device)[:, None] * (segment_ids.max() + 1)
    keys = (segment_ids + rows)[segment_ids > 0]
    _, document, tokens = keys.unique_consecutive(return_inverse=True, return_counts=True)
    if len(tokens) != len(counts):
        raise ValueError(f"There are {len(tokens)} documents and {len(counts)} clips; each document needs one.")
    known = torch.tensor(counts, dtype=torch.int64, device=segment_ids.device)
    rank = torch.arange(len(document), device=segment_ids.device) - (tokens.cumsum(0) - tokens)[document]
    slot = ((known.cumsum(0) - known)[document] + rank).where(rank < known[document], -1)
    places = torch.full((*segment_ids.shape, 2), -1, device=segment_ids.device)
    places[segment_ids > 0] = torch.stack((slot.clamp(max=0), slot), -1)
    return places


def with_sound(
    params: Tree, inputs: Mapping[str, Any], features: Tensor, places: Tensor, *, config: Config
) -> dict[str, Any]:
    """The inputs that `prepare` made of config.text and token ids, with features [rows, slots, D] added to embeddings.

    places: int64 [B, S, 2], the (row, slot) of each token's feature, (-1, -1) for none; see `sound_places`.
    """
    x = embed_tokens(params["text"]["embed_tokens"], inputs["tokens"])
    return {**inputs, "tokens": add_features(x, features, places)}
