"""A.X K2 (SK Telecom): DeepSeek V3.2 with gated norms and a gate for what attention returns.

A pre-norm decoder with multi-head latent attention, in which each query attends to the keys that a lightning indexer
chooses (`deepseek_v32.py`), and a mixture of experts after the first layers. Queries and the gate of their heads are
one projection of the latent, with and without its norm. A norm before attention or experts multiplies its output y by
sigmoid(up(silu(down(y)))) of low rank.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder, mla
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.layers import indexed
from fnmodels.models.common.rope_config import rope_from_hf
from fnmodels.models.common.spec import decoder_leaves, latent_attention_leaves, layer_leaves, weight
from fnmodels.models.common.storage import Stored
from fnmodels.ops import (
    apply_rotary,
    apply_rotary_interleaved,
    latent_scale,
    project_out,
    rms_norm,
    split_heads,
    upcast,
)
from fnmodels.ops.indexer import Indexer
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.linear import linear
from fnmodels.ops.mla import LATENT_EPS, rotated_queries
from fnmodels.ops.moe.router import RouterDtypes, choose, sigmoid_top_k
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("axk2",)
ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")
TRAITS = Traits(
    kinds=("indexed", "indexed_moe"),
    routed=True,
    router=ROUTER,
    in_memory={
        r"layernorm\.W_down\.": "layernorm.mlp.fc1.",
        r"layernorm\.W_up\.": "layernorm.mlp.fc2.",
        r"\.self_attn\.q_b_proj\.": ".self_attn.q_gate_proj.",
    },
)
_DEFAULTS: dict[str, Any] = {"vocab_size": 163840, "hidden_size": 2048, "intermediate_size": 5120}
_DEFAULTS |= {"moe_intermediate_size": 512, "num_hidden_layers": 48, "num_attention_heads": 32, "n_shared_experts": 1}
_DEFAULTS |= {"n_routed_experts": 128, "num_experts_per_tok": 8, "kv_lora_rank": 128, "qk_rope_head_dim": 32}
_DEFAULTS |= {"v_head_dim": 64, "num_nextn_predict_layers": 0}


@dataclass(frozen=True, kw_only=True)
class Config(indexed.IndexedConfig):
    """Sizes and switches. gated_norm_rank: of the gates of norms."""

    gated_norm_rank: int
    num_nextn_predict_layers: int = field(default=0, init=False, compare=False)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(_DEFAULTS | {**values})
        fields.choice("model_type", MODEL_TYPES)
        grouped = {name: values.get(name) for name in ("n_group", "topk_group")}
        if None in grouped.values():  # null: all experts are one group
            if any(grouped.values()):
                raise ConfigError(f"{fields.where}: n_group and topk_group are {grouped}; both or none must be null.")
            fields = Fields({**fields.values} | dict.fromkeys(grouped, 1), fields.where)
        sizes = mla.latent_from_hf(fields, max_positions=131072, kv_heads=32, q_rank=384, nope_dim=64, rope_head=True)
        for name, value in (("rope_interleave", True), ("indexer_rope_interleave", False), ("moe_layer_freq", 1)):
            fields.expect(name, value)
        fields.expect("num_nextn_predict_layers", 0)
        layers, width = sizes["num_hidden_layers"], sizes["qk_rope_head_dim"]
        del sizes["rope_interleave"]
        experts = mixture.grouped_from_hf(fields, layers, dense=1, scale=2.5)
        del experts["num_nextn_predict_layers"]
        indexed.per_layer(fields, "layer_types", indexed.ATTENTION, ["indexed_attention"] * layers)
        routed = mixture.routed_layers(fields, layers)
        experts["layer_kinds"] = tuple("indexed_moe" if one else "indexed" for one in routed)
        config = Config(
            **sizes | experts | {"q_lora_rank": fields.integer("q_lora_rank", 384)},
            **fields.plain(index_n_heads=16, index_head_dim=128, index_topk=2048, gated_norm_rank=16),
            rope=rope_from_hf(fields, head_dim=width, max_positions=sizes["max_position_embeddings"], theta=1e4),
        )
        return decoder.finished(config, fields, ignored=("ep_size", "aux_loss_alpha", "seq_aux"))

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        own = mixture.grouped_to_hf(self) | {"mlp_layer_types": mixture.mlp_types(parsed(self.layer_kinds))}
        own |= {"n_group": None, "topk_group": None} if self.n_group == 1 else {}
        del own["first_k_dense_replace"]
        names = (*mla.NAMES, "index_n_heads", "index_head_dim", "index_topk", "gated_norm_rank")
        return decoder.decoder_to_hf(self, "AXK2ForCausalLM", *names, **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]. q_b_proj: queries and gate of a head in turn, of both forms of the latent."""
    D, std, rank = config.hidden_size, config.initializer_range, config.gated_norm_rank
    rows = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    shape = (config.num_attention_heads * rows, 2 * config.q_lora_rank)
    attention: Tree = latent_attention_leaves(config) | {"indexer": indexed.indexer_leaves(config)}
    attention |= {"q_b_proj": weight(shape, ("heads", "latent"), std, unit=rows)}
    gate = {
        "down_proj": weight((rank, D), ("norm_gate", "embed"), std),
        "up_proj": weight((D, rank), ("embed", "norm_gate"), std),
    }

    def layer(kind: LayerKind) -> Tree:
        gates = {"input_gate": gate} | ({"post_attention_gate": gate} if kind.routed else {})
        return layer_leaves(D, attention, mixture.grouped_leaves(config, kind, selection_bias=True)) | gates

    return decoder_leaves(config, [layer(kind) for kind in parsed(config.layer_kinds)])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert."""
    paths = flatten(spec(config))
    names = indexed.indexer_names(mla.latent_names(mixture.grouped_names(config, paths)))
    for path in paths:
        if "_gate." in path:
            where, _, last = path.rpartition("_gate.")
            names[path] = f"model.{where}_layernorm.{'W_down' if last == 'down_proj' else 'W_up'}.weight"
            names[f"{where}_layernorm"] = f"model.{where}_layernorm.norm.weight"
    return names


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    weights, widths, rotate = layer["attention"], mla.latent_widths(config), apply_rotary_interleaved
    normed = _gated_norm(x, layer["input_layernorm"], layer["input_gate"], config)
    mask = ctx.choose(weights, normed, freqs, mask, indexer=Indexer(config.index_topk, apply_rotary))
    latent = linear(normed, weights["q_a_proj"], weights.get("q_a_bias"))
    latent = torch.cat((rms_norm(latent, weights["q_a_layernorm"], eps=LATENT_EPS), latent), dim=-1)
    width = widths.nope + widths.rope
    q, gate = split_heads(linear(latent, weights["q_b_proj"]), width + widths.value).split([width, widths.value], -1)
    q = rotated_queries(q, freqs, widths=widths, rotate=rotate)
    scale = latent_scale(config.rope, width)
    mixed = ctx.attend_latent(weights, normed, freqs, mask, widths=widths, rotate=rotate, scale=scale, queries=q)
    mixed = (mixed * elementwise(torch.sigmoid, upcast(gate))).to(x.dtype)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = _gated_norm(x, layer["post_attention_layernorm"], layer.get("post_attention_gate"), config)
    route = functools.partial(_routed, bias=layer["mlp"].get("selection_bias"), **mixture.grouped_choice(config))
    return x + ctx.tap("mlp", mixture.feed(layer["mlp"], normed, config, ctx, route=route, dtypes=ROUTER))


def _routed(
    logits: Tensor, indices: Tensor | None = None, *, bias: Tensor | None, groups: tuple[int, int], **choice: Any
) -> tuple[Tensor, Tensor]:
    """`sigmoid_top_k`, where experts of other groups count as 0: more than a negative bias may leave inside."""
    if indices is None:
        scores = elementwise(torch.sigmoid, upcast(logits))
        scores = scores if bias is None else scores + bias
        indices = choose(scores, choice["k"], groups=groups, best=2, outside=0.0)
    return sigmoid_top_k(logits, indices, **choice)


def _gated_norm(x: Tensor, norm: Tensor, gate: Tree | None, config: Config) -> Tensor:
    """y = rms_norm(x) [B, S, D], times sigmoid(up(silu(down(y)))) where there is a gate."""
    y = rms_norm(x, norm, eps=config.rms_norm_eps)
    if gate is None:
        return y
    opened = linear(elementwise(F.silu, linear(y, gate["down_proj"])), gate["up_proj"])
    return (y * elementwise(torch.sigmoid, upcast(opened))).to(y.dtype)


PRESETS = {"ax-k2-light": {"model_type": "axk2"}}
