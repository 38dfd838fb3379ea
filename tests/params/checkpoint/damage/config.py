"""Damaged config.json files: invalid JSON, unknown, impossible or contradictory values, sizes unlike the tensors'."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import params as P
from tests.params.checkpoint.damage.ways import (
    CONFIG,
    FILE,
    NAME,
    SPECIAL,
    Damage,
    Do,
    configured,
    deleted,
    in_bytes,
    in_json,
    in_turn,
    instead,
    linked_out,
    raw,
    with_rope,
    without,
)


def cases() -> Iterator[Damage]:
    """Every case of this group."""
    for kind, table in _REFUSED.items():
        for what, (do, *words) in table.items():
            yield Damage(what, do, kind, (CONFIG, *words))
    for field, values in _VALUES.items():
        for value in values:
            label = "10^400" if value == _HUGE else repr(value)
            yield Damage(f"{field} {label}", configured(**{field: value}), P.ConfigError, (CONFIG, repr(field)))
    for value in (0, -2.0, float("nan"), "2", True, None):
        factor = with_rope(rope_type="linear", factor=value)
        yield Damage(f"a rope's factor {value!r}", factor, P.ConfigError, (CONFIG, "'factor'"))
    for field in _NEEDED:
        yield Damage(f"no {field}", without(field), P.ConfigError, (CONFIG, repr(field), "which is needed"))
    for base, table in _OTHERS.items():
        for what, (do, kind, *words) in table.items():
            yield Damage(what, do, kind, (CONFIG, *words), base)
    for what, make in SPECIAL.items():
        words = (CONFIG, "is not a regular file")
        yield Damage(f"{what} for the file", instead(make, CONFIG), P.UnsafePathError, words)
    for what, do in _GOOD.items():
        yield Damage(f"good: {what}", do)
    for value in (False, None):
        causal = configured(use_bidirectional_attention=value)
        yield Damage(f"good: use_bidirectional_attention {value!r}", causal, base="gemma")
    patterns = configured(sliding_window_pattern=2, _sliding_window_pattern=2)
    yield Damage("good: two patterns that are one", patterns, base="cohere2")
    yield Damage("good: a default pattern beside layer_types", configured(_sliding_window_pattern=4), base="cohere2")
    same = configured(hidden_size=16, num_hidden_layers=2, max_position_embeddings=32)
    yield Damage("good: equal aliases", same, base="gpt2")


def _keys(count: int, twice: int) -> bytes:
    """A JSON object with many keys, one of them twice."""
    return b"{" + b", ".join(b'"k%d": 0' % i for i in (*range(count), twice)) + b"}"


def _older(config: dict[str, Any]) -> None:
    del config["rope_parameters"]
    config.update(rope_theta=10000.0, torch_dtype=config.pop("dtype"))


def _quantized(method: str) -> Do:
    return configured(quantization_config={"quant_method": method})


_HUGE, _NAN, _INF = 10**400, float("nan"), float("inf")
_NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "model_type")
_VALUES: dict[str, tuple[Any, ...]] = {
    "vocab_size": (-40, 0, _NAN, "40"),
    "hidden_size": (0, 1e30, 16.0),
    "intermediate_size": ("24", _HUGE, -1),
    "num_hidden_layers": (2.0, 10**7, 0, -2),
    "num_attention_heads": (True, 0, -2),
    "num_key_value_heads": ([1], -1),
    "head_dim": (-8, 1 << 40),
    "max_position_embeddings": ({}, _INF, 0),
    "rms_norm_eps": (0, -1e-6, _NAN, _INF, "1e-6", True, _HUGE),
    "rope_theta": (0, -1e4, "10000", _NAN, [1e4]),
    "initializer_range": (-0.02, "0.02"),
    "tie_word_embeddings": ("false", 0),
    "attention_bias": ("true", 1),
    "mlp_bias": ([], 0.0),
    "hidden_act": (["silu"], 3),
    "model_type": (3, None, ["llama"], {}, True),
    "architectures": ("LlamaForCausalLM", 3, [3], [["LlamaForCausalLM"]], {}),
    "eos_token_id": ("</s>", [1, "2"], 1.5, True, 10**9, [1, -5]),
    "bos_token_id": (-5, 1 << 31),
    "dtype": (32, ["float32"]),
    "rope_parameters": ([], "linear"),
    "rope_scaling": (["linear"], 2.0),
}
_JSON, _GPT2 = "not valid JSON", "'architectures' has 'GPT2LMHeadModel'"
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 16}
_REFUSED: dict[type[Exception], dict[str, tuple[Any, ...]]] = {
    P.FormatError: {
        "an empty file": (raw(b"", CONFIG), _JSON),
        "no JSON": (raw(b"model_type: llama", CONFIG), _JSON),
        "zeros": (raw(bytes(500), CONFIG), _JSON),
        "cut short": (in_bytes(lambda data: data[:-20], CONFIG), _JSON),
        "a byte order mark": (in_bytes(lambda data: b"\xef\xbb\xbf" + data, CONFIG), _JSON),
        "UTF-16": (in_bytes(lambda data: data.decode().encode("utf-16"), CONFIG), _JSON),
        "a comma too many": (in_bytes(lambda data: data.rstrip()[:-1] + b",}", CONFIG), _JSON),
        "a key twice": (
            in_bytes(lambda data: b'{"model_type": "gpt2",' + data[1:], CONFIG),
            "'model_type' is there twice",
        ),
        "20,000 keys, the last of them twice": (raw(_keys(20_000, 19_999), CONFIG), "'k19999' is there twice"),
        "nested": (raw(b'{"a":' + b"[" * 100_000, CONFIG), "nested too deeply"),
        "20 MB": (raw(b" " * 20_000_000 + b"{}", CONFIG), "20,000,002 bytes"),
    },
    P.ConfigError: {
        **{
            f"the file is {text}": (raw(text.encode(), CONFIG), "a JSON object")
            for text in ("null", "[]", '"llama"', "1")
        },
        "an empty object": (raw(b"{}", CONFIG), "'model_type'", "which is needed"),
        "the architecture of GPT-2 in a llama": (configured(architectures=["GPT2LMHeadModel"]), "'llama'", _GPT2),
        "the architecture of Qwen 2 in a llama": (configured(architectures=["Qwen2ForCausalLM"]), "'llama'", "qwen2"),
        "the model_type of GPT-2 for a llama": (configured(model_type="gpt2"), "fields this family does not know"),
        "an empty quantization": (configured(quantization_config={}), "'quant_method', which is needed"),
        "a quantization that is a string": (configured(quantization_config="fp8"), "quantization_config", '"fp8"'),
        "a quantization in blocks of 2^64": (
            configured(quantization_config={"quant_method": "fp8", "weight_block_size": [1 << 64, 128]}),
            *("'weight_block_size' is [18446744073709551616, 128]", "must be two sizes"),
        ),
        "two architectures": (configured(architectures=["LlamaForCausalLM", "Qwen2ForCausalLM"]), "Qwen2ForCausalLM"),
        "heads that do not divide": (
            in_turn(configured(num_attention_heads=3), without("head_dim")),
            "'hidden_size' 16 is not a multiple of 'num_attention_heads' 3",
        ),
        "kv heads that do not divide": (
            configured(num_attention_heads=3, num_key_value_heads=2),
            *("num_attention_heads 3 is not a multiple of", "num_key_value_heads 2"),
        ),
        "an odd head": (configured(head_dim=7), "7 of 7 head dimensions", "even"),
        "200,000 unknown fields": (
            in_json(CONFIG, lambda config: config.update({f"k{i}": 0 for i in range(200_000)})),
            *("k0 = 0, k1 = 0,", "and 199,980 more"),
        ),
        "a list of 3,000,000 for a number": (configured(hidden_size=[0] * 3_000_000), "'hidden_size' is [0, 0,"),
        "an unknown field": (configured(logit_wobble=0.5), "logit_wobble = 0.5", "may change the maths"),
        "a field that is no text": (configured(**{"\ud800\x1b[2J": 1}), "\\ud800\\u001b[2J = 1"),
        "dtype and torch_dtype that disagree": (configured(dtype="float32", torch_dtype="bfloat16"), "disagree"),
        "a rope that is a number": (with_rope(rope_type=3), "'rope_type' is 3"),
        "a rope with another's key": (with_rope(rope_type="linear", factor=2.0, beta_fast=32), "beta_fast = 32"),
        "rope_type and type that disagree": (with_rope(rope_type="linear", type="dynamic", factor=2.0), "disagree"),
        "two thetas that disagree": (configured(rope_theta=500.0), "'rope_theta' is 500.0 at the top and 10000.0"),
        "two ropes that disagree": (configured(rope_scaling={"rope_type": "linear", "factor": 2.0}), "disagree"),
        "llama3's bounds reversed": (with_rope(rope_type="llama3", **_LLAMA3), "'low_freq_factor' must not be above"),
        "llama3's bounds missing": (with_rope(rope_type="llama3", factor=8.0), "'low_freq_factor', which is needed"),
        "longrope with too few factors": (
            with_rope(rope_type="longrope", factor=2.0, short_factor=[1.0], long_factor=[1.0]),
            *("'short_factor'", "a list of 4 positive numbers"),
        ),
        "longrope with a factor of zero": (
            with_rope(rope_type="longrope", factor=2.0, short_factor=[1.0] * 4, long_factor=[1.0, 1.0, 0.0, 1.0]),
            *("'long_factor'", "a list of 4 positive numbers"),
        ),
        "yarn with a negative bound": (with_rope(rope_type="yarn", factor=2.0, beta_fast=-1), "'beta_fast' is -1"),
    },
    P.UnsupportedError: {
        **{f"the model type {name!r}": (configured(model_type=name), repr(name)) for name in ("", "no such", "LLAMA")},
        "an unknown architecture": (configured(architectures=["NoSuchForCausalLM"]), "'NoSuchForCausalLM'"),
        "an architecture with another head": (
            configured(architectures=["LlamaForQuestionAnswering"]),
            *("'LlamaForQuestionAnswering'", "of 'llama' supported are LlamaForCausalLM, LlamaModel"),
        ),
        "an unknown activation": (configured(hidden_act="swish2"), "'hidden_act'", "swish2", "supported are"),
        "an unknown rope": (with_rope(rope_type="spiral"), "'rope_type'", "spiral", "supported are default"),
        "a part of the head that rotates": (
            with_rope(rope_type="default", partial_rotary_factor=0.5),
            "'partial_rotary_factor' is 0.5",
        ),
        **{f"the quantization {n}": (_quantized(n), "'quant_method'", n) for n in ("no such", "exl3", "aqlm")},
        "heads that are pruned": (configured(pruned_heads={"0": [0]}), "'pruned_heads' is", "only {} is supported"),
        "an interleaved rotation": (configured(rope_interleaved=True), "'rope_interleaved' is true"),
        **{f"the dtype {n}": (configured(dtype=n), "'dtype'", n) for n in ("float99", "int8", "float8_e5m2")},
    },
    P.MismatchError: {
        "another model_type": (configured(model_type="qwen3", architectures=None), "q_norm.weight: missing"),
        "another hidden_size": (configured(hidden_size=32), "expected [40, 32], found [40, 16]"),
        "another vocab_size": (configured(vocab_size=41), "expected [41, 16], found [40, 16]"),
        "another intermediate_size": (configured(intermediate_size=23), NAME, "expected [23, 16], found [24, 16]"),
        "another number of kv heads": (configured(num_key_value_heads=2), "expected [16, 16], found [8, 16]"),
        "another head_dim": (configured(head_dim=10), "expected [20, 16], found [16, 16]"),
        "a layer more": (
            configured(num_hidden_layers=3),
            "9 differences",
            "model.layers.2.mlp.up_proj.weight: missing",
        ),
        "a layer less": (configured(num_hidden_layers=1), "9 differences", f"'{NAME}' in {FILE}: unexpected"),
        "1,000 layers": (configured(num_hidden_layers=1000), "8982 differences", "... and 8,962 more"),
        "sizes of 2^31": (configured(vocab_size=1 << 31, intermediate_size=1 << 31), "expected [2147483648, 16]"),
        "biases that are not there": (configured(attention_bias=True), "q_proj.bias: missing"),
    },
    P.UnsafePathError: {"a file that links out": (instead(linked_out, CONFIG), "is a link to", "elsewhere")},
    IsADirectoryError: {"a folder for the file": (instead(Path.mkdir, CONFIG), "A folder stands where a file belongs")},
    FileNotFoundError: {"no file": (deleted(CONFIG), "has no config.json")},
}
_OTHERS: dict[str, dict[str, tuple[Any, ...]]] = {
    "qwen2": {
        "too few layer types": (configured(layer_types=["full_attention"]), P.ConfigError, "'layer_types' must name 2"),
        "a layer type unknown": (configured(layer_types=["full"] * 2), P.ConfigError, "'layer_types' must name 2"),
        "400,000 layer types": (
            configured(layer_types=["full_attention"] * 400_000),
            *(P.ConfigError, "'layer_types' must name 2"),
        ),
        "a layer type that is a list": (configured(layer_types=[[], {}]), P.ConfigError, "'layer_types' must name 2"),
        "a negative window": (
            configured(use_sliding_window=True, sliding_window=-1),
            *(P.ConfigError, "'sliding_window' is -1"),
        ),
        "layers that slide without a window": (
            configured(layer_types=["sliding_attention"] * 2),
            *(P.ConfigError, "'sliding_window' is off"),
        ),
    },
    "cohere2": {
        "two patterns of layers that disagree": (
            configured(layer_types=None, sliding_window_pattern=2, _sliding_window_pattern=4),
            *(P.ConfigError, "'sliding_window_pattern' and '_sliding_window_pattern' disagree: 2 and 4"),
        ),
        "a pattern that layer_types is not": (
            configured(sliding_window_pattern=4),
            *(P.ConfigError, "'layer_types' is not what 'sliding_window_pattern' 4 makes"),
        ),
        "a part of the head that would rotate": (
            configured(rotary_pct=0.25),
            *(P.UnsupportedError, "'rotary_pct' is 0.25"),
        ),
    },
    "gemma": {
        "attention in both directions": (
            configured(use_bidirectional_attention=True),
            *(P.UnsupportedError, "'use_bidirectional_attention' is true"),
        ),
        "attention in 0 directions": (
            configured(use_bidirectional_attention=0),
            *(P.UnsupportedError, "'use_bidirectional_attention' is 0"),
        ),
    },
    "qwen3_moe": {
        "100,000 experts": (configured(num_experts=10**5), P.ConfigError, "'num_experts' is 100000", "from 1 to 1792"),
        "1,000 experts in each of 1,000 layers": (
            configured(num_experts=1000, num_hidden_layers=1000),
            *(P.ConfigError, "'num_experts' is 1000", "from 1 to 165"),
        ),
        "3,000,000 layers without experts": (
            configured(mlp_only_layers=[0] * 3_000_000),
            *(P.ConfigError, "'mlp_only_layers' must be a list of at most 2"),
        ),
    },
    "deepseek_v3": {
        "2^31 experts": (configured(n_routed_experts=1 << 31), P.ConfigError, "'n_routed_experts' is 2147483648"),
        "100,000 MTP heads": (
            configured(num_nextn_predict_layers=10**5),
            *(P.ConfigError, "'num_nextn_predict_layers' is 100000", "from 0 to 16"),
        ),
    },
    "gpt2": {
        "GPT-2 with heads that are pruned": (
            configured(pruned_heads={"0": [0]}),
            *(P.UnsupportedError, "'pruned_heads' is"),
        ),
        "two sizes that disagree": (
            configured(hidden_size=32),
            P.ConfigError,
            "'n_embd' is 16 and 'hidden_size' is 32",
        ),
        "two depths that disagree": (configured(num_hidden_layers=3), P.ConfigError, "'n_layer' is 2"),
        "GPT-2 with heads that do not divide": (
            configured(n_head=3),
            P.ConfigError,
            "16 is not a multiple of n_head 3",
        ),
        "cross attention": (configured(add_cross_attention=True), P.UnsupportedError, "'add_cross_attention' is true"),
    },
}
_GOOD: dict[str, Do] = {
    "the older dialect": in_json(CONFIG, _older),
    "null for what is not set": configured(rope_scaling=None, quantization_config=None, pretraining_tp=1),
    "no heads that are pruned": configured(pruned_heads={}),
    "tokens that are none, or beyond the vocabulary": configured(pad_token_id=-1, eos_token_id=50256),
    "no architectures": without("architectures"),
    "the architecture without a head": configured(architectures=["LlamaModel"]),
    "several tokens that end a text": configured(eos_token_id=[1, 2], pad_token_id=None, bos_token_id=0),
    "settings of generation and of training": configured(
        temperature=0.6, top_p=0.9, use_cache=True, id2label={"0": "x"}, attention_dropout=0.0
    ),
    "lines and blanks": in_bytes(lambda data: b"\n\n" + data + b"\n  \n", CONFIG),
}
