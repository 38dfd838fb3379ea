"""AWQ, GPTQ and compressed-tensors files: equal to packers in loops, in any shard, refused where they do not fit."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import params as P
from fnmodels import llama, mixtral, phi3, tree
from params.checkpoint import header_checks
from params.io import safetensors_file
from params.quantized import forms, weight
from params.quantized.form import Form
from params.quantized.methods import read_quantization
from tests.support.cases import generic_params

SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
CONFIGS = {
    "llama": llama.Config(**SIZES, tie_word_embeddings=True),
    "phi3": phi3.Config(**SIZES),  # fused tensors
    "mixtral": mixtral.Config(**SIZES, num_local_experts=2, num_experts_per_tok=1),  # a tensor per expert
}
FILE = "model.safetensors"
GROUP = 16
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    args = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "input_activations": None, "weights": args | weights}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}


ASYMMETRIC = {"symmetric": False, "actorder": "group"}
FORMS: dict[str, dict[str, Any]] = {
    "gptq": GPTQ,
    "gptq 8 bits, one group": GPTQ | {"bits": 8, "group_size": -1},
    "gptq_v2": GPTQ | {"checkpoint_format": "gptq_v2", "desc_act": False},
    "awq": AWQ,
    "packed": compressed("pack-quantized"),
    "packed, zeros and order": compressed("pack-quantized", **ASYMMETRIC),
    "packed 8 bits by channel": compressed("pack-quantized", num_bits=8, strategy="channel", group_size=None),
    "int8": compressed("int-quantized", num_bits=8, strategy="channel"),
    "naive, zeros": compressed("naive-quantized", num_bits=8, symmetric=False),
}


def words(integers: list[list[int]], bits: int, order: list[int] | None = None) -> Tensor:
    """int32 rows of packed integers, the first in the lowest bits; order: which of 8 neighbours is in each place."""
    count = 32 // bits
    rows = []
    for row in integers:
        row = row + [0] * (-len(row) % count)
        packed = [
            sum(row[first + (order[place] if order else place)] << bits * place for place in range(count))
            for first in range(0, len(row), count)
        ]
        rows.append([word - (1 << 32) if word >> 31 else word for word in packed])
    return torch.tensor(rows, dtype=torch.int32)


def quantized(name: str, shape: tuple[int, int], said: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """(the tensors of a random weight [out, in] in a form, the weight in fp64), from the definition of the form."""
    module, (outputs, inputs) = name.removesuffix(".weight"), shape
    draw = torch.Generator().manual_seed(len(name) + outputs)
    own = said["config_groups"]["group_0"]["weights"] if "config_groups" in said else {}
    bits = own.get("num_bits", said.get("bits"))
    group = own.get("group_size", said.get("group_size"))
    group = inputs if group in (-1, None) or own.get("strategy") == "channel" else group
    count, top = inputs // group, 1 << bits
    codes = torch.randint(0, top, shape, generator=draw)
    zeros = torch.randint(0, top, (outputs, count), generator=draw)
    if own.get("symmetric"):
        zeros = torch.full((outputs, count), top // 2)
    scales = (torch.rand(outputs, count, generator=draw) + 0.1).to(torch.float16)
    index = torch.arange(inputs) // group
    if said.get("desc_act") or "actorder" in own:
        index = index[torch.randperm(inputs, generator=draw)]
    weight = torch.empty(shape, dtype=torch.float64)
    for i in range(inputs):
        weight[:, i] = (codes[:, i] - zeros[:, index[i]]).double() * scales[:, index[i]].double()
    if said["quant_method"] == "awq":
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        parts = {"qweight": words(codes.T.tolist(), 4, order), "qzeros": words(zeros.T.tolist(), 4, order)}
        parts["scales"] = scales.T
    elif said["quant_method"] == "gptq":
        stored = zeros if said.get("checkpoint_format") == "gptq_v2" else (zeros - 1) % top
        parts = {"qweight": words(codes.tolist(), bits).T, "qzeros": words(stored.T.tolist(), bits)}
        parts |= {"scales": scales.T, "g_idx": index.int()}
    elif said["format"] == "pack-quantized":
        parts = {"weight_packed": words(codes.tolist(), bits), "weight_scale": scales}
        parts["weight_shape"] = torch.tensor(shape)
        parts |= {} if own["symmetric"] else {"weight_zero_point": words(zeros.T.tolist(), bits).T}
        parts |= {"weight_g_idx": index.int()} if "actorder" in own else {}
    else:
        parts = {"weight": (codes - top // 2).to(torch.int8), "weight_scale": scales}
        parts |= {} if own["symmetric"] else {"weight_zero_point": (zeros - top // 2).to(torch.int8)}
    return {f"{module}.{last}": tensor.contiguous() for last, tensor in parts.items()}, weight


def write(
    folder: Path, config: Any, said: dict[str, Any], shards: int = 1
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint whose projections are integers: (its tensors, the weights that they stand for, in fp64)."""
    P.save_pretrained(folder, config, generic_params(config, torch.float16))
    tensors: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / FILE).items():
        if "_proj" in name or ".experts." in name:
            parts, wanted[name] = quantized(name, (tensor.shape[0], tensor.shape[1]), said)
            tensors |= parts
        else:
            tensors[name] = wanted[name] = tensor
    rewrite(folder, tensors, shards, quantization_config=said)
    return tensors, wanted


