"""DeepSeek V2 (arXiv 2405.04434), V3 and R1 (arXiv 2412.19437), Kimi K2 (arXiv 2507.20534), Moonlight.

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
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import Traits, parsed
from fnmodels.models.common.rope_config import rope_from_hf
from fnmodels.models.common.spec import decoder_leaves, latent_attention_leaves, layer_leaves
from fnmodels.models.common.storage import Stored
from fnmodels.ops import apply_rotary, apply_rotary_interleaved, gated_mlp, latent_scale, project_out, rms_norm
from fnmodels.ops.moe.router import RouterDtypes, sigmoid_top_k, softmax_top_k
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")
ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")
TRAITS = Traits(
    kinds=("full", "full_moe"),
    routed=True,
    router=ROUTER,
    optional={"mtp": "num_nextn_predict_layers"},  # may be absent from files; its length is this field
    leftovers=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),  # a buffer that some files hold
)


@dataclass(frozen=True, kw_only=True)
class Config(mla.LatentMixtureConfig):
    """Sizes and switches."""

    softmax_scores: bool = False  # V2; False: sigmoid scores and a selection bias
    rope_interleave: bool = True
    max_position_embeddings: int = 4096
    model_type: str = field(default="deepseek_v3", compare=False)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json of any of MODEL_TYPES; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        v2 = model_type == "deepseek_v2"
        positions, kv_heads = (2048, 0) if v2 else (4096, 128)
        sizes = mla.latent_from_hf(
            fields, max_positions=positions, kv_heads=kv_heads, q_rank=1536, nope_dim=128, rope_head=True
        )
        fields.expect("moe_layer_freq", 1)
        layers = sizes["num_hidden_layers"]
        experts = _v2_experts(fields, layers) if v2 else mixture.grouped_from_hf(fields, layers, dense=3, scale=2.5)
        config = Config(
            **sizes,
            **experts,
            rope=rope_from_hf(
                fields, head_dim=sizes["qk_rope_head_dim"], max_positions=sizes["max_position_embeddings"], theta=1e4
            ),
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
        names = (*mla.NAMES, "rope_interleave", "num_nextn_predict_layers")
        return decoder.decoder_to_hf(self, "DeepseekV3ForCausalLM", *names, **own)


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
    attention, biased = latent_attention_leaves(config), not config.softmax_scores
    mlps = [mixture.grouped_leaves(config, kind, selection_bias=biased) for kind in parsed(config.layer_kinds)]
    layers = [layer_leaves(config.hidden_size, attention, mlp) for mlp in mlps]
    return decoder_leaves(config, layers) | mtp.heads(config, layers[-1])


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert."""
    return mla.latent_names(mixture.grouped_names(config, flatten(spec(config))))


hf_copies = mtp.copies


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
    return x + ctx.tap("mlp", ctx.moe(layer["mlp"], normed, route, act=config.hidden_act, dtypes=ROUTER))
