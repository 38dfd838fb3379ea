"""One key of a tiny file edited: what it says is in the configuration, or an error names it and its value."""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import params as P
from fnmodels.models.common.registry import config_class, family_for
from fnmodels.ops.rotary import attention_factor
from params.convert import main
from params.gguf.architectures import config_values
from params.gguf.parts import open_gguf

Tensors = Mapping[str, np.ndarray]
_KEYS: dict[str, Any] = {
    "block_count": 4,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "context_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": 4,
}
_RMS = {"attention.layer_norm_rms_epsilon": 1e-5}
_NORM = {"attention.layer_norm_epsilon": 1e-5}
_EMBEDDINGS = {"token_embd.weight": np.ones((64, 64), np.float32)}
_FACTORS = {
    f"rope_factors_{name}.weight": np.linspace(1, top, 8, dtype=np.float32)
    for name, top in (("short", 1.5), ("long", 6))
}
_TYPES = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string", list: "add_array"}
_GEMMA: dict[str, Any] = {**_RMS, "attention.sliding_window": 6, "block_count": 10, "attention.key_length": 16}
_GEMMA3N = {**_GEMMA, "altup.num_inputs": 4, "altup.active_idx": 0, "activation_sparsity_scale": [0.0] * 10}
_GEMMA4 = {**_GEMMA, "attention.sliding_window_pattern": [True, False] * 5}
_MAMBA = {"ssm.inner_size": 128, "ssm.state_size": 8, "ssm.time_step_rank": 4, "ssm.conv_kernel": 4}
_SMALL: dict[str, tuple[dict[str, Any], Tensors]] = {
    "gpt2": (_NORM, {}),
    "bloom": (_NORM | {"feed_forward_length": 256}, {}),
    "gptneox": (_NORM | {"use_parallel_residual": True}, {}),
    "mpt": (_NORM | {"attention.max_alibi_bias": 8.0, "feed_forward_length": 256}, {}),
    "bert": (_NORM | {"attention.causal": False}, {}),
    "nomic-bert": (_NORM | {"attention.causal": False}, {}),
    "modern-bert": (_NORM | {"attention.causal": False, "attention.sliding_window": 6}, {}),
    "phi3": (_RMS, {}),
    "phimoe": (_RMS | {"expert_count": 4, "expert_used_count": 2}, {}),
    "gemma3": (_GEMMA, {}),
    "gemma3n": (
        _GEMMA3N | {"embedding_length_per_layer_input": 8, "attention.shared_kv_layers": 2},
        {
            "blk.0.laurel_l.weight": np.ones((5, 64), np.float32),
            "per_layer_token_embd.weight": np.ones((64, 80), np.float32),
        },
    ),
    "gemma4": (_GEMMA4, {}),
    "olmo": (_NORM, {}),
    "jamba": (_RMS | _MAMBA, {}),
    "mistral3": (_RMS, {}),
    "qwen3": (_RMS, {}),
    "gemma-embedding": (_GEMMA, {}),
}


def write(path: Path, architecture: str, keys: Mapping[str, Any], tensors: Tensors) -> Path:
    """A file with these keys of the architecture, those of None left out."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if value is not None:
            getattr(writer, _TYPES[type(value)])(f"{architecture}.{key}", value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def values_of(folder: Path, architecture: str, more: Mapping[str, Any], tensors: Tensors | None = None) -> Any:
    """The content of config.json of the architecture's small file with other keys."""
    keys, own = _SMALL[architecture]
    path = write(folder / "it.gguf", architecture, _KEYS | keys | more, {**_EMBEDDINGS, **own, **(tensors or {})})
    with ExitStack() as stack:
        return config_values(open_gguf(path, stack))


def config_of(folder: Path, architecture: str, more: Mapping[str, Any], tensors: Tensors | None = None) -> Any:
    values = values_of(folder, architecture, more, tensors)
    return config_class(family_for(values["model_type"])).from_hf(values)


