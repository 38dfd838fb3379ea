"""Bamba (IBM, 2024): Mamba-2 mixers in most layers and attention in a few, each followed by a gated MLP."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.mamba import Mamba, hybrid_names, mamba, mamba_from_hf, mamba_leaves, mamba_to_hf
from fnmodels.models.common.spec import decoder_leaves, layer_leaves, usual_attention, usual_mlp
from fnmodels.models.common.storage import Stored
from fnmodels.ops import Rope, apply_rotary, gated_mlp, project_out, project_qkv, rms_norm
from fnmodels.tree import Tree

MODEL_TYPES = ("bamba",)
TRAITS = Traits(kinds=("linear", "full"))

PRESETS = {
    "bamba-9b": {
        "model_type": "bamba",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "mamba_d_state": 128,
        "attn_layer_indices": [9, 18, 27],
    }
}


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches; half of each head rotates."""

    mixer: Mamba
    rope: Rope = Rope(partial=0.5)  # noqa: RUF009 - frozen
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False
    model_type: str = field(default="bamba", compare=False)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = decoder.base_fields(fields, MODEL_TYPES, theta=1e4, partial=0.5, max_positions=262144, kv_heads=8)
        fields.expect("attn_rotary_emb", usual["rope"].dim(usual["head_dim"]))  # the same, in dimensions
        layers, attends = usual["num_hidden_layers"], fields.take("attn_layer_indices", [])
        if not isinstance(attends, list) or any(type(i) is not int or not 0 <= i < layers for i in attends):
            raise ConfigError(
                f"{fields.where}: 'attn_layer_indices' is {shown(attends)}, but must list layers below {layers}."
            )
        config = Config(
            **usual,
            mixer=mamba_from_hf(fields, fields.integer("mamba_expand", 2) * usual["hidden_size"]),
            **fields.plain(rms_norm_eps=1e-5, attention_bias=False, mlp_bias=False),
            layer_kinds=tuple("full" if i in attends else "linear" for i in range(layers)),
        )
        # settings of kernels and of training, and what no code reads
        unused = ("num_logits_to_keep", "use_mamba_kernels", "mamba_dt_rank", "z_loss_coefficient")
        return decoder.finished(config, fields, ignored=unused)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        attends = [i for i, kind in enumerate(self.layer_kinds) if kind == "full"]
        own = mamba_to_hf(self.mixer) | {"mamba_expand": self.mixer.rows["x"] // self.hidden_size}
        names = ("rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias")
        return decoder.decoder_to_hf(self, "BambaForCausalLM", *names, attn_layer_indices=attends, **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, biased = config.hidden_size, config.attention_bias
    attention = usual_attention(config, qkv_bias=biased, o_bias=biased)
    mixers = {"full": attention, "linear": mamba_leaves(D, config.mixer, std=config.initializer_range)}
    mlp = usual_mlp(config, biases=config.mlp_bias)
    return decoder_leaves(config, [layer_leaves(D, mixers[kind], mlp) for kind in config.layer_kinds])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}."""
    recurrent = [i for i, kind in enumerate(config.layer_kinds) if kind == "linear"]
    return hybrid_names(config, {f"layers.{i}.attention": f"model.layers.{i}.mamba" for i in recurrent})


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights, eps, act = layer["attention"], config.rms_norm_eps, config.hidden_act
    normed = rms_norm(x, layer["input_layernorm"], eps=eps)
    if kind == "linear":
        mixed = mamba(weights, normed, mask, config.mixer, ctx, eps=eps, activation=act)
    else:
        q, k, v = project_qkv(weights, normed, head_dim=config.head_dim)
        q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
        mixed = project_out(weights, ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5))
    x = ctx.tap("middle", x + ctx.tap("attention", mixed))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=act, tap=ctx.tap))
