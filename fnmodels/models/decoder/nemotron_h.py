"""Nemotron-H (arXiv 2504.03624), Nemotron Nano 2 and Nemotron 3 (NVIDIA): one sublayer per layer, and no positions.

A layer is a norm and a Mamba 2 mixer (arXiv 2405.21060), attention, an MLP without a gate, or a mixture of such MLPs
with a shared expert, in any order. The experts of the larger members work on a projection of the residual stream to
fewer dimensions. Nemotron 3 Super has an MTP head whose block is several such layers: `fnmodels.mtp`.
"""

import functools
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.inputs.mask import Create, MaskLike
from fnmodels.models.common import decoder, mtp
from fnmodels.models.common import moe as mixture
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import embed, kinds  # noqa: F401
from fnmodels.models.common.family import LayerKind, Traits
from fnmodels.models.common.mamba import Mamba, mamba, mamba_from_hf, mamba_leaves, mamba_names, mamba_to_hf
from fnmodels.models.common.spec import decoder_leaves, moe_leaves, norm, plain_mlp_leaves, usual_attention, weight
from fnmodels.models.common.storage import Stored
from fnmodels.ops import (
    ACTIVATIONS,
    Rope,
    no_rotation,
    plain_mlp,
    project_out,
    project_qkv,
    rms_norm_fp32_weight,
    upcast,
)
from fnmodels.ops.moe.router import RouterDtypes, sigmoid_top_k
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("nemotron_h",)
ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")
TRAITS = Traits(
    kinds=("linear", "full", "mlp", "mlp_moe"),
    routed=True,
    router=ROUTER,
    optional={"mtp": "num_nextn_predict_layers"},  # may be absent from files; its length is this field
    in_memory={r"^backbone\.": "model."},
)