@pytest.mark.parametrize("architecture", _SMALL)
def test_the_small_files_are_read(architecture: str, tmp_path: Path) -> None:
    config_of(tmp_path, architecture, {})


_LONG = {"rope.scaling.original_context_length": 16, "rope.dimension_count": 16}


@pytest.mark.parametrize("architecture", ["phi3", "phimoe"])
@pytest.mark.parametrize("scale", [None, 1.25])
def test_phis_longrope_is_that_of_the_file(architecture: str, scale: float | None, tmp_path: Path) -> None:
    """llama.cpp multiplies by 1 where the file has no factor; the long factors count behind the original context."""
    rope = config_of(tmp_path, architecture, _LONG | {"rope.scaling.attn_factor": scale}, _FACTORS).rope
    assert (rope.kind, rope.original_max_position_embeddings) == ("longrope", 16)
    assert attention_factor(rope) == pytest.approx(scale or 1.0)
    for name in ("short", "long"):
        np.testing.assert_allclose(getattr(rope, f"{name}_factor"), _FACTORS[f"rope_factors_{name}.weight"], rtol=1e-6)


def test_phi_3s_own_factor_is_left_to_its_rule(tmp_path: Path) -> None:
    scale = math.sqrt(1 + math.log(3) / math.log(16))
    rope = config_of(tmp_path, "phi3", _LONG | {"rope.scaling.attn_factor": scale}, _FACTORS).rope
    assert rope.attention_factor is None
    assert attention_factor(rope) == pytest.approx(scale)


_LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 12}


@pytest.mark.parametrize("architecture", ["gptneox", "nomic-bert", "mistral3"])
@pytest.mark.parametrize("scaling", [_LINEAR, _YARN], ids=["linear", "yarn"])
def test_scaling_is_followed(architecture: str, scaling: dict[str, Any], tmp_path: Path) -> None:
    rope = config_of(tmp_path, architecture, scaling).rope
    assert (rope.kind, rope.factor) == (scaling["rope.scaling.type"], 4.0)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(
        (name, _LINEAR, "rope.scaling.type' is 'linear'")
        for name in ("modern-bert", "gemma3n", "gemma4", "bert", "gpt2")
    ),
    ("modern-bert", _YARN, "rope.scaling.type' is 'yarn'"),
    *(
        (name, {"attention.head_count_kv": 2}, "attention.head_count_kv' is 2")
        for name in ("gpt2", "bloom", "gptneox", "bert", "nomic-bert", "modern-bert", "mpt")
    ),
    ("phi3", {"rope.scaling.attn_factor": 1.25}, "rope.scaling.attn_factor' is 1.25"),
    ("phimoe", {"rope.scaling.attn_factor": 1.25}, "rope.scaling.attn_factor' is 1.25"),
    ("phimoe", {"rope.dimension_count": 8}, "rope.dimension_count' is 8"),
    ("mpt", {"attention.max_alibi_bias": None}, "attention.max_alibi_bias' is 0.0"),
    ("mpt", {"attention.max_alibi_bias": 4.0}, "attention.max_alibi_bias' is 4.0"),
    ("bert", {"pooling_type": 4}, "bert.pooling_type' is 4"),
    ("gemma-embedding", {"attention.causal": True}, "attention.causal' is True"),
    ("gemma4", {"attention.sliding_window_pattern": 2}, "attention.sliding_window_pattern' is 2"),
    ("gemma4", {"attention.sliding_window_pattern": None}, "attention.sliding_window_pattern' is missing"),
    ("gemma3n", {"activation_sparsity_scale": None}, "activation_sparsity_scale' is missing"),
    ("jamba", {"attention.head_count_kv": None}, "attention.head_count_kv' is missing"),
]


