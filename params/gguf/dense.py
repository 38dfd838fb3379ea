"""Architectures of GGUF files whose layers have attention and one MLP."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from fnmodels.errors import UnsupportedError
from fnmodels.models.common.config_json import ConfigJson

from .architecture import FUSED, LAYER, POST_NORMS, TOP, Architecture, To, long_factors
from .header import GgufFile
from .metadata import Metadata, rms_epsilon, scaled_rope

GEMMA = {
    **LAYER,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TANH = "gelu_pytorch_tanh"
_BIASES = {"attention_bias": "attn_q.bias"}
GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def partial_rotary(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """The fields of heads of which some channels are rotated."""
    return {"partial_rotary_factor": metadata.integer("rope.dimension_count", metadata.head_dim) / metadata.head_dim}


def sliding_layers(metadata: Metadata) -> ConfigJson:
    """The window, and which layers have it, by a list of switches; none of a file without a window."""
    window = metadata.count("attention.sliding_window")
    if not window:
        return {"sliding_window": None, "layer_types": ["full_attention"] * metadata.layers}
    flags = metadata.each_layer("attention.sliding_window_pattern")
    if not all(type(flag) is bool for flag in flags):
        raise UnsupportedError(
            f"{metadata.path}: '{metadata.architecture}.attention.sliding_window_pattern' is read with true or false "
            "for each layer."
        )
    return {
        "sliding_window": window,
        "layer_types": ["sliding_attention" if flag else "full_attention" for flag in flags],
    }


def phi_longrope(metadata: Metadata, file: GgufFile) -> tuple[ConfigJson, int, float]:
    """(the lists of factors or {}, the context length from which the long ones count, the factor on cos and sin).

    llama.cpp multiplies by 1 where a file has no other factor.
    """
    lists = long_factors(file)
    if not lists:
        metadata.expect("rope.scaling.attn_factor", 1.0)
    original = metadata.integer("rope.scaling.original_context_length", 4096)
    return lists, original, metadata.number("rope.scaling.attn_factor", 1.0)


def phi3(metadata: Metadata, file: GgufFile) -> ConfigJson:
    lists, original, scale = phi_longrope(metadata, file)
    fields: ConfigJson = {
        "original_max_position_embeddings": original,
        "sliding_window": metadata.count("attention.sliding_window") or None,
        **partial_rotary(metadata, file),
    }
    if not lists:
        return fields
    longer = max(math.log(metadata.integer("context_length") / original), 0.0)
    rule = math.sqrt(1 + longer / math.log(original)) if longer else 1.0
    # Published configurations leave the factor to their rule.
    own = {} if math.isclose(scale, rule, rel_tol=1e-6) else {"attention_factor": scale}
    return fields | {"rope_scaling": {"type": "longrope", **lists, **own}}


def _gemma2(metadata: Metadata, file: GgufFile) -> ConfigJson:
    widest = metadata.integer("embedding_length") // metadata.integer("attention.head_count")
    return {
        "sliding_window": metadata.integer("attention.sliding_window"),
        # No key has it: 27B, the model with 46 layers, divides by the root of hidden / heads, others by that of a head.
        "query_pre_attn_scalar": widest if metadata.layers == 46 else metadata.head_dim,
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def gemma3(metadata: Metadata, file: GgufFile) -> ConfigJson:
    layers = metadata.layers
    widest = metadata.integer("embedding_length") // metadata.integer("attention.head_count")
    pattern = metadata.integer("attention.sliding_window_pattern", 6)
    return {
        "sliding_window": metadata.integer("attention.sliding_window"),
        "layer_types": ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)],
        # No key has it: the models with 62 layers, 27B, divide by the root of hidden / heads, others by that of a head.
        "query_pre_attn_scalar": widest if layers == 62 else metadata.head_dim,
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
    }


def _cohere2(metadata: Metadata, file: GgufFile) -> ConfigJson:
    # llama.cpp knows no other pattern for it.
    kinds = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(metadata.layers)]
    return {"sliding_window": metadata.integer("attention.sliding_window"), "layer_types": kinds}


def _stablelm(metadata: Metadata, file: GgufFile) -> ConfigJson:
    if "blk.0.attn_q_norm.weight" in file.tensors:
        raise UnsupportedError(f"{file.path}: norms of q and k in the architecture stablelm are not read.")
    return {
        "use_parallel_residual": metadata.take("use_parallel_residual", False),
        **partial_rotary(metadata, file),
    }


def _olmo(metadata: Metadata, file: GgufFile) -> ConfigJson:
    metadata.expect("attention.layer_norm_epsilon", 1e-5)
    metadata.put("attention.layer_norm_rms_epsilon", 1e-5)  # for the reader of all decoders; config.json has none
    return {"clip_qkv": metadata.number("attention.clamp_kqv", 0.0) or None}


def _olmo2(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """OLMo 3 is of this architecture too, with a window."""
    if not metadata.count("attention.sliding_window"):
        return {}
    metadata.expect("rope.freq_base_swa", metadata.number("rope.freq_base", 10000.0))
    return {"model_type": "olmo3", **sliding_layers(metadata)}


def _exaone(metadata: Metadata, file: GgufFile) -> ConfigJson:
    rms_epsilon(metadata)
    return {}


def _exaone4(metadata: Metadata, file: GgufFile) -> ConfigJson:
    return sliding_layers(metadata)


def _ministral3(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """Mistral Small 3 is of this architecture too, without a temperature."""
    if metadata.take("attention.temperature_scale") is None:
        return {"model_type": "mistral", "sliding_window": None, "rope_parameters": scaled_rope(metadata)}
    multiplier = metadata.number("rope.scaling.yarn_log_multiplier")
    metadata.put("rope.scaling.yarn_log_multiplier", multiplier / 10)  # here it is no tenth
    beta = metadata.number("attention.temperature_scale")
    return {"rope_parameters": scaled_rope(metadata) | {"llama_4_scaling_beta": beta}}


def _conv(tensors: Sequence[Tensor]) -> Tensor:
    """A filter for each channel, with the dimension of its one input."""
    return tensors[0].unsqueeze(1)


LFM2: dict[str, str | To] = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "shortconv.conv": To("conv.conv", _conv),
    "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
}
LFM2_TOP = {"token_embd": "model.embed_tokens", "output": "lm_head"} | dict.fromkeys(
    ("token_embd_norm", "output_norm"),
    "model.embedding_norm",  # the first is llama.cpp's older name
)


def lfm2(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """Layers without heads of keys are convolutions."""
    heads = metadata.each_layer("attention.head_count_kv")
    metadata.put("attention.head_count_kv", max(heads))
    kinds = ["full_attention" if attends else "conv" for attends in heads]
    norm = {"norm_eps": metadata.number("attention.layer_norm_rms_epsilon")}
    return {"layer_types": kinds, "conv_L_cache": metadata.integer("shortconv.l_cache"), **norm}


IN_ROPE = ("rope_theta", "rope_scaling")  # stand in rope_parameters
HUNYUAN = LAYER | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}


def hunyuan(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """The converter makes a theta of the growth of the base, `alpha`, and writes a factor of 1 beside it."""
    metadata.expect("rope.scaling.factor", 1.0)
    metadata.take("rope.scaling.original_context_length")  # which a factor of 1 does not read
    return {}


def vision_rope(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """Frequencies of time, height and width, one for text; images come from another file, with their layers' part."""
    metadata.take("n_deepstack_layers")
    rope = scaled_rope(metadata)
    if sections := metadata.take("rope.dimension_sections"):
        rope |= {"mrope_section": sections[:3], "mrope_interleaved": metadata.architecture != "qwen2vl"}
    return {"rope_parameters": rope}


