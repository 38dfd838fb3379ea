"""The architecture of GGUF files of Ling 2, whose files of Hugging Face have fused rows of q, k and v."""

from collections.abc import Mapping
from types import MappingProxyType

from fnmodels.errors import UnsupportedError
from fnmodels.models.common.config_json import ConfigJson

from .architecture import LAYER, TOP, Architecture
from .dense import partial_rotary
from .header import GgufFile
from .metadata import Metadata
from .routed import SIGMOID, choice, experts


def _ling(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """Experts are chosen by sigmoids with a bias."""
    if heads := metadata.count("nextn_predict_layers"):
        raise UnsupportedError(f"{file.path} has {heads} MTP heads; files of this architecture are read without any.")
    metadata.expect("expert_gating_func", SIGMOID)
    count, width = metadata.integer("expert_shared_count"), metadata.integer("expert_feed_forward_length")
    metadata.expect("expert_shared_feed_forward_length", count * width)
    return {"num_shared_experts": count, **choice(metadata), **partial_rotary(metadata, file)}


LING: Mapping[str, Architecture] = MappingProxyType(
    {
        "bailingmoe2": Architecture(
            {
                "model_type": "bailing_moe",
                "architectures": ["BailingMoeV2ForCausalLM"],
                "hidden_act": "silu",
                "score_function": "sigmoid",
            },
            LAYER
            | experts("mlp.gate", "mlp.shared_experts", "mlp.gate.expert_bias")
            | {
                "attn_qkv": "attention.query_key_value",
                "attn_output": "attention.dense",
                "attn_q_norm": "attention.query_layernorm",
                "attn_k_norm": "attention.key_layernorm",
            },
            {
                "num_experts": "expert_count",
                "num_experts_per_tok": "expert_used_count",
                "moe_intermediate_size": "expert_feed_forward_length",
                "first_k_dense_replace": "leading_dense_block_count",
            },
            flags={
                "use_qk_norm": "attn_q_norm.weight",
                "use_qkv_bias": "attn_qkv.bias",
                "use_bias": "attn_output.bias",
            },
            more=_ling,
            with_head_dim=True,
            top=TOP | {"token_embd": "model.word_embeddings"},
        ),
    }
)
