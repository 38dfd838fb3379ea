"""Tiny configurations of RoFormer with its masked-LM head, and published sizes; other heads: parity/test_heads.py."""

from typing import Any

from tests.variants import bert

NO_FILE = {"roformer": "no published file is at hand; these are the defaults of transformers"}
LEFT_OUT = {"roformer": ("embed_positions.weight",)}  # sines and cosines, which are computed here
SEPARATE = {
    "packed": "its masks do not tell documents apart",
    "roformer_narrow_values left": "values turn by the index in the row",
}

TINY: dict[str, Any] = bert.TINY | {
    "architectures": ["RoFormerForMaskedLM"],
    "model_type": "roformer",
    "num_attention_heads": 2,
    "intermediate_size": 36,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"roformer": TINY, "roformer_narrow_values": TINY | {"embedding_size": 20, "rotary_value": True}}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the base model: the defaults of transformers."""
    return {
        "roformer_base": {
            "architectures": ["RoFormerForMaskedLM"],
            "attention_probs_dropout_prob": 0.1,
            "embedding_size": 768,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "hidden_size": 768,
            "initializer_range": 0.02,
            "intermediate_size": 3072,
            "layer_norm_eps": 1e-12,
            "max_position_embeddings": 1536,
            "model_type": "roformer",
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "pad_token_id": 0,
            "rotary_value": False,
            "type_vocab_size": 2,
            "use_cache": True,
            "vocab_size": 50000,
        }
    }


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"roformer_base": TOTALS["roformer-chinese-base"]}


# Parameter counts of the presets, which transformers' models of these configs have without the table of sines.
TOTALS: dict[str, int] = {"roformer-chinese-base": 124_099_664, "roformer-chinese-small": 17_196_368}

# Fields refused at any changed value: no published encoder has them.
REFUSED = {"roformer": {"add_cross_attention", "is_decoder", "tie_word_embeddings"}}


def as_published(state: dict[str, Any], config: Any) -> dict[str, Any]:
    """Without the table of sines and cosines, which a file may lack."""
    return {name: tensor for name, tensor in state.items() if not name.endswith(LEFT_OUT["roformer"])}