@pytest.mark.parametrize(("architecture", "more", "message"), REFUSED, ids=[f"{a}-{m}" for a, _, m in REFUSED])
def test_what_is_not_followed_is_named(architecture: str, more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(P.CheckpointError) as caught:
        values_of(tmp_path, architecture, more)
    assert message in str(caught.value)


NEUTRAL: list[tuple[str, dict[str, Any]]] = [
    ("modern-bert", {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}),
    ("gpt2", {"rope.scaling.type": "none"}),
    ("phi3", {"rope.scaling.attn_factor": 1.0}),
    ("gemma3", {"final_logit_softcapping": 0.0}),
    ("gemma4", {"final_logit_softcapping": 0.0}),
    ("olmo", {"attention.clamp_kqv": 0.0}),
    ("mpt", {"attention.clamp_kqv": 0.0}),
    *((name, {"pooling_type": kind}) for name in ("bert", "qwen3", "gemma-embedding") for kind in range(4)),
]


@pytest.mark.parametrize(("architecture", "more"), NEUTRAL)
def test_values_that_change_nothing_are_read(architecture: str, more: dict[str, Any], tmp_path: Path) -> None:
    assert config_of(tmp_path, architecture, more) == config_of(tmp_path, architecture, {})


@pytest.mark.parametrize(
    ("pattern", "full"),
    [(None, [4, 9]), (2, [1, 3, 5, 7, 9]), (1, range(10)), ([True] * 9 + [False], [9])],
    ids=["absent", "2", "1", "list"],
)
def test_gemma_3ns_pattern_is_a_period_or_a_list(pattern: Any, full: Any, tmp_path: Path) -> None:
    kinds = values_of(tmp_path, "gemma3n", {"attention.sliding_window_pattern": pattern})["layer_types"]
    assert kinds == ["full_attention" if i in full else "sliding_attention" for i in range(10)]


def bert(path: Path, more: Mapping[str, Any]) -> Path:
    """A BERT with one kind of segments, whose row llama-quantize writes as a vector."""
    draw = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (64, 64), "position_embd.weight": (48, 64)}
    shapes |= {"token_types.weight": (64,)} | {f"token_embd_norm.{end}": (64,) for end in ("weight", "bias")}
    for i in range(4):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"):
            out, width = (96 if name == "ffn_up" else 64), (96 if name == "ffn_down" else 64)
            shapes |= {f"blk.{i}.{name}.weight": (out, width), f"blk.{i}.{name}.bias": (out,)}
        for name in ("attn_output_norm", "layer_output_norm"):
            shapes |= {f"blk.{i}.{name}.{end}": (64,) for end in ("weight", "bias")}
    tensors = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return write(path, "bert", _KEYS | _SMALL["bert"][0] | more, tensors)


def test_one_kind_of_segments_may_be_a_vector(tmp_path: Path) -> None:
    path = bert(tmp_path / "it.gguf", {})
    config, params = P.load_pretrained(path)
    rows = dict(P.export(config, params))["embeddings.token_type_embeddings.weight"]
    (read,) = (one for one in gguf.GGUFReader(path).tensors if one.name == "token_types.weight")
    assert torch.equal(rows, torch.tensor(np.array(read.data))[None])


@pytest.mark.parametrize(("kind", "pooling"), [(1, "mean"), (2, "first"), (3, "last")])
def test_the_folder_pools_as_the_file_says(kind: int, pooling: str, tmp_path: Path) -> None:
    path, folder = bert(tmp_path / "it.gguf", {"pooling_type": kind}), tmp_path / "folder"
    assert main([str(path), str(folder), "--without-tokenizer"]) == 0
    loaded = P.load_embedder(folder)
    assert loaded.embedder.pooling == (pooling,)
    assert loaded.config == P.load_pretrained(path)[0]
    assert P.verify(folder) is None


def test_an_embedder_is_made_of_a_folder(tmp_path: Path) -> None:
    path, folder = bert(tmp_path / "it.gguf", {}), tmp_path / "folder"
    with pytest.raises(P.UnsupportedError, match=r"it\.gguf is a GGUF file: fnmodels-convert .* FOLDER makes a folder"):
        P.load_embedder(path)
    assert main([str(path), str(folder), "--without-tokenizer"]) == 0
    assert not (folder / "modules.json").exists()
