"""Tiny configurations of Ouro, one per way in which its maths can differ, and its published sizes.

transformers has no code of it: tests/fnmodels/models/test_ouro.py compares with a written-out reference.
"""

from typing import Any

from fnmodels.models.decoder import ouro

NO_FILE = {"ouro": "the published file is not at hand; sizes and names are those of its remote code and of its users"}
# Refused whatever they say: windows, which no published model has, and an exit after a fixed pass.
REFUSED = {"ouro": {"use_sliding_window", "early_exit_step"}}

TINY: dict[str, Any] = {
    "model_type": "ouro",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "total_ut_steps": 3,
    "early_exit_threshold": 1.0,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,  # so that errors of fp32 do not grow with the passes
    "rope_theta": 1e4,
}


def variants() -> dict[str, Any]:
    """{name: Config}: transformers does not read these files."""
    deep = {"num_hidden_layers": 1, "total_ut_steps": 2, "tie_word_embeddings": True}
    files = {
        "ouro": TINY,
        "ouro_expected": TINY | {"exit": "expected"},
        "ouro_threshold": TINY | deep | {"early_exit_threshold": 0.5},
    }
    return {name: ouro.Config.from_hf(values) for name, values in files.items()}


# The last state is read whatever the threshold, and so is the expected one.
BLIND = {"ouro": {"exit_threshold"}, "ouro_expected": {"exit_threshold"}}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the published models."""
    own = {"architectures": ["OuroForCausalLM"], "vocab_size": 49152, "hidden_size": 2048, "intermediate_size": 5632}
    own |= {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128, "hidden_act": "silu"}
    own |= {"max_position_embeddings": 65536, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": None}
    own |= {"total_ut_steps": 4, "early_exit_threshold": 1.0, "use_sliding_window": False, "sliding_window": None}
    own |= {"initializer_range": 0.02, "attention_dropout": 0.0, "tie_word_embeddings": False, "use_cache": True}
    auto = {"AutoConfig": "configuration_ouro.OuroConfig", "AutoModelForCausalLM": "modeling_ouro.OuroForCausalLM"}
    own |= {"model_type": "ouro", "auto_map": auto}

    def layers(n: int) -> dict[str, Any]:
        return {"num_hidden_layers": n, "max_window_layers": n, "layer_types": ["full_attention"] * n}

    return {"ouro_1_4b": own | layers(24), "ouro_2_6b": own | layers(48)}


def sizes() -> dict[str, int]:
    """{name: number of parameters}, counted from the shapes of the published tensors."""
    D = 2048
    each, around = 4 * D * D + 3 * D * 5632 + 4 * D, 2 * 49152 * D + D + D + 1
    return {"ouro_1_4b": 24 * each + around, "ouro_2_6b": 48 * each + around}


TOTALS: dict[str, int | str] = {"ouro-1.4b": sizes()["ouro_1_4b"], "ouro-2.6b": sizes()["ouro_2_6b"]}
