"""DeepSeek V2 (arXiv 2405.04434), V3 and R1 (arXiv 2412.19437), Kimi K2 (arXiv 2507.20534), Moonlight.

GLM-4.7-Flash (glm4_moe_lite) and Sarvam 105B (sarvam_mla) are the same model in other sizes; A.X K1 (axk1) has a norm
after its experts and no selection bias.

A pre-norm decoder with multi-head latent attention (MLA); the first layers are dense, the others mixtures of experts
with a shared expert. V2 routes by softmax; the others by sigmoid, with a selection bias that has no gradient. Routing
may be limited to the best groups of experts. V3 has MTP heads: `fnmodels.mtp`.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.models.common import decoder, mla, mtp
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields, renamed
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import Traits, parsed
from fnmodels.models.common.rope_config import rope_from_hf
from fnmodels.models.common.spec import decoder_leaves, latent_attention_leaves, layer_leaves, norm
from fnmodels.models.common.storage import Stored
from fnmodels.ops import apply_rotary, apply_rotary_interleaved, gated_mlp, latent_scale, project_out, rms_norm
from fnmodels.ops.moe.router import RouterDtypes, sigmoid_top_k, softmax_top_k
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "sarvam_mla", "axk1")
ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")
TRAITS = Traits(
    kinds=("full", "full_moe"),
    routed=True,
    router=ROUTER,
    optional={"mtp": "num_nextn_predict_layers"},  # may be absent from files; its length is this field
    leftovers=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),  # a buffer that some files hold
    in_memory={r"(layers\.\d+)\.post_mlp_layernorm\.": r"\1.mlp.post_mlp_layernorm."},  # of A.X K1
)

# Defaults of absent fields: positions, key/value heads (0: as many as query heads), rank of queries (0: no latent),
# width without RoPE, dense layers, scale of routed experts, eps of norms.
_DEFAULTS = {
    "deepseek_v2": (2048, 0, 1536, 128, 0, 1.0, 1e-6),
    "deepseek_v3": (4096, 128, 1536, 128, 3, 2.5, 1e-6),
    "kimi_k2": (4096, 128, 1536, 128, 3, 2.5, 1e-6),
    "glm4_moe_lite": (202752, 20, 768, 192, 1, 1.8, 1e-5),
    "sarvam_mla": (4096, 0, 0, 128, 1, 2.5, 1e-6),
    "axk1": (32768, 64, 1536, 128, 1, 2.5, 1e-6),
}


@dataclass(frozen=True, kw_only=True)
class Config(mla.LatentMixtureConfig):
    """Sizes and switches."""

    softmax_scores: bool = False  # V2; False: sigmoid scores and a selection bias
    rope_interleave: bool = True
    mlp_norm: bool = False  # of what experts return: A.X K1, which has no selection bias
    max_position_embeddings: int = 4096
    model_type: str = field(default="deepseek_v3", compare=False)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json of any of MODEL_TYPES; raises ConfigError or UnsupportedError with the field's name."""
        model_type = Fields(values).choice("model_type", MODEL_TYPES)
        fields = Fields({"num_nextn_predict_layers": 0} | {**values} if model_type == "axk1" else values)
        fields = _sarvam(fields) if model_type == "sarvam_mla" else fields
        positions, kv_heads, rank, nope, dense, scale, eps = _DEFAULTS[model_type]
        sizes = mla.latent_from_hf(
            fields, max_positions=positions, kv_heads=kv_heads, q_rank=rank, nope_dim=nope, rope_head=True
        )
        sizes |= {"rms_norm_eps": fields.number("rms_norm_eps", eps)}
        fields.expect("moe_layer_freq", 1)
        layers, v2 = sizes["num_hidden_layers"], model_type == "deepseek_v2"
        experts = (
            _v2_experts(fields, layers) if v2 else mixture.grouped_from_hf(fields, layers, dense=dense, scale=scale)
        )
        if model_type in ("glm4_moe_lite", "axk1"):
            routed = mixture.routed_layers(fields, layers)
            experts["layer_kinds"] = tuple("full_moe" if one else "full" for one in routed)
        config = Config(
            **sizes,
            **experts,
            rope=rope_from_hf(
                fields, head_dim=sizes["qk_rope_head_dim"], max_positions=sizes["max_position_embeddings"], theta=1e4
            ),
            mlp_norm=model_type == "axk1",
            model_type=model_type,
        )
        # expert parallelism and load balancing in training
        return decoder.finished(config, fields, ignored=("ep_size", "aux_loss_alpha", "seq_aux"))

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect. Raises ConfigError where `model_type` has no word for this model."""
        own = mixture.grouped_to_hf(self) | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        if self.model_type == "deepseek_v2":
            method = "greedy" if self.n_group == 1 else "group_limited_greedy"
            own |= {"scoring_func": "softmax", "topk_method": method}
            return decoder.decoder_to_hf(self, "DeepseekV2ForCausalLM", *mla.NAMES, **own)
        if self.model_type in ("glm4_moe_lite", "axk1"):
            own["mlp_layer_types"] = mixture.mlp_types(parsed(self.layer_kinds))
            del own["first_k_dense_replace"]
        names = (*mla.NAMES, "rope_interleave", "num_nextn_predict_layers")
        architecture = {"glm4_moe_lite": "Glm4MoeLite", "axk1": "AXK1"}.get(self.model_type, "DeepseekV3")
        return decoder.decoder_to_hf(self, f"{architecture}ForCausalLM", *names, **own)


def _sarvam(fields: Fields) -> Fields:
    """The fields of Sarvam's file under DeepSeek's names, with its defaults, without widths that follow from others."""
    absent: dict[str, Any] = {"initializer_range": 0.006, "num_nextn_predict_layers": 0}
    values, inner = absent | {**fields.values}, Fields(fields.values, fields.where)
    latent, rope = inner.integer("kv_lora_rank"), inner.integer("qk_rope_head_dim", 64)
    if values.get("head_dim") == latent + rope:  # the width of a cached key
        del values["head_dim"]
    if values.get("q_head_dim") == inner.integer("qk_nope_head_dim", 128) + rope:
        del values["q_head_dim"]
    scaling = values.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("type") == "deepseek_yarn":
        values["rope_scaling"] = scaling | {"type": "yarn"}
    return renamed(Fields(values, fields.where), _SARVAM)


_SARVAM = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}


def _v2_experts(fields: Fields, layers: int) -> dict[str, Any]:
    """As `grouped_from_hf`, for V2: softmax scores, group-limited only if `topk_method` is."""
    fields.expect("scoring_func", "softmax")
    fields.expect("norm_topk_prob", False)  # transformers ignores it; the published code differs
    fields.expect("rope_interleave", True)
    fields.expect("mlp_bias", False)
    limited = fields.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy") != "greedy"
    groups = {name: fields.integer(name, 1) for name in ("n_group", "topk_group")}
    own = {"softmax_scores": True, "norm_topk_prob": False} | (groups if limited else dict.fromkeys(groups, 1))
    return mixture.shared_from_hf(fields, layers, dense=0, scale=1.0) | own


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D, attention, biased = (
        config.hidden_size,
        latent_attention_leaves(config),
        not (config.softmax_scores or config.mlp_norm),
    )
    mlps = [mixture.grouped_leaves(config, kind, selection_bias=biased) for kind in parsed(config.layer_kinds)]
    after = {"post_mlp_layernorm": norm(D, "embed")} if config.mlp_norm else {}
    layers = [layer_leaves(D, attention, mlp) | (after if "router" in mlp else {}) for mlp in mlps]
    return decoder_leaves(config, layers) | mtp.heads(config, layers[-1])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert."""
    return mla.latent_names(mixture.grouped_names(config, flatten(spec(config))))