def _of(model_type: str, act: str = "silu") -> dict[str, str]:
    return {"model_type": model_type, "hidden_act": act}


_PLAIN_MLP = {name: name_of for name, name_of in LAYER.items() if name != "ffn_gate"}
_PHI = {
    **_PLAIN_MLP,
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
DENSE: Mapping[str, Architecture] = MappingProxyType(
    {
        "qwen2": Architecture(_of("qwen2")),
        "qwen3": Architecture(_of("qwen3"), with_head_dim=True),
        "olmo": Architecture(_of("olmo"), more=_olmo, without=("rms_norm_eps",), interleaved=True),
        "olmo2": Architecture(_of("olmo2"), LAYER | POST_NORMS, flags=_BIASES, more=_olmo2),
        "seed_oss": Architecture(
            _of("seed_oss"),
            LAYER | {"post_attention_norm": "post_attention_layernorm"},
            flags=_BIASES | {"attention_out_bias": "attn_output.bias", "mlp_bias": "ffn_gate.bias"},
            with_head_dim=True,
        ),
        "granite": Architecture(_of("granite"), numbers=GRANITE, flags=_BIASES, interleaved=True),
        "smollm3": Architecture(
            # every fourth layer does not rotate: the default of config.json, and llama.cpp's rule
            _of("smollm3"),
            flags=_BIASES | {"mlp_bias": "ffn_gate.bias"},
            interleaved=True,
        ),
        "mistral3": Architecture(
            _of("ministral3"),
            more=_ministral3,
            without=IN_ROPE,
            with_head_dim=True,
            interleaved=True,
        ),
        "arcee": Architecture(
            _of("arcee", "relu2"), flags=_BIASES | {"mlp_bias": "ffn_up.bias"}, with_head_dim=True, interleaved=True
        ),
        "ernie4_5": Architecture(_of("ernie4_5"), flags={"use_bias": "attn_q.bias"}, with_head_dim=True),
        "exaone4": Architecture(_of("exaone4"), LAYER | POST_NORMS, more=_exaone4, with_head_dim=True),
        "glm4": Architecture(
            _of("glm4"),
            LAYER
            | {
                "ffn_up": "mlp.gate_up_proj",
                "post_attention_norm": "post_self_attn_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
            },
            flags=_BIASES,
            more=partial_rotary,
            with_head_dim=True,
        ),
        "phi2": Architecture(
            _of("phi", "gelu_new"),
            _PHI,
            more=partial_rotary,
            epsilon="layer_norm_eps",
            top=TOP | {"output_norm": "model.final_layernorm"},
        ),
        "phi3": Architecture(_of("phi3"), LAYER | FUSED, more=phi3),
        "nemotron": Architecture(
            _of("nemotron", "relu2"),
            _PLAIN_MLP,
            flags=_BIASES | {"mlp_bias": "ffn_up.bias"},
            more=partial_rotary,
            epsilon="norm_eps",
            with_head_dim=True,
            norm_offset=1.0,
        ),
        "jais2": Architecture(
            _of("jais2", "relu2"),
            _PLAIN_MLP,
            flags=_BIASES | {"mlp_bias": "ffn_up.bias"},
            epsilon="layer_norm_eps",
            with_head_dim=True,
        ),
        "exaone": Architecture(
            {"model_type": "exaone"},
            {
                "attn_norm": "ln_1",
                **{f"attn_{name}": f"attn.attention.{name}_proj" for name in "qkv"},
                "attn_output": "attn.attention.out_proj",
                "ffn_norm": "ln_2",
                "ffn_gate": "mlp.c_fc_0",
                "ffn_up": "mlp.c_fc_1",
                "ffn_down": "mlp.c_proj",
            },
            more=_exaone,
            top={"token_embd": "transformer.wte", "output_norm": "transformer.ln_f", "output": "lm_head"},
            root="transformer.h",
        ),
        "hunyuan-dense": Architecture(
            _of("hunyuan_v1_dense"), HUNYUAN, flags=_BIASES, more=hunyuan, with_head_dim=True
        ),
        "qwen2vl": Architecture(_of("qwen2"), more=vision_rope, without=IN_ROPE),
        "qwen3vl": Architecture(_of("qwen3"), more=vision_rope, without=IN_ROPE, with_head_dim=True),
        "stablelm": Architecture(
            _of("stablelm"), flags={"use_qkv_bias": "attn_q.bias"}, more=_stablelm, epsilon="layer_norm_eps"
        ),
        "starcoder2": Architecture(
            _of("starcoder2", _TANH), LAYER | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, epsilon="norm_epsilon"
        ),
        "command-r": Architecture(
            _of("cohere"),
            numbers={"logit_scale": "logit_scale"},
            flags={"use_qk_norm": "attn_q_norm.weight"},
            epsilon="layer_norm_eps",
        ),
        "cohere2": Architecture(
            _of("cohere2"),
            numbers={"logit_scale": "logit_scale"},
            more=_cohere2,
            epsilon="layer_norm_eps",
            with_head_dim=True,
        ),
        "lfm2": Architecture({"model_type": "lfm2", "block_auto_adjust_ff_dim": False}, LFM2, more=lfm2, top=LFM2_TOP),
        "gemma": Architecture({"model_type": "gemma", "hidden_activation": _TANH}, with_head_dim=True, norm_offset=1.0),
        "gemma2": Architecture(
            {"model_type": "gemma2", "hidden_activation": _TANH},
            GEMMA,
            more=_gemma2,
            with_head_dim=True,
            norm_offset=1.0,
        ),
        "gemma3": Architecture(
            {"model_type": "gemma3_text", "hidden_activation": _TANH},
            GEMMA,
            more=gemma3,
            with_head_dim=True,
            norm_offset=1.0,
        ),
    }
)
