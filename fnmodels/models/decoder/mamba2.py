"""Mamba (arXiv 2312.00752), Mamba 2 (arXiv 2405.21060) and Falcon Mamba (arXiv 2410.05355).

Each layer is a norm and a state-space mixer; there is no attention and no MLP.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.order import Segments
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import LAYERS_LIMIT, ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, kinds  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.heads import check_head, decoder_head_to_hf
from fnmodels.models.common.mamba import (
    Mamba,
    Selective,
    mamba,
    mamba_from_hf,
    mamba_leaves,
    mamba_names,
    mamba_to_hf,
    rank_of,
    selective,
    selective_leaves,
    selective_names,
)
from fnmodels.models.common.spec import decoder_leaves, norm
from fnmodels.models.common.storage import Stored
from fnmodels.ops import ACTIVATIONS, embed_tokens, no_rotation, rms_norm, rms_norm_fp32_weight, upcast
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("mamba2", "mamba", "falcon_mamba")
KINDS = ("linear",)
TRAITS = Traits(kinds=KINDS)

_PRESET = {"model_type": "mamba2", "vocab_size": 50288, "n_groups": 1, "tie_word_embeddings": True}
PRESETS = {
    "mamba2-130m": _PRESET | {"hidden_size": 768, "num_hidden_layers": 24, "num_heads": 24},
    "mamba2-2.7b": _PRESET | {"hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80},
    "mamba-codestral-7b": {
        "model_type": "mamba2",
        "vocab_size": 32768,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "num_heads": 128,
    },
    "falcon-mamba-7b": {"model_type": "falcon_mamba", "vocab_size": 65024, "hidden_size": 4096}
    | {"num_hidden_layers": 64, "tie_word_embeddings": False},
    "mamba-2.8b": {"model_type": "mamba", "vocab_size": 50280, "hidden_size": 2560, "num_hidden_layers": 64},
    "mamba-130m": {"model_type": "mamba", "vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24},
}
_MIXER: dict[str, tuple[str, Any]] = {
    "heads": ("num_heads", 128),
    "head_dim": ("head_dim", 64),
    "groups": ("n_groups", 8),
    "state": ("state_size", 128),
    "kernel": ("conv_kernel", 4),
    "conv_bias": ("use_conv_bias", True),
    "proj_bias": ("use_bias", False),
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes and switches. residual_in_fp32: the residual stream is fp32 or wider in a narrower model too."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    mixer: Mamba | Selective
    layer_norm_epsilon: float = 1e-5
    hidden_act: str = "silu"
    residual_in_fp32: bool = True
    tie_word_embeddings: bool = False
    initializer_range: float = 0.1
    head: str = "lm"  # or "classification", see `common.heads`
    num_labels: int = 0
    problem_type: str = ""
    # kept for saving only
    model_type: str = field(default="mamba2", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_head(self)
        inner = self.num_attention_heads * self.head_dim
        if self.hidden_size < 1 or self.num_hidden_layers < 1 or inner % self.hidden_size:
            raise ConfigError(
                f"{self.num_attention_heads} heads of {self.head_dim} are not a multiple of the hidden_size "
                f"{self.hidden_size}."
            )

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """One kind for all layers."""
        return KINDS * self.num_hidden_layers

    @property
    def num_attention_heads(self) -> int:
        """The heads of the mixer; its channels in Mamba 1."""
        return self.mixer.heads if isinstance(self.mixer, Mamba) else self.mixer.inner

    @property
    def head_dim(self) -> int:
        """The width of a head of the mixer."""
        return self.mixer.head_dim if isinstance(self.mixer, Mamba) else 1

    @property
    def max_position_embeddings(self) -> int:
        """A state has no positions and no greatest length: the longest text that anything asks for."""
        return 1 << 20

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type, width = fields.choice("model_type", MODEL_TYPES), fields.integer("hidden_size")
        fields.expect("is_encoder_decoder", False)
        fields.expect("rms_norm", True)
        second = model_type == "mamba2"
        config = Config(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=width,
            num_hidden_layers=fields.integer("num_hidden_layers", 64 if second else 32, high=LAYERS_LIMIT),
            mixer=mamba_from_hf(fields, fields.integer("expand", 2) * width, _MIXER) if second else _selective(fields),
            **fields.plain(layer_norm_epsilon=1e-5, residual_in_fp32=True, tie_word_embeddings=not second),
            hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "silu"),
            initializer_range=fields.number("initializer_range", 0.1, above=-1e-9),
            model_type=model_type,
        )
        return decoder.finished(config, fields, ignored=_UNUSED)

    def to_hf(self) -> ConfigJson:
        """A config.json under Mamba's own names. Raises ConfigError where `model_type` has no word for this model."""
        names = ["vocab_size", "hidden_size", "num_hidden_layers", "layer_norm_epsilon", "hidden_act", "model_type"]
        names += ["residual_in_fp32", "tie_word_embeddings", "initializer_range"]
        own: ConfigJson = {"expand": self.num_attention_heads * self.head_dim // self.hidden_size}
        own |= {name: getattr(self, name) for name in names}
        if isinstance(self.mixer, Mamba):
            own |= mamba_to_hf(self.mixer, _MIXER)
        else:
            own |= {name: getattr(self.mixer, field) for name, field in _SELECTIVE.items()}
            own |= {"mixer_rms_eps": self.mixer.norm_eps} if self.mixer.norm != "none" else {}
        kept = {name: json.loads(value) for name, value in self.extra}
        head = decoder_head_to_hf(self, _ARCHITECTURES[self.model_type], kept)
        return decoder.expressible(self, kept | head | own)


_ARCHITECTURES = {"mamba2": "Mamba2ForCausalLM", "mamba": "MambaForCausalLM", "falcon_mamba": "FalconMambaForCausalLM"}
_SELECTIVE = {"state_size": "state", "time_step_rank": "rank", "conv_kernel": "kernel", "use_conv_bias": "conv_bias"}
_SELECTIVE |= {"use_bias": "proj_bias"}


def _selective(fields: Fields) -> Selective:
    """The mixer of Mamba 1, or of Falcon Mamba, which normalizes dt, B and C."""
    width = fields.integer("hidden_size")
    inner, falcon = fields.integer("expand", 2) * width, fields.values.get("model_type") == "falcon_mamba"
    for name in ("intermediate_size", "d_inner"):
        fields.expect(name, inner)
    fields.expect("ssm_cfg", {})
    rank = fields.take("time_step_rank", "auto")
    return Selective(
        inner=inner,
        state=fields.integer("state_size", 16),
        rank=rank_of(rank, width) if rank == "auto" else fields.integer("time_step_rank"),
        kernel=fields.integer("conv_kernel", 4),
        norm="weightless" if falcon else "none",
        norm_eps=fields.number("mixer_rms_eps", 1e-6) if falcon else 1e-6,
        conv_bias=fields.boolean("use_conv_bias", True),
        proj_bias=fields.boolean("use_bias", False),
    )


# Settings of the initialization, and what older files repeat.
_UNUSED = (
    *("rescale_prenorm_residual", "time_step_rank", "time_step_min", "time_step_max", "time_step_floor"),
    *("time_step_init_scheme", "time_step_scale", "norm_before_gate", "intermediate_size"),
    *("use_mambapy", "use_falcon_mambapy", "use_associative_scan", "fused_add_norm"),  # ways to compute
)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, std, mixer = config.hidden_size, config.initializer_range, config.mixer
    leaves = mamba_leaves(D, mixer, std=std) if isinstance(mixer, Mamba) else selective_leaves(D, mixer, std=std)
    layer = {"input_layernorm": norm(D, "embed"), "attention": leaves}
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}."""
    names: dict[str, Stored] = {"embed_tokens": "backbone.embeddings.weight"}
    for i in range(config.num_hidden_layers):
        names[f"layers.{i}.input_layernorm"] = f"backbone.layers.{i}.norm.weight"
        where, there = f"layers.{i}.attention", f"backbone.layers.{i}.mixer"
        mixer = config.mixer
        names |= mamba_names(mixer, where, there) if isinstance(mixer, Mamba) else selective_names(mixer, where, there)
    ends = {"norm": "backbone.norm_f.weight", "lm_head": "lm_head.weight", "score": "score.weight"}
    return names | {path: ends[path] for path in flatten(spec(config)) if path in ends}


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """Nothing rotates."""
    return {"linear": no_rotation(positions)}


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """Token embeddings [B, S, D], the beginning of the residual stream."""
    x = embed_tokens(params["embed_tokens"], inputs)
    return upcast(x) if config.residual_in_fp32 else x


@with_context
def block(
    layer: Tree, x: Tensor, mask: Segments, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context
) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weight, eps, mixer = layer["input_layernorm"], config.layer_norm_epsilon, config.mixer
    normed = rms_norm(x.to(weight.dtype), weight, eps=eps)
    if isinstance(mixer, Mamba):
        mixed = mamba(layer["attention"], normed, mask, mixer, ctx, eps=eps, activation=config.hidden_act)
    else:
        mixed = selective(layer["attention"], normed, mask, mixer, ctx, activation=config.hidden_act)
    return x + ctx.tap("attention", mixed)


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and output head: logits [B, S, V]."""
    norm = params["norm"]
    normed = rms_norm_fp32_weight(x, norm, eps=config.layer_norm_epsilon).to(norm.dtype)
    return decoder.project(params, normed, config)
