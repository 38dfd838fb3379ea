"""DeepSeek V3.2 (arXiv 2512.02556) and GLM-5: DeepSeek V3 whose attention chooses its keys.

A pre-norm decoder with multi-head latent attention, in which each query attends to the `index_topk` keys that a
lightning indexer scores highest; the first layers are dense, the others mixtures of experts as in DeepSeek V3, whose
MTP heads they may have. The indexer rotates its first dimensions: halves in DeepSeek V3.2, interleaved pairs in GLM-5.
In GLM-5 layers may take the choice of the last layer before them that has an indexer (arXiv 2603.12201).

The choice has no gradient, so a loss on logits does not train the indexer; a loss of its scores does. The published
code rotates its queries and keys by a Hadamard matrix, which changes no score, and computes in fp8; both are left out,
as in transformers.
"""

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder, mla, mtp
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.layers import indexed
from fnmodels.models.common.rope_config import rope_from_hf
from fnmodels.models.common.spec import decoder_leaves, latent_attention_leaves, layer_leaves
from fnmodels.models.common.storage import Stored
from fnmodels.ops import apply_rotary, apply_rotary_interleaved, gated_mlp, latent_scale, project_out, rms_norm
from fnmodels.ops.indexer import Indexer
from fnmodels.ops.moe.router import RouterDtypes, sigmoid_top_k
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("deepseek_v32", "glm_moe_dsa")
ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")
TRAITS = Traits(
    kinds=("indexed", "indexed_moe", "indexed_shared", "indexed_shared_moe"),
    routed=True,
    router=ROUTER,
    optional={"mtp": "num_nextn_predict_layers"},  # may be absent from files; its length is this field
)


@dataclass(frozen=True, kw_only=True)
class Config(indexed.IndexedConfig):
    """Sizes and switches."""

    index_rope_interleave: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if "shared" in self.layer_kinds[0]:
            raise ConfigError("The first layer must have an indexer: no layer before it makes a choice of keys.")

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        # In some files of GLM-5 head_dim is the width without RoPE; it is read by nothing.
        unused = {"head_dim"} if values.get("head_dim") == values.get("qk_nope_head_dim") else set()
        fields = Fields({name: value for name, value in values.items() if name not in unused})
        glm = fields.choice("model_type", MODEL_TYPES) == "glm_moe_dsa"
        positions, kv_heads, rank, nope, eps = (202752, 64, 2048, 192, 1e-5) if glm else (163840, 128, 1536, 128, 1e-6)
        sizes = mla.latent_from_hf(
            fields, max_positions=positions, kv_heads=kv_heads, q_rank=rank, nope_dim=nope, rope_head=True
        )
        fields.expect("rope_interleave", True)
        fields.expect("indexer_rope_interleave", glm)
        fields.expect("mlp_bias", False)
        fields.expect("moe_layer_freq", 1)
        layers, width = sizes["num_hidden_layers"], sizes["qk_rope_head_dim"]
        del sizes["rope_interleave"]
        experts = mixture.grouped_from_hf(fields, layers, dense=3, scale=2.5)
        dense = experts.pop("layer_kinds").count("full")
        indexed.per_layer(fields, "layer_types", indexed.ATTENTION, ["indexed_attention"] * layers)
        indexers = ["indexed"] * layers
        if glm:
            indexers = indexed.per_layer(
                fields, "indexer_types", indexed.INDEXERS, indexed.indexer_types(fields, layers)
            )
        mlps = indexed.per_layer(
            fields, "mlp_layer_types", indexed.MLP, ["dense"] * dense + ["sparse"] * (layers - dense)
        )
        sizes |= {
            "q_lora_rank": fields.integer("q_lora_rank", rank),
            "rms_norm_eps": fields.number("rms_norm_eps", eps),
        }
        config = Config(
            **sizes | experts,
            index_n_heads=fields.integer("index_n_heads", 32 if glm else 64),
            **fields.plain(index_head_dim=128, index_topk=2048),
            index_rope_interleave=glm,
            layer_kinds=tuple(map("".join, zip(indexers, mlps, strict=True))),
            rope=rope_from_hf(fields, head_dim=width, max_positions=sizes["max_position_embeddings"], theta=1e4),
            model_type=fields.values["model_type"],
        )
        # expert parallelism and load balancing in training; generation by MTP heads
        ignored = ("ep_size", "aux_loss_alpha", "seq_aux", "index_share_for_mtp_iteration")
        return decoder.finished(config, fields, ignored=ignored)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect. Raises ConfigError where `model_type` has no word for this model."""
        mlps = ["sparse" if kind.routed else "dense" for kind in parsed(self.layer_kinds)]
        own = mixture.grouped_to_hf(self) | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        own |= {"first_k_dense_replace": (*mlps, "sparse").index("sparse"), "mlp_layer_types": mlps}
        if self.model_type == "glm_moe_dsa":
            own["indexer_types"] = ["shared" if kind.shares_choice else "full" for kind in parsed(self.layer_kinds)]
        names = (*mla.NAMES, "index_n_heads", "index_head_dim", "index_topk", "num_nextn_predict_layers")
        architecture = "GlmMoeDsaForCausalLM" if self.model_type == "glm_moe_dsa" else "DeepseekV32ForCausalLM"
        return decoder.decoder_to_hf(self, architecture, *names, **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    attention = latent_attention_leaves(config)
    own = attention | {"indexer": indexed.indexer_leaves(config)}

    def layer(kind: LayerKind, attention: Tree) -> Tree:
        mlp = mixture.grouped_leaves(config, kind, selection_bias=True)
        return layer_leaves(config.hidden_size, attention, mlp)

    layers = [layer(kind, attention if kind.shares_choice else own) for kind in parsed(config.layer_kinds)]
    return decoder_leaves(config, layers) | mtp.heads(config, layer(LayerKind.parse(mtp_kinds(config)[0]), own))


def mtp_kinds(config: Config) -> tuple[str, ...]:
    """The kind of the layer that is an MTP head's block: that of the last layer, with an indexer of its own."""
    return (config.layer_kinds[-1].replace("_shared", ""),)


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert."""
    return indexed.indexer_names(mla.latent_names(mixture.grouped_names(config, flatten(spec(config)))))


hf_copies = mtp.copies


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.rms_norm_eps, layer["attention"]
    normed = rms_norm(x, layer["input_layernorm"], eps=eps)
    indexer = Indexer(config.index_topk, apply_rotary_interleaved if config.index_rope_interleave else apply_rotary)
    mask = ctx.choose(weights, normed, freqs, mask, indexer=indexer)
    widths, rotate = mla.latent_widths(config), apply_rotary_interleaved
    scale = latent_scale(config.rope, widths.nope + widths.rope)
    mixed = ctx.attend_latent(weights, normed, freqs, mask, widths=widths, rotate=rotate, scale=scale)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    if not LayerKind.parse(kind).routed:
        return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))
    route = functools.partial(sigmoid_top_k, bias=layer["mlp"]["selection_bias"], **mixture.grouped_choice(config))
    return x + ctx.tap("mlp", ctx.moe(layer["mlp"], normed, route, act=config.hidden_act, dtypes=ROUTER))
