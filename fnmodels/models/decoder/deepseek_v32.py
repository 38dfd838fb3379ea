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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder, mla, mtp
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields, shown
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits, parsed
from fnmodels.models.common.rope_config import rope_from_hf
from fnmodels.models.common.spec import decoder_leaves, latent_attention_leaves, layer_leaves, layer_norm_leaves, weight
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

_ATTENTION = {"indexed_attention": "", "deepseek_sparse_attention": ""}
_INDEXER = {"full": "indexed", "shared": "indexed_shared"}
_MLP = {"dense": "", "sparse": "_moe"}


@dataclass(frozen=True, kw_only=True)
class Config(mixture.GroupedConfig):
    """Sizes and switches."""

    num_key_value_heads: int = field(init=False)  # as many as query heads
    head_dim: int = field(init=False)  # the rotary dimensions of a head
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int  # keys of a query
    index_rope_interleave: bool = False
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False  # of the projections that read x, and of o

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        object.__setattr__(self, "head_dim", self.qk_rope_head_dim)
        super().__post_init__()
        if self.index_head_dim < self.qk_rope_head_dim:
            raise ConfigError(f"index_head_dim {self.index_head_dim} is below qk_rope_head_dim {self.head_dim}.")
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
        _per_layer(fields, "layer_types", _ATTENTION, ["indexed_attention"] * layers)
        indexers = ["indexed"] * layers
        if glm:
            indexers = _per_layer(fields, "indexer_types", _INDEXER, _indexers(fields, layers))
        mlps = _per_layer(fields, "mlp_layer_types", _MLP, ["dense"] * dense + ["sparse"] * (layers - dense))
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


def _per_layer(fields: Fields, name: str, known: Mapping[str, str], default: Sequence[str]) -> list[str]:
    """The value in `known` of each layer's entry in the list of field `name`; ConfigError if it is not such a list."""
    given = fields.take(name, default)
    if not isinstance(given, list) or len(given) != len(default) or any(one not in list(known) for one in given):
        wanted = f"a list of {len(default)} entries, each {' or '.join(map(repr, known))}"
        raise ConfigError(f"{fields.where}: {name!r} is {shown(given)}, but must be {wanted}.")
    return [known[one] for one in given]


def _indexers(fields: Fields, layers: int) -> list[str]:
    """GLM-5's `indexer_types` by its older fields: a pattern of letters, or one indexer in `index_topk_freq` layers."""
    every, offset = fields.integer("index_topk_freq", 1), fields.integer("index_skip_topk_offset", 2, low=0)
    pattern = fields.take("index_topk_pattern", None)
    if pattern is None:
        return ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(layers)]
    letters = {"F": "full", "S": "shared"}
    if not isinstance(pattern, str) or len(pattern) != layers or set(pattern) - set(letters):
        raise ConfigError(f"{fields.where}: 'index_topk_pattern' is {shown(pattern)}, but must be {layers} of F and S.")
    return [letters[letter] for letter in pattern]


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    attention = latent_attention_leaves(config)
    own = attention | {"indexer": _indexer_leaves(config)}

    def layer(kind: LayerKind, attention: Tree) -> Tree:
        mlp = mixture.grouped_leaves(config, kind, selection_bias=True)
        return layer_leaves(config.hidden_size, attention, mlp)

    layers = [layer(kind, attention if kind.shares_choice else own) for kind in parsed(config.layer_kinds)]
    return decoder_leaves(config, layers) | mtp.heads(config, layer(LayerKind.parse(config.layer_kinds[-1]), own))


def _indexer_leaves(config: Config) -> Tree:
    """Parameters of `fnmodels.ops.indexer`; every process of tensor parallelism has all heads, to choose alike."""
    width, heads, std = config.index_head_dim, config.index_n_heads, config.initializer_range
    leaves = {
        "q_b_proj": weight((heads * width, config.q_lora_rank), ("latent", "latent"), std),
        "k_proj": weight((width, config.hidden_size), ("latent", "embed"), std),
        **layer_norm_leaves("k_norm", width, "latent"),
        "weights_proj": weight((heads, config.hidden_size), ("latent", "embed"), std),
    }
    return {name: replace(leaf, trainable=False) for name, leaf in leaves.items()}


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert."""
    names = mla.latent_names(mixture.grouped_names(config, flatten(spec(config))))
    for path, name in names.items():
        if isinstance(name, str) and ".indexer." in name:
            names[path] = name.replace(".q_b_proj.", ".wq_b.").replace(".k_proj.", ".wk.")
    return names


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
