"""Tiny configurations of the Llama family, one per variation of its maths, and its published sizes.

Adjacent dimensions differ where possible. The original context is 16, which 24 tokens exceed.
"""

import json
from typing import Any

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-2,
    "tie_word_embeddings": False,
}


def _llama(**changes: Any) -> dict[str, Any]:
    return {"model_type": "llama", **TINY, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, **changes}


def _scaled(rope_type: str, **rope: Any) -> dict[str, Any]:
    # theta 100 spreads the four frequencies of a small head over the range in which yarn and llama3 interpolate
    return _llama(rope_parameters={"rope_type": rope_type, "rope_theta": 100.0, **rope}, max_position_embeddings=64)


def _other(model_type: str, **changes: Any) -> dict[str, Any]:
    return _llama(**changes) | {"model_type": model_type}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    old = {"original_max_position_embeddings": 16}
    yarn = {"factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.5, "original_max_position_embeddings": 64}  # pairs 2 to 6
    wide = {"head_dim": 16}
    long = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.2, 2.0, 3.5, 5.0]}
    uneven = {"hidden_size": 42, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # smollm3's defaults are outside of this vocabulary
    undropped = {"attention_dropout": 0.0, "residual_dropout": 0.0}
    return {
        "llama": _llama(),
        "llama_tied": _llama(tie_word_embeddings=True),
        "llama_attention_bias": _llama(attention_bias=True),
        "llama_mlp_bias": _llama(mlp_bias=True, hidden_act="gelu_pytorch_tanh"),
        "llama_head_dim": _llama(**uneven),
        "llama_ungrouped": _llama(num_key_value_heads=4, num_hidden_layers=1),
        "llama_linear": _scaled("linear", factor=3.0),
        "llama_dynamic": _scaled("dynamic", factor=3.0) | {"max_position_embeddings": 16},
        "llama_llama3": _scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **old),
        "llama_yarn": _scaled("yarn", **yarn) | wide,
        "llama_yarn_mscale": _scaled("yarn", **yarn, mscale=1.3, mscale_all_dim=0.6) | wide,
        "llama_yarn_smooth": _scaled("yarn", **yarn, truncate=False) | wide,
        "llama_yarn_factor": _scaled("yarn", **yarn, attention_factor=1.4) | wide,
        "llama_longrope_short": _scaled("longrope", factor=4.0, original_max_position_embeddings=32, **long),
        "llama_longrope_long": _scaled("longrope", factor=4.0, **old, **long),
        "llama_longrope_factor": _scaled("longrope", attention_factor=1.2, **old, **long),
        "mistral": _other("mistral", sliding_window=None, head_dim=10),
        "mistral_sliding": _other("mistral", sliding_window=5),
        "ministral": _other(
            "ministral",
            head_dim=10,
            sliding_window=5,
            num_hidden_layers=3,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        "qwen2": _other("qwen2", use_sliding_window=False),
        "qwen2_sliding": _other(
            "qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1, num_hidden_layers=3
        ),
        "qwen2_layer_types": _other(
            "qwen2",
            use_sliding_window=True,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
            tie_word_embeddings=True,
        ),
        "qwen3": _other("qwen3", head_dim=12),
        "qwen3_bias_sliding": _other(
            "qwen3", head_dim=8, attention_bias=True, use_sliding_window=True, sliding_window=7, max_window_layers=1
        ),
        "smollm3": _other("smollm3", num_hidden_layers=4, tie_word_embeddings=True, **ids),
        "smollm3_sliding": _other(
            "smollm3",
            num_hidden_layers=3,
            no_rope_layers=[1, 0, 1],
            use_sliding_window=True,
            sliding_window=5,
            attention_bias=True,
            mlp_bias=True,
            **ids,
        ),
        "seed_oss": _other("seed_oss", head_dim=12, **undropped, **ids),
        "seed_oss_o_bias": _other(
            "seed_oss", attention_bias=False, attention_out_bias=True, mlp_bias=True, **undropped, **ids
        ),
        "exaone": _other("exaone", attention_bias=True, **ids),
        "internlm3": _other("internlm3", head_dim=12, **ids),
        "iquestcoder": _other("iquestcoder", head_dim=10, mlp_bias=True, **ids),
        "cwm": _other("cwm", head_dim=12, sliding_window=5, **ids),
    }


_EXAONE: dict[str, Any] = {
    "activation_function": "silu",
    "architectures": ["ExaoneForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "embed_dropout": 0.0,
    "eos_token_id": 361,
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 4096,
    "model_type": "exaone",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_layers": 32,
    "pad_token_id": 0,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 102400,
}
_INTERNLM3: dict[str, Any] = {
    "architectures": ["InternLM3ForCausalLM"],
    "bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10240,
    "max_position_embeddings": 32768,
    "model_type": "internlm3",
    "num_attention_heads": 32,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "qkv_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"},
    "rope_theta": 50000000,
    "tie_word_embeddings": False,
    "vocab_size": 128512,
}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published models and of some whose files have fields of their own."""
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {
        "exaone_3_7_8b": _EXAONE,
        "internlm3_8b": _INTERNLM3,
        "llama_3_3_70b": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_scaling": {"rope_type": "llama3", **llama3},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "pretraining_tp": 1,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        },
        "qwen2_5_72b": {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": 152064,
            "hidden_size": 8192,
            "intermediate_size": 29568,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32768,
            "max_window_layers": 70,
            "sliding_window": 131072,
            "use_sliding_window": False,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": False,
        },
        "qwen2_5_0_5b": {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "eos_token_id": 151643,
            "vocab_size": 151936,
            "hidden_act": "silu",
            "hidden_size": 896,
            "initializer_range": 0.02,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 24,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.40.1",
            "use_cache": True,
            "use_mrope": False,
            "use_sliding_window": False,
        },
        "smollm2_135m": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "vocab_size": 49152,
            "hidden_act": "silu",
            "hidden_size": 576,
            "initializer_range": 0.041666666666666664,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-5,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "use_cache": True,
        },
        "smollm3_3b": {
            "architectures": ["SmolLM3ForCausalLM"],
            "model_type": "smollm3",
            "attention_bias": False,
            "vocab_size": 128256,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "max_position_embeddings": 65536,
            "max_window_layers": 28,
            "mlp_bias": False,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [int((i + 1) % 4 != 0) for i in range(36)],
            "pretraining_tp": 2,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        "seed_oss_36b": {
            "architectures": ["SeedOssForCausalLM"],
            "model_type": "seed_oss",
            "attention_bias": True,
            "attention_dropout": 0.1,
            "attention_out_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "initializer_range": 0.02,
            "intermediate_size": 27648,
            "max_position_embeddings": 524288,
            "mlp_bias": False,
            "num_attention_heads": 80,
            "num_hidden_layers": 64,
            "num_key_value_heads": 8,
            "pad_token_id": 1,
            "residual_dropout": 0.1,
            "rms_norm_eps": 1e-6,
            "rope_scaling": {"rope_type": "default"},
            "rope_theta": 10000000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.55.0",
            "use_cache": True,
            "vocab_size": 155136,
        },
    }


def sizes() -> dict[str, int]:
    """{name of a published model: its published number of parameters}."""
    return {
        "exaone_3_7_8b": 7_818_448_896,
        "internlm3_8b": 8_804_241_408,
        "llama_3_3_70b": 70_553_706_496,
        "qwen2_5_72b": 72_706_203_648,
        "qwen2_5_0_5b": 494_032_768,
        "smollm2_135m": 134_515_008,
        "smollm3_3b": 3_075_098_624,
        "seed_oss_36b": 36_151_104_512,
    }


# Published parameter counts of the presets.
TOTALS: dict[str, int | str] = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "ministral-8b": 8_019_808_256,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "smollm3-3b": 3_075_098_624,
    "seed-oss-36b": 36_151_104_512,
    "exaone-3.0-7.8b": 7_818_448_896,
    "internlm3-8b": 8_804_241_408,
    "falcon3-1b": 1_669_408_768,
    "falcon3-3b": 3_227_655_168,
    "falcon3-7b": 7_455_550_464,
    "falcon3-10b": 10_305_653_760,
}

# The complete published config.json files of presets.
FILES: dict[str, dict[str, Any]] = json.loads("""{
  "llama-3.2-1b": {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false,
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings":
    true, "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256
  },
  "llama-2-7b": {
    "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "model_type": "llama",
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null,
    "tie_word_embeddings": false, "torch_dtype": "float16", "transformers_version": "4.31.0.dev0", "use_cache":
    true, "vocab_size": 32000
  },
  "llama-3-8b": {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range":
    0.02, "intermediate_size": 14336, "max_position_embeddings": 8192, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling":
    null, "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version":
    "4.40.0.dev0", "use_cache": true, "vocab_size": 128256
  },
  "smollm2-135m": {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576, "initializer_range":
    0.041666666666666664, "intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192,
    "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null, "rope_theta": 100000,
    "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": true,
    "vocab_size": 49152
  },
  "mistral-7b-v0.1": {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": true, "vocab_size": 32000
  },
  "qwen2.5-0.5b": {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
    "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24, "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version":
    "4.40.1", "use_cache": true, "use_mrope": false, "use_sliding_window": false, "vocab_size": 151936
  },
  "qwen3-0.6b": {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
    "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true, "torch_dtype":
    "bfloat16", "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false, "vocab_size":
    151936
  },
  "smollm3-3b": {
    "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "attention_bias": false, "attention_dropout":
    0.0, "bos_token_id": null, "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 11008, "layer_types": ["full_attention", "full_attention",
    "full_attention", "full_attention", "full_attention", "full_attention", "full_attention", "full_attention",
    "full_attention", "full_attention", "full_attention", "full_attention", "full_attention", "full_attention",
    "full_attention", "full_attention", "full_attention", "full_attention", "full_attention", "full_attention",
    "full_attention", "full_attention", "full_attention", "full_attention", "full_attention", "full_attention",
    "full_attention", "full_attention", "full_attention", "full_attention", "full_attention", "full_attention",
    "full_attention", "full_attention", "full_attention", "full_attention"], "max_position_embeddings": 65536,
    "max_window_layers": 28, "mlp_bias": false, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0, 1, 1, 1,
    0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0], "num_attention_heads":
    16, "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2,
    "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 5000000.0, "sliding_window": null, "torch_dtype":
    "bfloat16", "transformers_version": "4.54.0.dev0", "use_cache": false, "use_sliding_window": false,
    "vocab_size": 128256
  }
}""")

# Fields refused at any changed value: alone they contradict other fields, or no published model has them.
REFUSED = {
    "smollm3": {"num_hidden_layers", "use_sliding_window"},
}

NO_FILE = {"ministral": "published within a wrapper's text_config"}
NO_FILE |= dict.fromkeys(
    ("cwm", "iquestcoder"),
    "no copy is at hand; one that transformers writes is read in test_release_configs.py",
)
