"""Architectures of GGUF files of T5, both stacks or the encoder alone; the layers of each have names of their own."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fnmodels.models.common.config_json import ConfigJson

from .architecture import Architecture, Names
from .header import GgufFile
from .metadata import Metadata, vocabulary

_TOP = {"token_embd": "shared", "output": "lm_head"}
_TOP |= {"enc.output_norm": "encoder.final_layer_norm", "dec.output_norm": "decoder.final_layer_norm"}


def _attention(place: int, before: str, module: str) -> dict[str, str]:
    names = {f"{before}_{name}": f"layer.{place}.{module}.{name}" for name in "qkvo"}
    return names | {f"{before}_norm": f"layer.{place}.layer_norm"}


def _mlp(place: int, gated: bool) -> dict[str, str]:
    module = f"layer.{place}.DenseReluDense"
    names = {"ffn_norm": f"layer.{place}.layer_norm", "ffn_down": f"{module}.wo"}
    return names | {"ffn_up": f"{module}.wi_1" if gated else f"{module}.wi", "ffn_gate": f"{module}.wi_0"}


def _names(values: Mapping[str, Any]) -> Names:
    """Of the tensors of each layer of both stacks."""
    gated = values["feed_forward_proj"].startswith("gated")
    own = _attention(0, "attn", "SelfAttention")
    own |= {"attn_rel_b": "layer.0.SelfAttention.relative_attention_bias"}
    stacks = {
        "enc": ("encoder", values["num_layers"], own | _mlp(1, gated)),
        "dec": (
            "decoder",
            values.get("num_decoder_layers", 0),
            own | _attention(1, "cross_attn", "EncDecAttention") | _mlp(2, gated),
        ),
    }
    return {
        f"{stack}.blk.{i}.{name}": f"{where}.block.{i}.{inner}"
        for stack, (where, count, names) in stacks.items()
        for i in range(count)
        for name, inner in names.items()
    }


def _sizes(metadata: Metadata, epsilon: str) -> ConfigJson:
    """The fields of both forms. A length limits nothing, for distances from 128 on are one."""
    metadata.take("context_length")
    metadata.take("attention.layer_norm_epsilon")
    width = metadata.integer("attention.key_length")
    metadata.expect("attention.value_length", width)
    return {
        **vocabulary(metadata),
        "d_model": metadata.integer("embedding_length"),
        "d_kv": width,
        "d_ff": metadata.integer("feed_forward_length"),
        "num_layers": metadata.layers,
        "num_heads": metadata.integer("attention.head_count"),
        "relative_attention_num_buckets": metadata.integer("attention.relative_buckets_count"),
        "layer_norm_epsilon": metadata.number(epsilon),
    }


def _form(file: GgufFile, end: str) -> ConfigJson:
    """Each layer of umT5 has a table of biases; MLPs with a gate are GELU's, others are ReLU's."""
    own = "UMT5" if "enc.blk.1.attn_rel_b.weight" in file.tensors else "T5"
    gated = "enc.blk.0.ffn_gate.weight" in file.tensors
    return {
        "model_type": own.lower(),
        "architectures": [f"{own}{end}"],
        "feed_forward_proj": "gated-gelu" if gated else "relu",
    }


def _both(metadata: Metadata, file: GgufFile) -> ConfigJson:
    return {
        **_form(file, "ForConditionalGeneration"),
        "num_decoder_layers": metadata.integer("decoder_block_count", metadata.layers),
        "decoder_start_token_id": metadata.count("decoder_start_token_id"),
    }


def _encoder(metadata: Metadata, file: GgufFile) -> ConfigJson:
    return _form(file, "EncoderModel")


ENCODER_DECODERS: Mapping[str, Architecture] = MappingProxyType(
    {
        "t5": Architecture({}, {}, more=_both, sized=_names, top=_TOP, base=_sizes),
        "t5encoder": Architecture(
            {}, {}, more=_encoder, sized=_names, top=_TOP, base=_sizes, without=("tie_word_embeddings",)
        ),
    }
)
