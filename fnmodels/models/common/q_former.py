"""The Q-Former (BLIP-2, arXiv 2301.12597): a few learned queries read many hidden states of an encoder.

Layers as BERT's, with norms after the sublayers: queries attend to each other, in some layers to the encoder, and go
through an MLP. The leaves are those of a projector between an encoder and a text model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.errors import ConfigError
from fnmodels.models.common.config_json import LAYERS_LIMIT, ConfigJson, Fields
from fnmodels.models.common.spec import Leaf, attention_leaves, layer_norm_leaves, plain_mlp_leaves, weight
from fnmodels.models.common.vision import weight_and_bias
from fnmodels.ops import ACTIVATIONS, layer_norm, plain_mlp, project_out
from fnmodels.ops.attention.select import attention
from fnmodels.ops.linear import linear
from fnmodels.ops.qkv import split_heads
from fnmodels.tree import Tree

_SIZES = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_SIZES |= {"cross_attention_frequency": 2, "encoder_hidden_size": 1408}
# Of training, and of the text that InstructBLIP's reads.
_IGNORED = ("attention_probs_dropout_prob", "hidden_dropout_prob", "max_position_embeddings", "vocab_size")
_PARTS = {"attention.o_proj": "attention.output.dense", "attention_norm": "attention.output.LayerNorm"}
_PARTS |= {
    f"attention.{n}_proj": f"attention.attention.{m}" for n, m in zip("qkv", ("query", "key", "value"), strict=True)
}
_PARTS |= {"mlp.up_proj": "intermediate_query.dense", "mlp.down_proj": "output_query.dense"}
_PARTS |= {"mlp_norm": "output_query.LayerNorm"}
_AXES = {name: f"query_{name}" for name in ("heads", "kv_heads", "mlp")}


@dataclass(frozen=True, kw_only=True)
class QFormer:
    """Sizes. Every `cross_attention_frequency`-th layer, from the first on, reads the encoder's hidden states."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    cross_attention_frequency: int
    encoder_hidden_size: int
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"The Q-Former's hidden_size {self.hidden_size} is no multiple of its {self.num_attention_heads} heads."
            )


def q_former_of(values: Any, where: str) -> QFormer:
    """From the object of a config.json, `where` in it; ConfigError or UnsupportedError with the field's name."""
    fields = Fields(values, where)
    fields.choice("model_type", ("blip_2_qformer",), "blip_2_qformer")
    fields.expect("is_encoder_decoder", False)
    fields.expect("use_qformer_text_input", False)
    fields.expect("position_embedding_type", "absolute")
    for name in ("tie_word_embeddings", "pad_token_id"):  # there are no tokens
        fields.take(name, None)
    deep = {"num_hidden_layers": LAYERS_LIMIT}
    sizes = {name: fields.integer(name, size, high=deep.get(name, 1 << 20)) for name, size in _SIZES.items()}
    config = QFormer(
        **sizes,
        hidden_act=fields.choice("hidden_act", tuple(ACTIVATIONS), "gelu"),
        layer_norm_eps=fields.number("layer_norm_eps", 1e-12),
        initializer_range=fields.number("initializer_range", 0.02, above=-1e-9),
    )
    fields.finish(_IGNORED)
    return config


def q_former_to_hf(config: QFormer) -> ConfigJson:
    """The object of a config.json."""
    names = (*_SIZES, "hidden_act", "layer_norm_eps", "initializer_range")
    return {"model_type": "blip_2_qformer"} | {name: getattr(config, name) for name in names}


def q_former_leaves(config: QFormer, queries: int) -> dict[str, Any]:
    """The parameters, with the learned queries [1, n, D]: weights [out, in]."""
    D, N, std = config.hidden_size, config.num_attention_heads, config.initializer_range
    attention_parts = attention_leaves(D, N, N, D // N, std=std, qkv_bias=True, o_bias=True)
    read = {f"{n}_proj": weight((D, config.encoder_hidden_size), ("projection", "embed"), std) for n in "kv"}
    layer: Tree = {"attention": attention_parts, **layer_norm_leaves("attention_norm", D, "embed")}
    layer |= {"mlp": plain_mlp_leaves(D, config.intermediate_size, std=std)} | layer_norm_leaves("mlp_norm", D, "embed")
    cross = layer | {"cross_attention": attention_parts | read} | layer_norm_leaves("cross_attention_norm", D, "embed")
    every = range(config.num_hidden_layers)
    return {
        "queries": Leaf((1, queries, D), torch.float32, ("one", "query", "embed"), weight((1,), ("one",), 1.0).init),
        **layer_norm_leaves("query_norm", D, "embed"),
        "blocks": [tree.map(_whole, layer if i % config.cross_attention_frequency else cross) for i in every],
    }


def _whole(leaf: Leaf) -> Leaf:
    """With axes that tensor parallelism leaves whole: every process computes all queries, outside of its regions."""
    return replace(leaf, axes=tuple(_AXES.get(axis, axis) for axis in leaf.axes))


def q_former_names(config: QFormer, at: str) -> dict[str, str]:
    """{path of a parameter: its name on disk} but that of the queries. at: the module's prefix on disk."""
    names = weight_and_bias("query_norm", f"{at}layernorm")
    for i in range(config.num_hidden_layers):
        parts = dict(_PARTS)
        if not i % config.cross_attention_frequency:
            attention_names = {path: name for path, name in _PARTS.items() if path.startswith("attention")}
            parts |= {
                f"cross_{path}": name.replace("attention.", "crossattention.", 1)
                for path, name in attention_names.items()
            }
        for path, name in parts.items():
            names |= weight_and_bias(f"blocks.{i}.{path}", f"{at}encoder.layer.{i}.{name}")
    return names


def q_former(weights: Tree, memory: Tensor, config: QFormer, seen: Tensor | None = None) -> Tensor:
    """[n, queries, D] of hidden states memory [n, K, E] of an encoder. seen: bool [n, K], what queries may read."""
    eps, count = config.layer_norm_eps, len(memory)
    x = weights["queries"].to(memory.dtype)
    x = layer_norm(x, weights["query_norm"], weights["query_norm_bias"], eps=eps).expand(count, -1, -1)
    everything = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=memory.device)
    masks = {"attention": everything, "cross_attention": everything if seen is None else seen[:, None, None]}
    for layer in weights["blocks"]:
        for name in ("attention", "cross_attention") if "cross_attention" in layer else ("attention",):
            read = x if name == "attention" else memory
            mixed = _attended(layer[name], x, read, masks[name], config)
            x = layer_norm(x + mixed, layer[f"{name}_norm"], layer[f"{name}_norm_bias"], eps=eps)
        fed = plain_mlp(layer["mlp"], x, activation=config.hidden_act)
        x = layer_norm(x + fed, layer["mlp_norm"], layer["mlp_norm_bias"], eps=eps)
    return x


def _attended(weights: Mapping[str, Tensor], x: Tensor, read: Tensor, mask: Tensor, config: QFormer) -> Tensor:
    """The output projection of attention of x [n, Q, D] to read [n, K, E]: [n, Q, D]."""
    head = config.hidden_size // config.num_attention_heads
    q, k, v = (
        split_heads(linear(t, weights[f"{name}_proj"], weights[f"{name}_bias"]), head)
        for name, t in (("q", x), ("k", read), ("v", read))
    )
    mask = mask.expand(len(x), 1, x.shape[1], read.shape[1])
    return project_out(weights, attention(q, k, v, mask, kernel="math", scale=head**-0.5))
