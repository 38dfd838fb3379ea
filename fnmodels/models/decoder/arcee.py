"""Arcee's AFM and Apertus (arXiv 2509.14233): the Llama block with an MLP without a gate.

AFM's activation is the squared ReLU. Apertus has query and key norms and xIELU, an activation with trainable parameters
(arXiv 2411.13010).
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.rope_config import rope_from_hf
from fnmodels.models.common.spec import (
    decoder_leaves,
    head_norms,
    layer_leaves,
    plain_mlp_leaves,
    usual_attention,
    xielu_leaves,
)
from fnmodels.ops import apply_rotary, project_out, project_qkv, rms_norm
from fnmodels.ops.mlp import ACTIVATIONS, plain_mlp, xielu_mlp
from fnmodels.tree import Tree

MODEL_TYPES = ("arcee", "apertus")

_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 8192, "rope_theta": 12e6}  # Apertus' default rope


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches. xielu: the activation is xIELU, and `hidden_act` is not used."""

    hidden_act: str = "relu2"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    xielu: bool = False
    max_position_embeddings: int = 65536

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json of any of MODEL_TYPES; raises ConfigError or UnsupportedError with the field's name."""
        apertus = values.get("model_type") == "apertus"
        if apertus and values.get("rope_parameters") is None and values.get("rope_scaling") is None:
            Fields(values).expect("rope_theta", _LLAMA3["rope_theta"])  # transformers reads no other with this default
            values = values | {"rope_parameters": _LLAMA3}
        fields = Fields(values)
        if apertus:
            for name, value in {"hidden_act": "xielu", "mlp_bias": False, "qk_norm": True, "post_norm": False}.items():
                fields.expect(name, value)
        sizes = decoder.decoder_sizes(fields, max_positions=65536 if apertus else 4096, tied=False)
        where = {"head_dim": sizes["head_dim"], "max_positions": sizes["max_position_embeddings"]}
        config = Config(
            **sizes,
            rope=rope_from_hf(fields, theta=12e6 if apertus else 1e4, **where),
            hidden_act="relu2" if apertus else fields.choice("hidden_act", tuple(ACTIVATIONS), "relu2"),
            **fields.plain(rms_norm_eps=1e-5, attention_bias=False, mlp_bias=False),
            qk_norm=apertus,
            xielu=apertus,
            model_type=fields.choice("model_type", MODEL_TYPES),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect. Raises ConfigError where `model_type` has no word for this model."""
        names, act = ("rms_norm_eps", "attention_bias", "mlp_bias"), "xielu" if self.xielu else self.hidden_act
        return decoder.decoder_to_hf(self, f"{self.model_type.title()}ForCausalLM", *names, hidden_act=act)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, std, bias = config.hidden_size, config.initializer_range, config.attention_bias
    attention = usual_attention(config, qkv_bias=bias, o_bias=bias) | (head_norms(config) if config.qk_norm else {})
    mlp = plain_mlp_leaves(D, config.intermediate_size, std=std, biases=config.mlp_bias)
    layer = layer_leaves(D, attention, mlp | (xielu_leaves() if config.xielu else {}))
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    names = decoder.hf_names(config)
    if not config.xielu:
        return names
    for path, name in names.items():
        name = name.replace(".input_layernorm.", ".attention_layernorm.")
        names[path] = name.replace(".post_attention_layernorm.", ".feedforward_layernorm.")
        if ".mlp.xielu_" in path:
            names[path] = "model." + path.replace(".xielu_", ".act_fn.")
    return names


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights, mlp = config.rms_norm_eps, layer["attention"], layer["mlp"]
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    if config.qk_norm:
        q, k = rms_norm(q, weights["q_norm"], eps=eps), rms_norm(k, weights["k_norm"], eps=eps)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    fed = (
        xielu_mlp(mlp, normed, tap=ctx.tap)
        if config.xielu
        else plain_mlp(mlp, normed, activation=config.hidden_act, tap=ctx.tap)
    )
    return x + ctx.tap("mlp", fed)


_AFM = {"vocab_size": 128004, "max_position_embeddings": 65536, "head_dim": 128}
_YARN = {"rope_type": "yarn", "factor": 20.0, "original_max_position_embeddings": 4096, "mscale": 1.0}
_APERTUS = {"model_type": "apertus", "num_key_value_heads": 8, "vocab_size": 131072, "rope_parameters": _LLAMA3}
PRESETS: dict[str, ConfigJson] = {
    "afm-4.5b": _AFM
    | {"model_type": "arcee", "hidden_size": 2560, "intermediate_size": 18432, "num_hidden_layers": 36}
    | {"num_attention_heads": 20, "num_key_value_heads": 4, "rope_parameters": _YARN | {"rope_theta": 1e4}},
    "apertus-8b": _APERTUS
    | {"hidden_size": 4096, "intermediate_size": 21504, "num_hidden_layers": 32, "num_attention_heads": 32},
    "apertus-70b": _APERTUS
    | {"hidden_size": 8192, "intermediate_size": 43008, "num_hidden_layers": 80, "num_attention_heads": 64},
}