hf_copies = mtp.copies


def leftovers(config: Config) -> tuple[str, ...]:
    """Norms after dense layers, which published files of A.X K1 have and nothing reads."""
    dense = [str(i) for i, kind in enumerate(parsed(config.layer_kinds)) if not kind.routed]
    return (rf"model\.layers\.({'|'.join(dense)})\.post_mlp_layernorm\.weight",) if config.mlp_norm and dense else ()


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.rms_norm_eps, layer["attention"]
    rotate = apply_rotary_interleaved if config.rope_interleave else apply_rotary
    normed = rms_norm(x, layer["input_layernorm"], eps=eps)
    widths = mla.latent_widths(config)
    scale = latent_scale(config.rope, widths.nope + widths.rope)
    mixed = ctx.attend_latent(weights, normed, freqs, mask, widths=widths, rotate=rotate, scale=scale)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    if kind == "full":
        return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))
    score = softmax_top_k if config.softmax_scores else sigmoid_top_k
    route = functools.partial(score, bias=layer["mlp"].get("selection_bias"), **mixture.grouped_choice(config))
    fed = ctx.moe(layer["mlp"], normed, route, act=config.hidden_act, dtypes=ROUTER)
    return x + ctx.tap("mlp", rms_norm(fed, layer["post_mlp_layernorm"], eps=eps) if config.mlp_norm else fed)


PRESETS: dict[str, ConfigJson] = {
    "glm-4.7-flash": {"model_type": "glm4_moe_lite", "vocab_size": 154880, "hidden_size": 2048}
    | {"intermediate_size": 10240, "num_hidden_layers": 47, "num_attention_heads": 20, "kv_lora_rank": 512}
    | {"v_head_dim": 256, "moe_intermediate_size": 1536, "n_routed_experts": 64, "n_shared_experts": 1}
    | {"num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1, "rope_theta": 1000000}
}
