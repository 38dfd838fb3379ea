"""Tiny configurations of Mamba 2, one per way in which its maths can differ, and its published sizes."""

import json
from typing import Any

TINY: dict[str, Any] = {
    "model_type": "mamba2",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 16,
    "n_groups": 2,
    "state_size": 12,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-2,
    "chunk_size": 8,
    "tie_word_embeddings": True,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    own = {"use_bias": True, "use_conv_bias": False, "n_groups": 1, "conv_kernel": 3, "expand": 3, "num_heads": 6}
    limited = {"time_step_limit": [0.3, 1.0], "tie_word_embeddings": False}  # which transformers' decode ignores
    first = {name: value for name, value in TINY.items() if name not in ("num_heads", "head_dim", "n_groups")}
    first = {name: value for name, value in first.items() if name != "chunk_size"} | {"time_step_rank": 5}
    bias = {"use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "tie_word_embeddings": False}
    return {
        "mamba2": TINY,
        "mamba2_bias_untied": TINY | own | limited,
        "mamba": first | {"model_type": "mamba"},
        "falcon_mamba": first | bias | {"model_type": "falcon_mamba", "mixer_rms_eps": 1e-2},
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published member."""
    falcon: dict[str, Any] = {
        "architectures": ["FalconMambaForCausalLM"],
        "model_type": "falcon_mamba",
        "vocab_size": 65024,
        "hidden_size": 4096,
        "intermediate_size": 8192,
        "num_hidden_layers": 64,
        "state_size": 16,
        "time_step_rank": 256,
        "conv_kernel": 4,
        "expand": 2,
        "layer_norm_epsilon": 1e-5,
        "mixer_rms_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    mamba: dict[str, Any] = {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "vocab_size": 50280,
        "hidden_size": 2560,
        "intermediate_size": 5120,
        "d_inner": 5120,
        "num_hidden_layers": 64,
        "state_size": 16,
        "time_step_rank": 160,
        "conv_kernel": 4,
        "expand": 2,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 8,
        "rms_norm": True,
        "ssm_cfg": {},
    }
    return {"mamba_codestral_7b": FILES["mamba-codestral-7b"], "falcon_mamba_7b": falcon, "mamba_2_8b": mamba}


def sizes() -> dict[str, int]:
    """{name of a published member: how many parameters it has, as published}."""
    of_layer = {  # width D, channels 2 D, rank D / 16, 16 numbers of state
        D: D
        + 2 * D * 2 * D
        + 2 * D * 5
        + (D // 16 + 32) * 2 * D
        + 2 * D * (D // 16)
        + 2 * D
        + 16 * 2 * D
        + 2 * D
        + 2 * D * D
        for D in (4096, 2560)
    }
    falcon = 2 * 65024 * 4096 + 4096 + 64 * of_layer[4096]
    return {
        "mamba_codestral_7b": 7_285_403_648,
        "falcon_mamba_7b": falcon,
        "mamba_2_8b": 50280 * 2560 + 2560 + 64 * of_layer[2560],
    }


SEPARATE = {
    "packed": "the convolution and the state run on from one document into the next",
    "left": "a bias of the projection before the convolution is seen in padding",
}
BLIND = {
    "mamba2": {"mixer.limits"},
    "mamba": {"mixer.norm_eps"},
}

TOTALS: dict[str, int | str] = {
    "mamba2-130m": 128_989_632,
    "mamba2-2.7b": 2_702_599_680,
    "mamba-codestral-7b": 7_285_403_648,
    "falcon-mamba-7b": 7_272_665_088,
    "mamba-2.8b": 2_768_345_600,
    "mamba-130m": 129_135_360,
}

FILES: dict[str, dict[str, Any]] = json.loads("""{
  "mamba-codestral-7b": {
    "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "bos_token_id": 0, "chunk_size": 256,
    "conv_kernel": 4, "eos_token_id": 0, "expand": 2, "head_dim": 64, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.1, "intermediate_size": 8192, "layer_norm_epsilon": 1e-05, "n_groups": 8,
    "norm_before_gate": true, "num_heads": 128, "num_hidden_layers": 64, "pad_token_id": 0,
    "rescale_prenorm_residual": false, "residual_in_fp32": true, "rms_norm": true, "state_size": 128,
    "tie_word_embeddings": false, "time_step_floor": 0.0001, "time_step_init_scheme": "random",
    "time_step_limit": [0.0, Infinity], "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256,
    "time_step_scale": 1.0, "torch_dtype": "bfloat16", "transformers_version": "4.44.0.dev0", "use_bias": false,
    "use_cache": true, "use_conv_bias": true, "vocab_size": 32768
  }
}""")
