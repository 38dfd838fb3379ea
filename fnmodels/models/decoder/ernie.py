"""ERNIE 4.5 (Baidu): the dense 0.3B model and the mixtures of experts 21B-A3B and 300B-A47B.

The Llama block with interleaved rotary embedding. MoE layers route by softmax with a selection bias, with the router
and its weight in fp32, and may have a shared expert. 21B-A3B has an MTP head, whose block is a layer like the first one
and whose final norm is the model's: `fnmodels.mtp`.
"""

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder, mtp
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import decoder_leaves, layer_leaves, moe_leaves, usual_attention, usual_mlp
from fnmodels.models.common.storage import Stored, TensorSlice
from fnmodels.ops import apply_rotary_interleaved, gated_mlp, project_out, project_qkv, rms_norm
from fnmodels.ops.moe.router import RouterDtypes, softmax_top_k
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("ernie4_5", "ernie4_5_moe")
ROUTER = RouterDtypes(param="wide", projection="wide", score="wide", output="model")
TRAITS = Traits(
    kinds=("full", "full_moe"),
    routed=True,
    router=ROUTER,
    optional={"mtp": "num_nextn_predict_layers"},  # may be absent from files; its length is this field
    mtp_reads="raw",
    in_memory={r"\.mlp\.moe_statics\.": ".mlp.gate.moe_statics."},
)


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches; intermediate_size is that of dense layers. MoE models have no biases."""

    tie_word_embeddings: bool = True
    rms_norm_eps: float = 1e-5
    use_bias: bool = False
    moe_intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    num_shared_experts: int = 0  # width of the shared expert, in routed experts
    moe_norm_min: float = 1e-12  # lower bound of the divisor that renormalizes weights
    num_nextn_predict_layers: int = 0  # MTP heads, params["mtp"], which `forward` does not use: 0 or 1

    def __post_init__(self) -> None:
        super().__post_init__()
        mtp.check_kinds(self, mtp_kinds(self), most=1)
        if "full_moe" in self.layer_kinds:
            mixture.check_experts(self.num_experts, self.num_experts_per_tok)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json of any of MODEL_TYPES; raises ConfigError or UnsupportedError with the field's name."""
        fields, sparse = Fields(values), values.get("model_type") == "ernie4_5_moe"
        head_dim = 0 if sparse or "head_dim" in values else 128  # an explicit null is hidden_size / heads
        sizes: Any = {"kv_heads": 4 if sparse else 2, "head_dim": head_dim}
        usual = decoder.base_fields(fields, MODEL_TYPES, theta=5e5, max_positions=131072, tied=True, **sizes)
        fields.expect("use_rmsnorm", True)
        if sparse:
            fields.expect("use_bias", False)
            usual |= _experts(fields, usual["num_hidden_layers"])
        eps, bias = fields.number("rms_norm_eps", 1e-5), fields.boolean("use_bias", False)
        heads = fields.integer("num_nextn_predict_layers", 0, low=0, high=1) if sparse else 0
        config = Config(**usual, rms_norm_eps=eps, use_bias=bias, num_nextn_predict_layers=heads)
        return decoder.finished(config, fields, ("moe_capacity",) if sparse else ())  # of training

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect. Raises ConfigError where `model_type` has no word for this model."""
        names: tuple[str, ...] = ("rms_norm_eps", "use_bias", "hidden_act")
        if self.model_type == "ernie4_5":
            return decoder.decoder_to_hf(self, "Ernie4_5ForCausalLM", *names)
        sparse = [i for i, kind in enumerate(self.layer_kinds) if kind == "full_moe"] or [self.num_hidden_layers]
        own = {"moe_layer_start_index": sparse[0], "moe_layer_end_index": sparse[-1]}
        own |= {"moe_layer_interval": sparse[1] - sparse[0] if len(sparse) > 1 else 1}
        own |= {"moe_num_experts": self.num_experts, "moe_k": self.num_experts_per_tok}
        own |= {"moe_num_shared_experts": self.num_shared_experts}
        names += ("moe_intermediate_size", "moe_norm_min", "num_nextn_predict_layers")
        return decoder.decoder_to_hf(self, "Ernie4_5_MoeForCausalLM", *names, **own)


def _experts(fields: Fields, layers: int) -> dict[str, Any]:
    """The Config fields of experts, and the layer kinds."""
    for name, value in {"moe_gate": "topk", "moe_gate_act": "softmax", "moe_use_aux_free": True}.items():
        fields.expect(name, value)
    fields.expect("moe_norm_gate_logits", True)
    first, every = fields.integer("moe_layer_start_index", 1, low=0), fields.integer("moe_layer_interval", 1)
    last = fields.integer("moe_layer_end_index", -1, low=-1)
    last = layers - 1 if last == -1 else last
    sparse = [first <= i <= last and (i + 1) % every == 0 for i in range(layers)]
    high = mixture.experts_limit(layers)
    return {
        "num_experts": fields.integer("moe_num_experts", 64, high=high),
        "num_experts_per_tok": fields.integer("moe_k", 6, high=high),
        "moe_intermediate_size": fields.integer("moe_intermediate_size", 1536),
        "num_shared_experts": fields.integer("moe_num_shared_experts", 2, low=0),
        "moe_norm_min": fields.number("moe_norm_min", 1e-12),
        "layer_kinds": tuple("full_moe" if s else "full" for s in sparse),
    }


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, std, bias = config.hidden_size, config.initializer_range, config.use_bias
    inner, experts = config.moe_intermediate_size, config.num_experts
    shared = config.num_shared_experts * inner
    sparse = moe_leaves(D, experts, inner, std=std, shared=shared, selection_bias=True, wide_router=True)
    mlps = {"full": usual_mlp(config, biases=bias), "full_moe": sparse}
    attention = usual_attention(config, qkv_bias=bias, o_bias=bias)
    layers = {kind: layer_leaves(D, attention, mlp) for kind, mlp in mlps.items() if kind in config.layer_kinds}
    leaves = decoder_leaves(config, [layers[kind] for kind in config.layer_kinds])
    return leaves | mtp.heads(config, layers[config.layer_kinds[0]], own_norm=False)


def mtp_kinds(config: Config) -> tuple[str, ...]:
    """The kind of the layer that is the block of the MTP head: that of the first layer."""
    return config.layer_kinds[:1]


def leftovers(config: Config) -> tuple[str, ...]:
    """Patterns of the tensors of an MTP head that the config does not count."""
    return () if config.num_nextn_predict_layers else (r"model\.mtp_(block|emb_norm|hidden_norm|linear_proj)\..*",)


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}: one tensor per expert, and selection biases of shape [1, E]."""
    count = config.num_experts
    names = {
        p: mixture.moe_name(p.replace(".shared_expert.", ".shared_experts."), count) for p in flatten(spec(config))
    }
    for path in names:
        if path.endswith(".selection_bias"):
            name = f"model.{path.removesuffix('selection_bias')}moe_statics.e_score_correction_bias"
            names[path] = TensorSlice(name, 0, count, count, ones=(1, 0))
    if not config.num_nextn_predict_layers:
        return names
    # PaddlePaddle/ERNIE, ernie/modeling_moe.py at 76abde250347: these names, and the maths
    heads = mtp.names_of(config, hf_names(mtp.blocks(config)[0]), "model.mtp_block.{}.")
    around = {"enorm": "emb_norm", "hnorm": "hidden_norm", "eh_proj": "linear_proj"}
    del heads["mtp.0.norm"]
    return names | heads | {f"mtp.0.{ours}": f"model.mtp_{theirs}.0.weight" for ours, theirs in around.items()}


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights, mlp = config.rms_norm_eps, layer["attention"], layer["mlp"]
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    q, k = apply_rotary_interleaved(q, freqs), apply_rotary_interleaved(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    if kind == "full":
        return x + ctx.tap("mlp", gated_mlp(mlp, normed, activation=config.hidden_act, tap=ctx.tap))
    route = functools.partial(
        softmax_top_k,
        k=config.num_experts_per_tok,
        bias=mlp["selection_bias"],
        renormalize=True,
        norm_min=config.moe_norm_min,
    )
    return x + ctx.tap("mlp", ctx.moe(mlp, normed, route, act=config.hidden_act, dtypes=ROUTER))


_MOE = {"model_type": "ernie4_5_moe", "vocab_size": 103424, "moe_num_experts": 64}
PRESETS: dict[str, ConfigJson] = {
    "ernie-4.5-0.3b": {"model_type": "ernie4_5", "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072}
    | {"num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128},
    "ernie-4.5-21b-a3b": _MOE
    | {"hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28, "num_attention_heads": 20}
    | {"num_key_value_heads": 4, "moe_intermediate_size": 1536, "moe_k": 6, "moe_num_shared_experts": 2},
    "ernie-4.5-300b-a47b": _MOE
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 54, "num_attention_heads": 64}
    | {"num_key_value_heads": 8, "moe_intermediate_size": 3584, "moe_k": 8, "moe_num_shared_experts": 0}
    | {"moe_layer_start_index": 3, "tie_word_embeddings": False},
}
