"""EuroBERT (arXiv 2503.05500): the Llama block whose tokens see their whole document."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.documents import Documents, pool
from fnmodels.models.common import decoder, encoder
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import embed, freqs_cis, kinds  # noqa: F401
from fnmodels.models.common.encoder import attention_masks  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.heads import head_fields
from fnmodels.models.common.spec import bias, embedding, layer_leaves, norm, usual_attention, usual_mlp, weight
from fnmodels.ops import apply_rotary, gated_mlp, project_out, project_qkv, rms_norm
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("eurobert",)
HEADS = ("masked_lm", "none", "classification", "tokens")
TRAITS = Traits(
    heads=HEADS,
    causal=False,
    resaved={r"model\.(.*)": r"\1"},  # a model without a head may be stored with the prefix of one that has it
)
POOLINGS = ("late", "bos", "mean")


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches. mlp_bias: of the MLPs and of a masked-LM head.

    classifier_pooling: a head with one result per document reads its first token ("bos"), the mean of its tokens, or
    of what the dense layer makes of them ("late").
    """

    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False
    classifier_pooling: str = "late"
    head: str = "masked_lm"
    num_labels: int = 0

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        config = Config(
            **decoder.base_fields(fields, MODEL_TYPES, theta=1e4, max_positions=8192),
            **head_fields(fields, "EuroBert", HEADS),
            **fields.plain(rms_norm_eps=1e-5, attention_bias=False, mlp_bias=False),
            classifier_pooling=fields.choice("classifier_pooling", POOLINGS, "late"),
        )
        tokens = ("bos_token", "eos_token", "mask_token", "mask_token_id", "pad_token")
        return encoder.finished(config, fields, tokens)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        names = ("rms_norm_eps", "attention_bias", "mlp_bias", "hidden_act", "classifier_pooling")
        return decoder.decoder_to_hf(self, "EuroBert", *names)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    V, D, std = config.vocab_size, config.hidden_size, config.initializer_range
    attention = usual_attention(config, qkv_bias=config.attention_bias, o_bias=config.attention_bias)
    layer = layer_leaves(D, attention, usual_mlp(config, biases=config.mlp_bias))
    layers = [layer for _ in config.layer_kinds]
    tree: Tree = {"embed_tokens": embedding(V, D, std), "layers": layers, "norm": norm(D, "embed")}
    if config.head == "none":
        return tree
    if config.head == "masked_lm":
        tree |= {} if config.tie_word_embeddings else {"lm_head": weight((V, D), ("vocab", "embed"), std)}
        return tree | ({"lm_head_bias": bias(V, "vocab")} if config.mlp_bias else {})
    head = {
        "score": weight((config.num_labels, D), ("label", "embed"), std),
        "score_bias": bias(config.num_labels, "label"),
    }
    if config.head == "classification":
        head |= {"dense": weight((D, D), ("features", "embed"), std), "dense_bias": bias(D, "embed")}
    return tree | {"head": head}


_HEAD = {"lm_head": "lm_head.weight", "lm_head_bias": "lm_head.bias"}
_HEAD |= {"head.score": "classifier.weight", "head.score_bias": "classifier.bias"}
_HEAD |= {"head.dense": "dense.weight", "head.dense_bias": "dense.bias"}


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}; a model without a head has no prefix there."""
    names = {path: _HEAD.get(path) or decoder.decoder_name(path) for path in flatten(spec(config))}
    return {path: name.removeprefix("model.") for path, name in names.items()} if config.head == "none" else names


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.rms_norm_eps, layer["attention"]
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and head: logits [B, S, V] or [B, S, labels]; without a head the hidden states [B, S, D]."""
    x = rms_norm(x, params["norm"], eps=config.rms_norm_eps)
    if config.head == "none":
        return x
    if config.head == "masked_lm":
        return linear(x, decoder.head(params, config), params.get("lm_head_bias"))
    return linear(x, params["head"]["score"], params["head"]["score_bias"])


def classify(params: Tree, x: Tensor, documents: Documents, /, *, config: Config) -> Tensor:
    """Logits [N, labels] of each document, see `classifier_pooling`."""
    weights, how = params["head"], config.classifier_pooling
    x = rms_norm(x, params["norm"], eps=config.rms_norm_eps)
    x = x if how == "late" else pool(x, documents, how="first" if how == "bos" else "mean")
    x = F.gelu(linear(x, weights["dense"], weights["dense_bias"]))
    x = pool(x, documents, how="mean") if how == "late" else x  # before the last layer, which is linear
    return linear(x, weights["score"], weights["score_bias"])


_BASE: ConfigJson = {
    "architectures": ["EuroBertForMaskedLM"],
    "model_type": "eurobert",
    "vocab_size": 128256,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 250000},
}
_WIDE = {"num_attention_heads": 18, "num_key_value_heads": 6}
PRESETS = {
    "eurobert-210m": _BASE,
    "eurobert-610m": _BASE | _WIDE | {"hidden_size": 1152, "intermediate_size": 4096, "num_hidden_layers": 26},
    "eurobert-2.1b": _BASE | _WIDE | {"hidden_size": 2304, "intermediate_size": 6144, "num_hidden_layers": 32},
}
