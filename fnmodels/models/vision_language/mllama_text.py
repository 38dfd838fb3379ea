"""The text of Llama 3.2 Vision (Meta, 2024): Llama's layers, and between them layers that attend to images alone.

A layer of the kind "cross_nope" reads inputs["memory"], features of images, where inputs["memory_mask"] lets a token
see them: `mllama.image_memory` makes both. It leaves a token that sees no image as it is, so a text without images is
that of a Llama without these layers.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import decoder_leaves, head_norms, layer_leaves, norm, usual_attention, usual_mlp
from fnmodels.models.encoder_decoder.cross_attention import attend_to_memory, keys_of_memory
from fnmodels.models.encoder_decoder.cross_attention import optional_memory as shared  # noqa: F401
from fnmodels.ops import apply_rotary, gated_mlp, project_out, project_qkv, rms_norm
from fnmodels.tree import Tree

MODEL_TYPES = ("mllama_text_model",)
TRAITS = Traits(kinds=("full", "cross_nope"), heads=("lm", "none"), dropout={})
_IMAGE_TOKENS = 8  # rows of the embedding that the head has no logits of
_NAMES = {".cross_attention.": ".cross_attn.", "cross_attention_gate": "cross_attn_attn_gate"}
_NAMES |= {"mlp_gate": "cross_attn_mlp_gate"}


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches."""

    rms_norm_eps: float = 1e-5

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = decoder.base_fields(fields, MODEL_TYPES, theta=5e5, max_positions=131072, kv_heads=8)
        fields.expect("tie_word_embeddings", False)
        fields.expect("dropout", 0.0)
        layers, default = usual["num_hidden_layers"], [3, 8, 13, 18, 23, 28, 33, 38]
        crossed = fields.take("cross_attention_layers", default)
        if not isinstance(crossed, list) or not all(type(i) is int and 0 <= i < layers for i in crossed):
            raise ConfigError(
                f"{fields.where}: 'cross_attention_layers' is {shown(crossed)}; it must list some of {layers} layers."
            )
        config = Config(
            **usual,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
            layer_kinds=tuple("cross_nope" if i in crossed else "full" for i in range(layers)),
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        crossed = [i for i, kind in enumerate(self.layer_kinds) if kind == "cross_nope"]
        names = ("rms_norm_eps", "hidden_act")
        return decoder.decoder_to_hf(self, "MllamaForCausalLM", *names, cross_attention_layers=crossed)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, attention = config.hidden_size, usual_attention(config)
    plain = layer_leaves(D, attention, usual_mlp(config))
    cross = {("cross_attention" if name == "attention" else name): leaf for name, leaf in plain.items()}
    cross["cross_attention"] = attention | head_norms(config)
    cross |= {"cross_attention_gate": norm(1, "one", 0.0), "mlp_gate": norm(1, "one", 0.0)}
    tree = decoder_leaves(config, [cross if kind == "cross_nope" else plain for kind in config.layer_kinds])
    table = tree["embed_tokens"]
    return tree | {"embed_tokens": replace(table, shape=(config.vocab_size + _IMAGE_TOKENS, D))}


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    names = {path: str(name) for path, name in decoder.hf_names(config).items()}
    for ours, theirs in _NAMES.items():
        names = {path: name.replace(ours, theirs) for path, name in names.items()}
    return {path: name.replace("_gate.weight", "_gate") for path, name in names.items()}


def memory_keys(layer: Tree, memory: Tensor, /, *, config: Config) -> tuple[Tensor, Tensor]:
    """(k, v), each [B, K, N, H], of features [B, K, D] for a cache, of a layer of the kind "cross_nope"."""
    weights = layer["cross_attention"]
    return keys_of_memory(weights, memory, head_dim=config.head_dim, norm_eps=config.rms_norm_eps)


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights, scale = config.rms_norm_eps, layer.get("attention"), config.head_dim**-0.5
    if weights is None:
        return _crossed(layer, x, ctx, config)
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    mixed = ctx.attend(apply_rotary(q, freqs), apply_rotary(k, freqs), v, mask, scale=scale)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


def _crossed(layer: Tree, x: Tensor, ctx: Context, config: Config) -> Tensor:
    """A layer that attends to images: x [B, S, D] -> x, unchanged where a token sees none."""
    seen = ctx.shared("memory_mask")
    if seen is None:
        return x
    eps, weights, head = config.rms_norm_eps, layer["cross_attention"], config.head_dim
    normed = rms_norm(x, layer["input_layernorm"], eps=eps)
    mixed = attend_to_memory(weights, normed, ctx, head_dim=head, scale=head**-0.5, norm_eps=eps)
    x = ctx.tap("middle", x + ctx.tap("cross_attention", layer["cross_attention_gate"].tanh() * mixed))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    fed = gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap)
    fed = fed.where(seen.any(-1)[:, 0, :, None], 0)
    return x + ctx.tap("mlp", layer["mlp_gate"].tanh() * fed)
