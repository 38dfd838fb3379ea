"""Architectures of GGUF files of encoders, which give hidden states: files have no heads, and no pooler of BERT's."""

from collections.abc import Mapping
from types import MappingProxyType

from fnmodels.models.common.config_json import ConfigJson

from .architecture import LAYER, Architecture
from .header import GgufFile
from .metadata import Metadata, scaled_rope

_BERT_TOP = {
    "token_embd": "embeddings.word_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
}
_SIZES = ("tie_word_embeddings", "num_key_value_heads")
_MODERN = ("rope_theta", "rope_scaling", "num_key_value_heads")


def _both_ways(metadata: Metadata) -> None:
    """A token sees those behind it too."""
    metadata.expect("attention.causal", False)


def _bert(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """RoBERTa's rows of positions begin with those of tokens in the file, so that its models are BERT's in all."""
    _both_ways(metadata)
    types = file.tensors.get("token_types.weight")
    count = 0 if types is None else 1 if len(types.shape) == 1 else types.shape[0]  # llama-quantize drops a size of 1
    return {"type_vocab_size": count}


def _nomic(metadata: Metadata, file: GgufFile) -> ConfigJson:
    return {**_bert(metadata, file), "rope_parameters": scaled_rope(metadata)}


def _modern(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """The first layer of each group sees all tokens."""
    _both_ways(metadata)
    every = metadata.integer("attention.sliding_window_pattern", 3)
    sliding = [i % every != 0 for i in range(metadata.layers)]
    ropes = {"full_attention": "rope.freq_base", "sliding_attention": "rope.freq_base_swa"}
    thetas = {"full_attention": 160000.0, "sliding_attention": 10000.0}
    return {
        "layer_types": ["sliding_attention" if near else "full_attention" for near in sliding],
        "local_attention": metadata.integer("attention.sliding_window"),
        "hidden_activation": metadata.take("hidden_activation", "gelu"),
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": metadata.number(key, thetas[kind])}
            for kind, key in ropes.items()
        },
    }


def _euro(metadata: Metadata, file: GgufFile) -> ConfigJson:
    _both_ways(metadata)
    return {}


ENCODERS: Mapping[str, Architecture] = MappingProxyType(
    {
        "bert": Architecture(
            {"model_type": "bert", "architectures": ["BertModel"], "hidden_act": "gelu"},
            {
                "attn_q": "attention.self.query",
                "attn_k": "attention.self.key",
                "attn_v": "attention.self.value",
                "attn_output": "attention.output.dense",
                "attn_output_norm": "attention.output.LayerNorm",
                "ffn_up": "intermediate.dense",
                "ffn_down": "output.dense",
                "layer_output_norm": "output.LayerNorm",
            },
            more=_bert,
            epsilon="layer_norm_eps",
            without=("rope_theta", "rope_scaling", *_SIZES),
            top=_BERT_TOP,
            root="encoder.layer",
        ),
        "nomic-bert": Architecture(
            {"model_type": "nomic_bert", "architectures": ["NomicBertModel"], "hidden_act": "silu"},
            {
                "attn_qkv": "attn.Wqkv",
                "attn_output": "attn.out_proj",
                "attn_output_norm": "norm1",
                "ffn_up": "mlp.fc11",
                "ffn_gate": "mlp.fc12",
                "ffn_down": "mlp.fc2",
                "layer_output_norm": "norm2",
            },
            more=_nomic,
            epsilon="layer_norm_eps",
            without=("rope_theta", "rope_scaling", *_SIZES),
            top=_BERT_TOP | {"token_embd_norm": "emb_ln"},
            root="encoder.layers",
        ),
        "modern-bert": Architecture(
            {"model_type": "modernbert", "architectures": ["ModernBertModel"]},
            {
                "attn_norm": "attn_norm",
                "attn_qkv": "attn.Wqkv",
                "attn_output": "attn.Wo",
                "ffn_norm": "mlp_norm",
                "ffn_up": "mlp.Wi",
                "ffn_down": "mlp.Wo",
            },
            more=_modern,
            epsilon="norm_eps",
            without=_MODERN,
            top={
                "token_embd": "embeddings.tok_embeddings",
                "token_embd_norm": "embeddings.norm",
                "output_norm": "final_norm",
            },
            root="layers",
        ),
        "eurobert": Architecture(
            {"model_type": "eurobert", "architectures": ["EuroBertModel"], "hidden_act": "silu"}
            | {"tie_word_embeddings": False},
            LAYER,
            more=_euro,
            top={"token_embd": "embed_tokens", "output_norm": "norm"},
            root="layers",
        ),
    }
)
