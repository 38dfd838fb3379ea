"""nanochat (Karpathy, 2025): RMSNorms without weights, also after the embedding, and of queries and keys.

A squared ReLU MLP without a gate, rotary embedding that turns the other way, and soft-capped logits.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, freqs_cis, kinds  # noqa: F401
from fnmodels.models.common.spec import decoder_leaves, plain_mlp_leaves, usual_attention
from fnmodels.ops import apply_rotary, embed_tokens, plain_mlp, project_out, project_qkv, rms_norm
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.tree import Tree

MODEL_TYPES = ("nanochat",)


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches."""

    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    final_softcap: float | None = 15.0
    hidden_act: str = "relu2"
    max_position_embeddings: int = 2048

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        config = Config(
            **decoder.base_fields(fields, MODEL_TYPES, theta=1e4, max_positions=2048, activation="relu2"),
            **fields.plain(rms_norm_eps=1e-6, attention_bias=False),
            final_softcap=decoder.softcap(fields, "final_logit_softcapping", 15.0),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        names = ("rms_norm_eps", "attention_bias", "hidden_act")
        own = {"final_logit_softcapping": self.final_softcap}
        return decoder.decoder_to_hf(self, "NanoChatForCausalLM", *names, **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    on, std = config.attention_bias, config.initializer_range
    mlp = plain_mlp_leaves(config.hidden_size, config.intermediate_size, std=std, biases=False)
    layer = {"attention": usual_attention(config, qkv_bias=on, o_bias=on), "mlp": mlp}
    tree = decoder_leaves(config, [layer for _ in config.layer_kinds])
    return {name: leaf for name, leaf in tree.items() if name != "norm"}


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    names = decoder.hf_names(config)
    return {path: n.replace(".up_proj.", ".fc1.").replace(".down_proj.", ".fc2.") for path, n in names.items()}


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]: token or given embeddings, normed, and zeros for padding."""
    x = embed_tokens(params["embed_tokens"], inputs)
    x = decoder.without_padding(x, inputs)
    return rms_norm(x, None, eps=config.rms_norm_eps)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights, eps = layer["attention"], config.rms_norm_eps
    q, k, v = project_qkv(weights, rms_norm(x, None, eps=eps), head_dim=config.head_dim)
    # Halves that are exchanged turn the other way; the scores do not depend on the order of dimensions.
    q, k = (rms_norm(apply_rotary(t.roll(config.head_dim // 2, -1), freqs), None, eps=eps) for t in (q, k))
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    fed = plain_mlp(layer["mlp"], rms_norm(x, None, eps=eps), activation=config.hidden_act, tap=ctx.tap)
    return x + ctx.tap("mlp", fed)


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm, output head and soft-cap if configured: logits [B, S, V]."""
    logits = decoder.project(params, rms_norm(x, None, eps=config.rms_norm_eps), config)
    cap = config.final_softcap
    return cap * elementwise(torch.tanh, logits / cap) if cap is not None and decoder.is_lm(config) else logits


PRESETS = {
    "nanochat-d20": {"model_type": "nanochat", "vocab_size": 65536, "hidden_size": 1280, "intermediate_size": 5120}
    | {"num_hidden_layers": 20, "num_attention_heads": 10, "num_key_value_heads": 10},
    "nanochat-d32": {"model_type": "nanochat", "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 8192}
    | {"num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 16},
}
