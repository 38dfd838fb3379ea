"""The encoder of GLM-ASR (zai-org/GLM-ASR-Nano-2512): Whisper's convolutions before layers with a rotary embedding.

`hidden` returns the hidden states [B, S, D] before the last LayerNorm. Clips may have any length.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.audio import REACH
from fnmodels.inputs.mask import Create, MaskLike, masks_of
from fnmodels.inputs.rules import Everything
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import Leaf, Normal, bias
from fnmodels.models.common.vision import block, kinds, last_norm, unembed, vision_layer, weight_and_bias  # noqa: F401
from fnmodels.models.encoder_decoder.whisper import convolved
from fnmodels.ops.rotary import Rope, rotary_table
from fnmodels.tree import Tree, flatten

TRAITS = Traits(heads=("none",), causal=False)
_SIZES = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
_PARTS = {"post_attention_layernorm": "post_attention_layernorm", "attention": "self_attn", "up": "fc1", "down": "fc2"}


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes. num_mel_bins: of the frames. layer_norm_eps: of all norms, no field of the file."""

    rope: Rope = Rope(partial=0.5)  # noqa: RUF009 - frozen
    hidden_act: str = "gelu"
    num_mel_bins: int = 128
    layer_norm_eps: float = 1e-5

    @property
    def mlp_act(self) -> str:
        """The activation of the MLP."""
        return self.hidden_act

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From an `audio_config`; raises ConfigError or UnsupportedError with the field's name."""
        known = {**_SIZES, **values, "vocab_size": 1, "tie_word_embeddings": False}  # an encoder has no tokens
        fields = Fields(known, "config.json, audio_config")
        usual = decoder.base_fields(
            fields, ("glmasr_encoder",), theta=1e4, partial=0.5, max_positions=1500, activation="gelu"
        )
        fields.expect("num_key_value_heads", usual["num_attention_heads"], None)
        config = Config(**usual, head="none", num_mel_bins=fields.integer("num_mel_bins", 128))
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """An `audio_config`."""
        out = decoder.decoder_to_hf(self, "GlmAsrEncoder", "hidden_act", "num_mel_bins")
        return {name: value for name, value in out.items() if name not in ("vocab_size", "tie_word_embeddings")}


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of convolutions [out, in, taps]."""
    D, std = config.hidden_size, config.initializer_range
    tree: Tree = {"layers": [vision_layer(config, key_bias=False)] * config.num_hidden_layers} | last_norm(config)
    for name, width, axis in (("conv1", config.num_mel_bins, "channel"), ("conv2", D, "inner_channel")):
        tree[f"{name}_proj"] = Leaf((D, width, 3), torch.float32, ("embed", axis, "kernel"), Normal(std))
        tree[f"{name}_bias"] = bias(D, "embed")
    return tree


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}, without the prefix of the model that it is part of."""
    names: dict[str, str] = {}
    for path in flatten(spec(config)):
        *above, last = path.removesuffix("_bias").removesuffix("_proj").split(".")
        last = f"{last}_proj" if above[-1:] == ["attention"] else _PARTS.get(last, last)
        where = [_PARTS.get(one, one) for one in above]
        names[path] = ".".join((*where, last, "bias" if path.endswith("_bias") else "weight"))
    return names


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{"full": mask}: every token sees all tokens of its clip; both arguments [B, S]."""
    return masks_of({"full": Everything()}, positions, segment_ids, create=create)


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{"full": fp32 table [B, S, R/2, 2]} of `config.rope`."""
    return {"full": rotary_table(config.rope, config.head_dim, positions, length)}


def example_inputs(config: Config, positions: Tensor, /) -> dict[str, Tensor]:
    """Inputs of rows [B, S]; see `family.function_of`."""
    frames = torch.zeros(*positions.shape, REACH * config.num_mel_bins, device=positions.device)
    return {"tokens": frames, "positions": positions}


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: both convolutions of frames [B, S, 5 bins], each for its token."""
    return convolved(params, inputs, config.num_mel_bins)