_LISTS = ("hybrid_override_pattern", "layers_block_type", "layer_types")
_MTP_LISTS = ("mtp_hybrid_override_pattern", "mtp_layers_block_type")
_KINDS = {"M": "linear", "*": "full", "-": "mlp", "E": "mlp_moe", "mamba": "linear", "attention": "full"}
_KINDS |= {"linear_attention": "linear", "full_attention": "full", "mlp": "mlp", "moe": "mlp_moe"}  # the current names
_MIXER: dict[str, tuple[str, Any]] = {
    "heads": ("mamba_num_heads", 128),
    "head_dim": ("mamba_head_dim", 64),
    "groups": ("n_groups", 8),
    "state": ("ssm_state_size", 128),
    "kernel": ("conv_kernel", 4),
    "conv_bias": ("use_conv_bias", True),
    "proj_bias": ("use_bias", False),
}
_EXPERTS = {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}  # with the defaults of absent fields
_EXPERTS |= {"moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688}
# No effect in transformers, but in other code: biases, a window, a shared expert counted twice, a tied head.
_EXPECTED = {"attention_bias": False, "mlp_bias": False, "sliding_window": None, "n_shared_experts": 1}
_EXPECTED |= {"tie_word_embeddings": False}
# Read first (the lists of layers), repeated, of the initialization, of kernels and caches, and of positions.
_UNUSED = (
    *(*_LISTS, "time_step_limit", "time_step_max", "time_step_floor", "time_step_rank"),
    *("expand", "rescale_prenorm_residual", "residual_in_fp32", "num_logits_to_keep", "mamba_proj_bias"),
    *("use_mamba_kernels", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "rope_theta"),
    *("mtp_layers_block_type", "mtp_hybrid_override_pattern", "partial_rotary_factor"),
)
_HEAD = ("full", "mlp_moe")  # the layers of an MTP head's block where config.json lists none


@dataclass(frozen=True, kw_only=True)
class Config(decoder.BaseConfig):
    """Sizes and switches. intermediate_size: of layers that are a dense MLP. moe_latent_size: 0 for experts of x.

    num_nextn_predict_layers: MTP heads, params["mtp"], which `forward` does not use. mtp_layer_kinds: the layers of the
    block of each.
    """

    mixer: Mamba
    hidden_act: str = "relu2"
    mamba_hidden_act: str = "silu"
    layer_norm_epsilon: float = 1e-5
    n_routed_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 1
    moe_shared_expert_intermediate_size: int = 1
    moe_latent_size: int = 0
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    num_nextn_predict_layers: int = 0
    mtp_layer_kinds: tuple[str, ...] = _HEAD
    n_shared_experts: ClassVar[int] = 1
    rope: Rope = field(default=Rope(), compare=False)  # nothing rotates
    model_type: str = field(default="nemotron_h", compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.num_nextn_predict_layers:
            object.__setattr__(self, "mtp_layer_kinds", _HEAD)
        elif not self.mtp_layer_kinds or "linear" in self.mtp_layer_kinds:
            raise UnsupportedError(
                f"mtp_layer_kinds is {self.mtp_layer_kinds}; the block of an MTP head must be layers of attention, "
                "MLPs or experts, without recurrent ones."
            )
        mtp.check_kinds(self, self.mtp_layer_kinds)
        if "mlp_moe" in self.layer_kinds or (self.num_nextn_predict_layers and "mlp_moe" in self.mtp_layer_kinds):
            mixture.check_groups(self)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        listed = decoder.listed_kinds(Fields(values), _LISTS, _KINDS) or ("linear", "mlp_moe", "full", "mlp")
        fields = Fields({**values, "num_hidden_layers": values.get("num_hidden_layers") or len(listed)})
        for name, value in _EXPECTED.items():
            fields.expect(name, value)
        model_type = fields.choice("model_type", MODEL_TYPES)
        usual = decoder.decoder_sizes(fields, max_positions=4096, tied=False, kv_heads=8, head_dim=128)
        if usual["num_hidden_layers"] != len(listed):
            raise ConfigError(
                f"{fields.where}: 'num_hidden_layers' is {usual['num_hidden_layers']}, but {len(listed)} are listed."
            )
        epsilon = fields.number("layer_norm_epsilon", 1e-5)
        repeated = {"attention_head_dim": usual["head_dim"], "norm_eps": epsilon, "rms_norm_eps": epsilon}
        for name, value in repeated.items():
            fields.expect(name, value)
        limits = fields.number("time_step_min", 1e-3, above=-1e-9), math.inf
        experts: dict[str, Any] = {name: fields.integer(name, default) for name, default in _EXPERTS.items()}
        heads = fields.integer("num_nextn_predict_layers", 0, low=0, high=mixture.HEADS_LIMIT)
        own = (decoder.listed_kinds(fields, _MTP_LISTS, _KINDS) if heads else None) or _HEAD
        high = mixture.experts_limit(listed.count("mlp_moe") + heads * own.count("mlp_moe") or 1)
        config = Config(
            **usual,
            **experts,
            n_routed_experts=fields.integer("n_routed_experts", 8, high=high),
            mixer=mamba_from_hf(fields, None, _MIXER, limits=limits),
            hidden_act=fields.choice("mlp_hidden_act", tuple(ACTIVATIONS), "relu2"),
            mamba_hidden_act=fields.choice("mamba_hidden_act", tuple(ACTIVATIONS), "silu"),
            layer_norm_epsilon=epsilon,
            moe_latent_size=fields.integer("moe_latent_size", 0, low=0),
            **fields.plain(norm_topk_prob=True, routed_scaling_factor=1.0),
            layer_kinds=listed,
            num_nextn_predict_layers=heads,
            mtp_layer_kinds=own,
            model_type=model_type,
        )
        return decoder.finished(config, fields, ignored=_UNUSED)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        names = (*_EXPERTS, "n_routed_experts", "norm_topk_prob", "routed_scaling_factor", "layer_norm_epsilon")
        types = {kind: name for name, kind in _KINDS.items()}
        own: ConfigJson = mamba_to_hf(self.mixer, _MIXER) | {"time_step_min": self.mixer.limits[0]}
        own |= {"mlp_hidden_act": self.hidden_act, "mamba_hidden_act": self.mamba_hidden_act, "rope_parameters": None}
        own |= {"layers_block_type": [types[kind] for kind in self.layer_kinds], "time_step_limit": None}
        own |= {"moe_latent_size": self.moe_latent_size or None}
        if self.num_nextn_predict_layers:
            own["num_nextn_predict_layers"] = self.num_nextn_predict_layers
            own["mtp_layers_block_type"] = [types[kind] for kind in self.mtp_layer_kinds]
        found = decoder.decoder_to_hf(self, "NemotronHForCausalLM", *names, **own)
        return {name: value for name, value in found.items() if value is not None}


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    leaves = decoder_leaves(config, [_layer(config, kind) for kind in config.layer_kinds])
    return leaves | mtp.heads(config, [_layer(config, kind) for kind in config.mtp_layer_kinds])


def _layer(config: Config, kind: str) -> Tree:
    D, std = config.hidden_size, config.initializer_range
    first = {"input_layernorm": norm(D, "embed")}
    if kind == "linear":
        return first | {"attention": mamba_leaves(D, config.mixer, std=std)}
    if kind == "full":
        return first | {"attention": usual_attention(config)}
    if kind == "mlp":
        return first | {"mlp": plain_mlp_leaves(D, config.intermediate_size, std=std, biases=False)}
    return first | {"mlp": _moe_leaves(config)}


def _moe_leaves(config: Config) -> Tree:
    D, E, std = config.hidden_size, config.n_routed_experts, config.initializer_range
    inner, latent = config.moe_intermediate_size, config.moe_latent_size
    leaves = moe_leaves(D, E, inner, std=std, selection_bias=True)
    width, axis = (latent, "moe_latent") if latent else (D, "embed")
    leaves["experts"] = {
        "up_proj": weight((E, inner, width), ("expert", "expert_mlp", axis), std),
        "down_proj": weight((E, width, inner), ("expert", axis, "expert_mlp"), std),
    }
    if latent:
        leaves["latent_in_proj"] = weight((latent, D), ("moe_latent", "embed"), std)
        leaves["latent_out_proj"] = weight((D, latent), ("embed", "moe_latent"), std)
    shared = config.moe_shared_expert_intermediate_size
    return leaves | {"shared_expert": plain_mlp_leaves(D, shared, std=std, biases=False)}


_NAMES = {  # within the mixer of a layer on disk
    "router": "gate.weight",
    "selection_bias": "gate.e_score_correction_bias",
    "latent_in_proj": "fc1_latent_proj.weight",
    "latent_out_proj": "fc2_latent_proj.weight",
    "shared_expert.up_proj": "shared_experts.up_proj.weight",
    "shared_expert.down_proj": "shared_experts.down_proj.weight",
}


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}, with one tensor per expert."""
    names: dict[str, Stored] = {"embed_tokens": "backbone.embeddings.weight", "norm": "backbone.norm_f.weight"}
    names["lm_head"] = "lm_head.weight"
    names |= {} if decoder.is_lm(config) else {"score": "score.weight"}
    for index, layer in enumerate(spec(config)["layers"]):
        where, there = f"layers.{index}", f"backbone.layers.{index}"
        names[f"{where}.input_layernorm"] = f"{there}.norm.weight"
        for path in flatten({name: part for name, part in layer.items() if name != "input_layernorm"}):
            leaf = path.partition(".")[2]
            name: Stored = f"{there}.mixer.{_NAMES.get(leaf, f'{leaf}.weight')}"
            if leaf.startswith("experts."):
                name = mixture.expert_names(f"{there}.mixer.experts", config.n_routed_experts, f"{leaf[8:]}.weight")
            names[f"{where}.{path}"] = name
        if config.layer_kinds[index] == "linear":
            names |= mamba_names(config.mixer, f"{where}.attention", f"{there}.mixer")
    if not config.num_nextn_predict_layers:
        return names
    # vLLM, vllm/model_executor/models/nemotron_h_mtp.py at 5a6131dd84c0: these names, and the maths
    return names | mtp.names_of(config, hf_names(mtp.blocks(config)[0]), "mtp.layers.{}.")


def leftovers(config: Config) -> tuple[str, ...]:
    """Patterns of the tensors of MTP heads that config.json does not count."""
    return () if config.num_nextn_predict_layers else (r"mtp\..*",)


def mtp_kinds(config: Config) -> tuple[str, ...]:
    """The kinds of the layers of an MTP head's block."""
    return config.mtp_layer_kinds


stream_norm = rms_norm_fp32_weight


def attention_masks(
    config: Config, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}. An MLP reads no other token: its mask says what is padding, as that of any other layer does."""
    masks = decoder.attention_masks(config, positions, segment_ids, create=create)
    other = next(masks[kind] for kind in ("full", "linear", "mlp", "mlp_moe") if kind in masks)
    return {kind: other if LayerKind.parse(kind).attends == "mlp" else mask for kind, mask in masks.items()}


def freqs_cis(config: Config, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """Nothing rotates."""
    return dict.fromkeys(sorted(set(config.layer_kinds)), no_rotation(positions))


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, act = config.layer_norm_epsilon, config.hidden_act
    normed = rms_norm_fp32_weight(x, layer["input_layernorm"], eps=eps)
    if kind == "linear":
        mixed = mamba(layer["attention"], normed, mask, config.mixer, ctx, eps=eps, activation=config.mamba_hidden_act)
        return x + ctx.tap("attention", mixed)
    if kind == "full":
        q, k, v = project_qkv(layer["attention"], normed, head_dim=config.head_dim)
        mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
        return x + ctx.tap("attention", project_out(layer["attention"], mixed))
    if kind == "mlp":
        return x + ctx.tap("mlp", plain_mlp(layer["mlp"], normed, activation=act, tap=ctx.tap))
    choice = mixture.grouped_choice(config)
    route = functools.partial(sigmoid_top_k, bias=layer["mlp"]["selection_bias"], **choice)
    return x + ctx.tap("mlp", ctx.moe(layer["mlp"], normed, route, act=ACTIVATIONS[act], dtypes=ROUTER))


def unembed(params: Tree, x: Tensor, /, *, config: Config) -> Tensor:
    """Final norm and output head: logits [B, S, V] in fp32 or wider."""
    normed = rms_norm_fp32_weight(x, params["norm"], eps=config.layer_norm_epsilon)
    return upcast(decoder.project(params, normed, config))


_SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "mamba_num_heads"),
    *("mamba_head_dim", "hybrid_override_pattern"),
)
_NANO: dict[str, Any] = {"n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856}
_NANO |= {"moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5}
_SUPER: dict[str, Any] = {"n_routed_experts": 512, "num_experts_per_tok": 22, "moe_intermediate_size": 2688}
_SUPER |= {"moe_latent_size": 1024, "moe_shared_expert_intermediate_size": 5376, "routed_scaling_factor": 5.0}
_LAYERS = {
    "8b": "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-",
    "9b": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "12b": "M-M-M-M*-" * 6 + "M-M-M-M-",
    "30b": "MEMEM*E" * 5 + "MEMEMEM*E" + "MEMEMEME",
    "120b": "MEMEMEM*E" * 3 + "MEMEMEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME",
}
PRESETS = {
    name: {"model_type": "nemotron_h", "vocab_size": 131072, "max_position_embeddings": length}
    | own
    | dict(zip(_SIZES, (*sizes, _LAYERS[size]), strict=True))
    for name, size, length, own, *sizes in (
        ("nemotron-h-8b", "8b", 8192, {}, 4096, 21504, 32, 8, 128, 64),
        ("nemotron-nano-9b-v2", "9b", 131072, {}, 4480, 15680, 40, 8, 128, 80),
        ("nemotron-nano-12b-v2", "12b", 131072, {}, 5120, 20480, 40, 8, 128, 80),
        ("nemotron-3-nano-30b-a3b", "30b", 262144, _NANO, 2688, 1856, 32, 2, 64, 64),
        ("nemotron-3-super-120b-a12b", "120b", 262144, _SUPER, 4096, 2688, 32, 2, 128, 64),
    )
}