def rewrite(folder: Path, tensors: dict[str, Tensor], shards: int = 1, **changes: Any) -> None:
    (folder / "fnmodels_manifest.json").unlink(missing_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    if shards == 1:
        save_file(tensors, folder / FILE, {"format": "pt"})
        return
    (folder / FILE).unlink()
    parts = {f"model-{i + 1:05}-of-{shards:05}.safetensors": sorted(tensors)[i::shards] for i in range(shards)}
    for shard, names in parts.items():
        save_file({name: tensors[name] for name in names}, folder / shard, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: shard for shard, names in parts.items() for name in names}}
    (folder / f"{FILE}.index.json").write_text(json.dumps(index))


def assert_saved_as(folder: Path, config: Any, loaded: Any, wanted: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Saving writes the dequantized weights, and says nothing of a quantization."""
    P.save_pretrained(folder, config, loaded)
    back = load_file(folder / FILE)
    assert back.keys() == wanted.keys()
    for name, tensor in back.items():
        assert tensor.dtype == dtype and torch.equal(tensor, wanted[name].float().to(dtype)), name
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit-equal to the definition, in several chunks and shards of the files, in the scales' dtype and in fp32."""
    monkeypatch.setattr(weight, "CHUNK", 200)
    config = CONFIGS["llama"]
    wanted = write(tmp_path / "in", config, FORMS[form], shards=3)[1]
    loaded_config, loaded = P.load_pretrained(tmp_path / "in")
    assert loaded_config == config
    assert_saved_as(tmp_path / "out", config, loaded, wanted, torch.float16)
    assert all(leaf.is_contiguous() for leaf in tree.leaves(loaded))
    exact = tree.flatten(P.load_pretrained(tmp_path / "in", dtype=torch.float32)[1])
    down = wanted["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(exact["layers.0.mlp.down_proj"].double(), down)  # products of such integers and scales fit fp32


@pytest.mark.parametrize("family", ["phi3", "mixtral"])
@pytest.mark.parametrize("form", ["gptq", "awq", "packed, zeros and order"])
def test_fused_tensors_and_experts(family: str, form: str, tmp_path: Path) -> None:
    wanted = write(tmp_path / "in", CONFIGS[family], FORMS[form])[1]
    config, loaded = P.load_pretrained(tmp_path / "in", dtype=torch.bfloat16)
    assert_saved_as(tmp_path / "out", config, loaded, wanted, torch.bfloat16)


@pytest.mark.parametrize("form", FORMS)
def test_any_shard_of_a_weight(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those whose borders lie within words and groups."""
    monkeypatch.setattr(weight, "CHUNK", 100)
    write(tmp_path, CONFIGS["llama"], FORMS[form])
    buffer = safetensors_file.cast_buffer()
    with ExitStack() as stack:
        checked = header_checks.check_folder(tmp_path, stack)
        _, down = checked.found["model.layers.0.mlp.down_proj.weight"]
        assert isinstance(down, weight.QuantizedWeight)
        full = weight.read_quantized(down, None, buffer)
        for box in ((slice(0, 32), slice(5, 6)), (slice(3, 21), slice(11, 48)), (slice(9, 10), slice(0, 17))):
            assert torch.equal(weight.read_quantized(down, None, buffer, box), full[box])


def test_a_bias_that_gptq_adds(tmp_path: Path) -> None:
    """Its quantizers wrote a zero bias for every module; one that is not zero is no leftover."""
    tensors, wanted = write(tmp_path, CONFIGS["llama"], GPTQ)
    bias = "model.layers.0.mlp.up_proj.bias"
    rewrite(tmp_path, tensors | {bias: torch.zeros(48, dtype=torch.float16)})
    up = P.load_pretrained(tmp_path)[1]["layers"][0]["mlp"]["up_proj"]
    assert torch.equal(up, wanted["model.layers.0.mlp.up_proj.weight"].half())
    rewrite(tmp_path, tensors | {bias: torch.ones(48, dtype=torch.float16)})
    with pytest.raises(P.MismatchError, match=f"'{bias}' in .*: unexpected"):
        P.load_pretrained(tmp_path)


def test_weights_that_are_dequantized_already(tmp_path: Path) -> None:
    P.save_pretrained(tmp_path, CONFIGS["llama"], generic_params(CONFIGS["llama"]))
    rewrite(tmp_path, load_file(tmp_path / FILE), quantization_config=AWQ)
    assert torch.equal(P.load_pretrained(tmp_path)[1]["norm"], generic_params(CONFIGS["llama"])["norm"])


UP = "model.layers.0.mlp.up_proj"  # [48, 32]
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def without(last: str) -> Change:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name != f"{UP}.{last}"}


def having(last: str, value: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors | {f"{UP}.{last}": value(tensors.get(f"{UP}.{last}", torch.zeros(1))).contiguous()}


FAULTS: dict[str, tuple[str, Change, str]] = {
    "no scales": (
        "gptq",
        without("scales"),
        rf"{UP}.qweight' in .*: int32 in gptq of 4 bits, but missing are '{UP}.scales'",
    ),
    "no zeros": ("awq", without("qzeros"), rf"missing are '{UP}.qzeros'"),
    "no codes": (
        "awq",
        without("qweight"),
        rf"{UP}.weight: missing; expected \[48, 32\](.|\n)*qzeros' in .*: unexpected",
    ),
    "no shape": ("packed", without("weight_shape"), rf"missing are '{UP}.weight_shape'"),
    "no zeros, asymmetric": (
        "packed, zeros and order",
        without("weight_zero_point"),
        "missing are .*weight_zero_point",
    ),
    "no order": ("gptq", without("g_idx"), rf"missing are '{UP}.g_idx'"),
    "no order, compressed": ("packed, zeros and order", without("weight_g_idx"), "missing are .*weight_g_idx"),
    "zeros of another shape": (
        "gptq",
        having("qzeros", lambda t: t[:1]),
        rf"{UP}.qzeros' in .*: expected \[2, 6\] of int32 in .*, found \[1, 6\] of int32",
    ),
    "scales of integers": ("awq", having("scales", lambda t: t.int()), r"expected \[2, 48\] of float32 or .* int32"),
    "codes of bytes": (
        "awq",
        having("qweight", lambda t: t.char()),
        r"expected \[32, 6\] of int32 .* found \[32, 6\] of int8",
    ),
    "codes of another shape": ("awq", having("qweight", lambda t: t[:, 1:]), r"scales' in .*: expected \[2, 40\] of"),
    "fewer groups": ("gptq", having("g_idx", lambda t: t[:-1]), r"g_idx' in .*: expected \[32\] of int32 or int64"),
    "a group that is not there": (
        "gptq",
        having("g_idx", lambda t: t * 2),
        "g_idx': 16 groups, 2 for one, are not from 0 to 1",
    ),
    "a negative group": (
        "packed, zeros and order",
        having("weight_g_idx", lambda t: t - 1),
        "weight_g_idx': .* groups, -1 for one",
    ),
    "scales that are not finite": (
        "awq",
        having("scales", lambda t: t / 0),
        "scales': .* scales, .* for one, are not finite",
    ),
    "another weight_shape": (
        "packed",
        having("weight_shape", lambda t: t.flip(0)),
        r"expected \[32, 6\] of int32 .* found \[48, 4\]",
    ),
    "twice": ("gptq", having("weight", lambda t: torch.zeros(48, 32)), f"'{UP}.weight' is there as well"),
    "a name too many": ("gptq", having("extra", lambda t: t), f"'{UP}.extra' in .*: unexpected"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_named(fault: str, tmp_path: Path) -> None:
    form, change, text = FAULTS[fault]
    rewrite(tmp_path, change(write(tmp_path, CONFIGS["llama"], FORMS[form])[0]))
    with pytest.raises(P.MismatchError, match=text):
        P.load_pretrained(tmp_path)


W8A8 = compressed("int-quantized", num_bits=8)
QUARK = {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "int"}
UNREAD: dict[str, tuple[Any, type[Exception], str]] = {
    "bits": (GPTQ | {"bits": 5}, P.UnsupportedError, "'bits' is 5; supported are 2, 3, 4, 8"),
    "no bits": ({"quant_method": "gptq", "group_size": 32}, P.ConfigError, "has no 'bits'"),
    "group": (GPTQ | {"group_size": 0}, P.ConfigError, "'group_size' is 0, but must be -1"),
    "marlin": (GPTQ | {"checkpoint_format": "marlin"}, P.UnsupportedError, '"marlin"; supported are gptq, gptq_v2'),
    "two formats": (GPTQ | {"checkpoint_format": "gptq", "format": "gptq_v2"}, P.ConfigError, "disagree"),
    "modules apart": (GPTQ | {"dynamic": {"+:.*": {"bits": 5}}}, P.UnsupportedError, "dynamic, .*'bits' is 5"),
    "gemv": (AWQ | {"version": "gemv_fast"}, P.UnsupportedError, "'version' is \"gemv_fast\"; supported are gemm"),
    "two versions": (AWQ | {"version": "gemv", "checkpoint_format": "gemm"}, P.ConfigError, "disagree: gemm, gemv"),
    "no format of words": (AWQ | {"pack_dtype": "int16"}, P.UnsupportedError, "'pack_dtype' is \"int16\"; only"),
    "a backend for other files": (
        AUTO_ROUND | {"backend": "auto_round:marlin"},
        P.UnsupportedError,
        "'backend' is \"auto_round:marlin\"; supported are auto_round",
    ),
    "two layouts": (
        AUTO_ROUND | {"backend": "auto_round:awq:gemm", "packing_format": "auto_round:auto_gptq"},
        P.ConfigError,
        "'backend' and 'packing_format' disagree",
    ),
    "llm-awq": (AWQ | {"backend": "llm-awq"}, P.UnsupportedError, "another layout than gemm"),
    "rotations of GPTQModel": (
        GPTQ | {"meta": {"quantizer": ["gptqmodel:5.6.0"], "rotation": "hadamard"}},
        P.UnsupportedError,
        "'meta.rotation' is \"hadamard\": weights are rotated",
    ),
    "rotations of GPTQModel's AWQ": (AWQ | {"rotation": "random"}, P.UnsupportedError, "'rotation' is \"random\""),
    "unheard of": (AWQ | {"rotated": True}, P.ConfigError, "rotated = true"),
    "no groups": (W8A8 | {"config_groups": {}}, P.ConfigError, "'config_groups' is {}"),
    "floats": (
        compressed("pack-quantized", type="nf"),
        P.UnsupportedError,
        "'type' is \"nf\"; supported are int, float",
    ),
    "an unknown order": (compressed("pack-quantized", actorder="x"), P.UnsupportedError, "'actorder' is \"x\""),
    "by block": (compressed("int-quantized", strategy="block"), P.UnsupportedError, "'strategy' is \"block\""),
    "other format": (compressed("marlin-24"), P.UnsupportedError, '"marlin-24"; supported are dense, float-quant'),
    "rotations of Quark": (
        QUARK | {"algo_config": [{"name": "awq"}, {"name": "rotation"}]},
        P.UnsupportedError,
        "'algo_config' has \"rotation\"; supported are autosmoothquant, awq",
    ),
    "rotations": (W8A8 | {"transform_config": {"config_groups": 1}}, P.UnsupportedError, "'transform_config' is"),
}


@pytest.mark.parametrize("what", UNREAD)
def test_settings_that_are_not_read(what: str, tmp_path: Path) -> None:
    said, kind, text = UNREAD[what]
    P.save_pretrained(tmp_path, CONFIGS["llama"], generic_params(CONFIGS["llama"]))
    rewrite(tmp_path, load_file(tmp_path / FILE), quantization_config=said)
    with pytest.raises(kind, match=text) as caught:
        P.load_pretrained(tmp_path)
    assert "quantization_config" in str(caught.value)


PUBLISHED: dict[str, tuple[dict[str, Any], Form]] = {
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": (
        {"batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True, "damp_percent": 0.01}
        | {"dataset": None, "desc_act": False, "exllama_config": {"version": 1}, "group_size": 128, "use_exllama": True}
        | {"max_input_length": None, "model_seqlen": None, "modules_in_block_to_quantize": None, "pad_token_id": None}
        | {"quant_method": "gptq", "sym": True, "tokenizer": None, "true_sequential": True, "use_cuda_fp16": False},
        forms.gptq(4, 128, zero_offset=1),
    ),
    "a file of GPTQModel": (
        {"bits": 4, "group_size": 128, "quant_method": "gptq", "checkpoint_format": "gptq", "desc_act": False}
        | {"meta": {"quantizer": ["gptqmodel:5.6.0"], "rotation": None, "act_group_aware": True}, "rotation": None},
        forms.gptq(4, 128, zero_offset=1),
    ),
    "Qwen/Qwen2.5-7B-Instruct-AWQ": (
        {"bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm"}
        | {"zero_point": True},
        forms.awq_gemm(128),
    ),
    "a file of llm-compressor": (
        compressed("pack-quantized", actorder="weight", block_structure=None, observer="minmax", observer_kwargs={})
        | {"global_compression_ratio": 1.5, "kv_cache_scheme": None, "quantization_status": "compressed"}
        | {"sparsity_config": {}, "transform_config": {}, "version": "0.11.0"},
        forms.packed_integers(4, GROUP, symmetric=True),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_settings_of_published_files(name: str) -> None:
    said, wanted = PUBLISHED[name]
    quantization = read_quantization({"quantization_config": said})
    assert quantization is not None and quantization.forms[0] == wanted
