"""Whole models in quantized files: beside towers, in the config of a part, with experts; damage; what is reported."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import params as P
import params.inspect
from fnmodels import deepseek, llama4, mixtral, tree
from params.quantized.kept import KeptWeight
from tests.params.quantized import test_block_scales as blocks
from tests.params.quantized.test_published import SAID, UP, write
from tests.support.cases import cases, generic_params
from tests.support.encoder_losses import READERS

FILE = "model.safetensors"
FP8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}


def by_tensor(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the tensors of a checkpoint with linear weights in fp8 by tensor, what they stand for in fp32)."""
    out: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        out[name] = tensor
        if name.endswith("_proj.weight") and tensor.ndim == 2 and "vision" not in name and "visual" not in name:
            out[name], scale = (tensor.float() * 20).to(torch.float8_e4m3fn), torch.tensor(0.01 * (number + 1))
            out[f"{name}_scale_inv"] = scale
            out[name.replace(".weight", ".activation_scale")] = torch.tensor(0.5)
            wanted[name] = out[name].float() * scale
    return out, wanted


def rewrite(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> None:
    save_file(tensors, folder / FILE, {"format": "pt"})
    (folder / "fnmodels_manifest.json").unlink(missing_ok=True)
    file = folder / "config.json"
    values = json.loads(file.read_text())
    for path, value in changes.items():
        *parts, last = path.split("__")
        inner = values
        for part in parts:
            inner = inner[part]
        inner[last] = value
    file.write_text(json.dumps(values))


@pytest.mark.parametrize("where", ["quantization_config", "text_config__quantization_config"])
@pytest.mark.parametrize("name", READERS)
def test_fp8_text_beside_a_tower(name: str, where: str, tmp_path: Path) -> None:
    """As Mistral's files are: quantized text, plain tower; its text alone is read too."""
    family, values = READERS[name]
    made = family.Config.from_hf(values)
    P.save_pretrained(tmp_path, made, generic_params(made, torch.bfloat16))
    tensors, wanted = by_tensor(load_file(tmp_path / FILE))
    assert wanted
    rewrite(tmp_path, tensors, **{where: FP8})
    config, loaded = P.load_pretrained(tmp_path, dtype=torch.float32)
    assert config == made
    P.save_pretrained(tmp_path / "out", config, loaded)
    back = load_file(tmp_path / "out" / FILE)
    assert all(torch.equal(back[name], value) for name, value in wanted.items())
    text = P.load_pretrained(tmp_path, part="text")[1]
    assert tree.leaves(text)


def test_fp4_experts_beside_fp8_blocks(tmp_path: Path) -> None:
    """DeepSeek V4: experts [out, in / 2] of int8 with e8m0 scales, all else in blocks of fp8."""
    config = deepseek.Config(
        vocab_size=40,
        hidden_size=192,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        **blocks.LATENT,
        n_routed_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        layer_kinds=("full", "full_moe"),
    )
    P.save_pretrained(tmp_path, config, generic_params(config, torch.bfloat16))
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    tensors = blocks.quantized_tensors(load_file(tmp_path / FILE))
    wanted = {}
    draw = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if ".experts." in name and name.endswith(".weight")]:
        out, width = tensors[name].shape
        packed = torch.randint(0, 256, (out, width // 2), generator=draw)
        powers = torch.randint(115, 125, (out, width // 32), generator=draw).to(torch.uint8)
        codes = torch.stack((packed % 16, packed // 16), -1).flatten(1)
        wanted[name] = numbers[codes] * (2.0 ** (powers.double() - 127)).float().repeat_interleave(32, 1)
        tensors[name] = packed.to(torch.uint8).view(torch.int8)
        tensors[f"{name}_scale_inv"] = powers.view(torch.float8_e8m0fnu)
    rewrite(tmp_path, tensors, quantization_config={**blocks.FP8, "expert_dtype": "fp4", "scale_fmt": "ue8m0"})
    for options in ({}, {"keep_quantized": True}):
        loaded = P.load_pretrained(tmp_path, dtype=torch.float32, **options)[1]
        P.save_pretrained(tmp_path / "out", config, P.dequantize(loaded))
        back = load_file(tmp_path / "out" / FILE)
        assert len(wanted) == 9 and all(torch.equal(back[name], value) for name, value in wanted.items())


def test_fbgemm_experts_of_columns(tmp_path: Path) -> None:
    """Llama 4: experts [E, in, out] in fp8 with a scale for each output."""
    case = next(c for c in cases() if isinstance(c.config, llama4.Config) and "moe" in str(c.config.layer_kinds))
    P.save_pretrained(tmp_path, case.config, generic_params(case.config, torch.bfloat16))
    tensors = load_file(tmp_path / FILE)
    wanted = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        codes = (tensors[name].float() * 20).to(torch.float8_e4m3fn)
        scales = torch.rand(codes.shape[0], 1, codes.shape[2], generator=torch.Generator().manual_seed(1)) + 0.1
        tensors[name], tensors[f"{name}_scale"] = codes, scales
        wanted[name] = codes.float() * scales
    assert wanted
    said = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"], "activation_scale_ub": 1200.0}
    rewrite(tmp_path, tensors, quantization_config=said)
    loaded = P.load_pretrained(tmp_path, dtype=torch.float32)[1]
    P.save_pretrained(tmp_path / "out", case.config, loaded)
    back = load_file(tmp_path / "out" / FILE)
    assert all(torch.equal(back[name], value) for name, value in wanted.items())


def nested_nf4(tensors: dict[str, Tensor], number: int, out: int, width: int) -> Tensor:
    """Add the tensors of a random weight; what it stands for, by a loop over its blocks."""
    draw = torch.Generator().manual_seed(number)
    codes = torch.randint(0, 16, (out * width,), generator=draw)
    table, scale_table = torch.randn(16, generator=draw), torch.randn(256, generator=draw)
    blocks, offset = -(-out * width // 64), 3.5 + number
    absmax = torch.randint(0, 256, (blocks,), generator=draw)
    over = torch.rand(-(-blocks // 256), generator=draw)
    values = table[codes]
    for block in range(blocks):
        values[64 * block : 64 * block + 64] *= scale_table[absmax[block]] * over[block // 256] + torch.tensor(offset)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [out, width]}
    state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    tensors |= {
        "": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
        ".absmax": absmax.to(torch.uint8),
        ".quant_map": table,
        ".nested_absmax": over,
        ".nested_quant_map": scale_table,
        ".quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return values.view(out, width)


def test_nested_nf4_experts_of_many_blocks(tmp_path: Path) -> None:
    """Rows that are no multiple of a block, more blocks than one nested scale has, an offset for each expert."""
    config = mixtral.Config(
        vocab_size=24,
        hidden_size=160,
        intermediate_size=176,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=3,
        num_experts_per_tok=2,
    )
    P.save_pretrained(tmp_path, config, generic_params(config, torch.bfloat16))
    tensors, wanted = load_file(tmp_path / FILE), {}
    for number, name in enumerate(sorted(n for n in tensors if ".experts." in n)):
        parts: dict[str, Tensor] = {}
        wanted[name] = nested_nf4(parts, number, *tensors.pop(name).shape)
        tensors |= {name + ending: part for ending, part in parts.items()}
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    rewrite(tmp_path, tensors, quantization_config=said)
    plain = P.load_pretrained(tmp_path, dtype=torch.float32)[1]
    kept = P.load_pretrained(tmp_path, dtype=torch.float32, keep_quantized=True)[1]
    experts = kept["layers"][0]["mlp"]["experts"]
    assert all(isinstance(leaf, KeptWeight) for leaf in experts.values())
    for weights in (plain, P.dequantize(kept)):
        P.save_pretrained(tmp_path / "out", config, weights)
        back = load_file(tmp_path / "out" / FILE)
        assert all(torch.equal(back[name], value) for name, value in wanted.items())


def test_half_precision_of_config_json_is_the_default(tmp_path: Path) -> None:
    write(tmp_path, "bitsandbytes_nf4", dtype="float16")
    leaf = P.load_pretrained(tmp_path)[1]["layers"][0]["mlp"]["up_proj"]
    assert leaf.dtype == torch.float16
    write(tmp_path, "bitsandbytes_nf4", quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(P.ConfigError, match="'load_in_4bit' and 'load_in_8bit'"):
        P.load_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_in_words_of_another_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    """bitsandbytes' quant_storage; the weights are those of codes in bytes, kept or not."""
    said = SAID["bitsandbytes_nf4"] | {"bnb_4bit_quant_storage": str(dtype).removeprefix("torch.")}
    wanted = write(tmp_path, "bitsandbytes_nf4", quantization_config=said)
    tensors = load_file(tmp_path / FILE)
    tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].flatten().view(dtype)[:, None]
    save_file(tensors, tmp_path / FILE, {"format": "pt"})
    config, loaded = P.load_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(loaded["layers"][0]["mlp"]["up_proj"], wanted)
    kept = P.load_pretrained(tmp_path, keep_quantized=True)[1]
    P.save_pretrained(tmp_path / "out", config, kept)
    again = P.load_pretrained(tmp_path / "out", dtype=torch.float32)[1]
    assert torch.equal(again["layers"][0]["mlp"]["up_proj"], wanted)


def test_the_older_name_of_a_switch(tmp_path: Path) -> None:
    said = {name: value for name, value in SAID["bitsandbytes_int8"].items() if name != "load_in_8bit"}
    wanted = write(tmp_path, "bitsandbytes_int8", quantization_config=said | {"_load_in_8bit": True})
    loaded = P.load_pretrained(tmp_path, dtype=torch.float32)[1]
    assert torch.equal(loaded["layers"][0]["mlp"]["up_proj"], wanted)


def test_two_declarations_must_agree(tmp_path: Path) -> None:
    said, other = SAID["bitsandbytes_nf4"], {"quant_method": "awq", "bits": 4, "group_size": 32}
    wanted = write(tmp_path, "bitsandbytes_nf4", compression_config=said)
    assert torch.equal(P.load_pretrained(tmp_path, dtype=torch.float32)[1]["layers"][0]["mlp"]["up_proj"], wanted)
    for more in ({"compression_config": other}, {"inner": {"quantization_config": other}}):
        write(tmp_path, "bitsandbytes_nf4", **more)
        with pytest.raises(P.ConfigError, match=r"quantization_config and .* disagree: bitsandbytes and awq"):
            P.load_pretrained(tmp_path, ignore_fields=("inner",) if "inner" in more else ())


def test_a_new_field_of_a_quantization_can_be_ignored(tmp_path: Path) -> None:
    """Also of an object inside of it, as the message says."""
    for said in (
        SAID["bitsandbytes_nf4"] | {"novelty": 1},
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"a": {"bits": 8, "novelty": 1}}},
    ):
        write(tmp_path, "bitsandbytes_nf4", quantization_config=said)
        with pytest.raises(P.ConfigError, match=r'novelty = 1.*ignore_fields=\("novelty",\) reads the file without'):
            P.load_pretrained(tmp_path)
        if said["quant_method"] == "bitsandbytes":
            config, loaded = P.load_pretrained(tmp_path, ignore_fields=("novelty",))
            P.save_pretrained(tmp_path / "out", config, loaded)
            assert json.loads((tmp_path / "out" / "config.json").read_text())["_ignored_fields"] == {"novelty": 1}
        else:  # its tensors are not of the case
            with pytest.raises(P.MismatchError):
                P.load_pretrained(tmp_path, ignore_fields=("novelty",))
        with pytest.raises(P.ConfigError, match='ignore_fields has "bits", which is no unknown field'):
            P.load_pretrained(tmp_path, ignore_fields=("novelty", "bits"))


def test_a_file_of_gptq_that_autoround_wrote(tmp_path: Path) -> None:
    name = "auto_round_4_bits_auto_gptq"
    said = {name: value for name, value in SAID[name].items() if name != "packing_format"} | {"quant_method": "gptq"}
    said |= {"amp": True, "enable_minmax_tuning": True, "iters": 200, "lr": 0.005, "data_type": "int"}
    assert "autoround_version" in said
    wanted = write(tmp_path, name, quantization_config=said)
    assert torch.equal(P.load_pretrained(tmp_path, dtype=torch.float32)[1]["layers"][0]["mlp"]["up_proj"], wanted)
    write(tmp_path, name, quantization_config=said | {"data_type": "mx_fp"})
    with pytest.raises(P.UnsupportedError, match="'data_type' is"):
        P.load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("compressed_tensors_fp8_channel", "compressed-tensors; it quantizes activations (float8, dynamic) too"),
        ("modelopt_fp8_older", "modelopt; it quantizes activations (FP8) and caches (FP8) too"),
        ("bitsandbytes_int8", "bitsandbytes; it quantizes activations (int8, dynamic, but for outliers) too"),
        ("compressed_tensors_w4a16", "compressed-tensors"),
        ("mlx_4_bits", "mlx"),
    ],
)
def test_inspect_says_what_else_is_quantized(case: str, words: str, tmp_path: Path) -> None:
    write(tmp_path, case)
    lines = dict(params.inspect.report(tmp_path))
    assert lines["quantized"].startswith(words) and ("exact here" in lines["quantized"]) == ("too" in words)
    assert "problem" not in lines


Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def having(last: str, value: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors | {f"{UP}.{last}": value(tensors[f"{UP}.{last}"]).contiguous()}


def without(last: str) -> Change:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name != f"{UP}.{last}"}


def bytes_of(text: str) -> Callable[[Tensor], Tensor]:
    return lambda _: torch.tensor(list(text.encode()), dtype=torch.uint8)


STATE = "weight.quant_state.bitsandbytes__nf4"
FAULTS: dict[str, tuple[str, Change, str]] = {
    "no absmax": ("bitsandbytes_nf4", without("weight.absmax"), rf"missing are '{UP}.weight.absmax'"),
    "no state": ("bitsandbytes_nf4", without(STATE), rf"missing are '{UP}.{STATE}'"),
    "a state that is no JSON": ("bitsandbytes_nf4", having(STATE, bytes_of("{")), "must be the JSON object of a nf4"),
    "a state of another type": ("bitsandbytes_nf4", having(STATE, lambda t: t.float()), "must be the JSON object"),
    "a state of another shape": (
        "bitsandbytes_nf4",
        having(STATE, bytes_of('{"quant_type": "nf4", "shape": [64, 95], "blocksize": 64}')),
        r"weight' in .*: expected \[3040\] of uint8 in nf4, found \[3072, 1\]|expected \[1, 3040\]",
    ),
    "a hostile shape": (
        "bitsandbytes_nf4",
        having(STATE, bytes_of('{"quant_type": "nf4", "shape": [2147483647, 2147483647], "blocksize": 64}')),
        "expected .* of uint8 in nf4",
    ),
    "a block of 3": (
        "bitsandbytes_nf4",
        having(STATE, bytes_of('{"quant_type": "nf4", "shape": [64, 96], "blocksize": 3}')),
        "has a block size of 3, which is no power of two",
    ),
    "a short table": ("bitsandbytes_nf4", having("weight.quant_map", lambda t: t[:8]), r"quant_map' .*expected \[16\]"),
    "a table that is not finite": (
        "bitsandbytes_nf4",
        having("weight.quant_map", lambda t: t / 0),
        "quant_map': 16 of 16 scales, .* for one, are not finite",
    ),
    "a negative absmax": (
        "bitsandbytes_nf4",
        having("weight.absmax", torch.neg),
        "absmax': .* and 0 or above",
    ),
    "no row scales": ("bitsandbytes_int8", without("SCB"), rf"missing are '{UP}.SCB'"),
    "too few row scales": (
        "bitsandbytes_int8",
        having("SCB", lambda t: t[1:]),
        r"SCB' .*expected \[64\]",
    ),
    "NVFP4 without block scales": ("modelopt_nvfp4", without("weight_scale"), rf"missing are '{UP}.weight_scale'"),
    "NVFP4 with scales of bf16": (
        "modelopt_nvfp4",
        having("weight_scale", lambda t: t.bfloat16()),
        r"weight_scale' .*expected \[64, 6\] of float8_e4m3fn in nvfp4, found \[64, 6\] of bfloat16",
    ),
    "NVFP4 with NaN": (
        "modelopt_nvfp4",
        having("weight_scale", lambda t: (t.view(torch.uint8) | 0x7F).view(t.dtype)),
        "weight_scale': 384 of 384 scales, nan for one",
    ),
    "a global scale of 0": (
        "compressed_tensors_nvfp4",
        having("weight_global_scale", lambda t: t * 0),
        "weight_global_scale': 1 of 1 scales, 0.0 for one, are not finite and above 0",
    ),
    "no global scale": (
        "compressed_tensors_nvfp4",
        without("weight_global_scale"),
        "missing are .*global_scale",
    ),
    "mxfp4 of another group": (
        "compressed_tensors_mxfp4",
        having("weight_scale", lambda t: t[:, :1]),
        r"weight_scale' .*expected \[64, 3\] of uint8",
    ),
    "fp8 channels of another count": (
        "compressed_tensors_fp8_channel",
        having("weight_scale", lambda t: t[:-1]),
        r"weight_scale' .*expected \[64, 1\] .*found \[63, 1\]",
    ),
    "W4A16 without zeros": (
        "compressed_tensors_w4a16_asymmetric",
        without("weight_zero_point"),
        "missing are .*weight_zero_point",
    ),
    "mlx without biases": ("mlx_4_bits", without("biases"), rf"missing are '{UP}.biases'"),
    "hqq without zeros": ("hqq_4_bits_axis_1", without("zero"), rf"missing are '{UP}.zero'"),
    "hqq of another shape": (
        "hqq_4_bits_axis_1",
        having("shape", lambda t: t * 2),
        r"W_q' in .*: expected \[384, 32\] of uint8",
    ),
    "hqq of no shape": ("hqq_4_bits_axis_1", having("shape", lambda t: t.float()), "shape' must be the two sizes"),
    "gemv without zeros": ("autoawq_gemv", without("qzeros"), rf"missing are '{UP}.qzeros'"),
    "gemv with short scales": ("autoawq_gemv", having("scales", lambda t: t[:, :2]), r"scales' .*expected \[64, 3\]"),
    "torchao without scales": ("torchao_int8", without("_weight_scale"), rf"missing are '{UP}._weight_scale'"),
    "another size of the model": (
        "modelopt_nvfp4",
        lambda tensors: having("weight", lambda t: t[:32])(having("weight_scale", lambda t: t[:32])(tensors)),
        rf"{UP}.weight in .*: expected \[64, 96\], found \[32, 96\]",
    ),
    "a part too many": (
        "modelopt_nvfp4",
        lambda t: t | {f"{UP}.pre_quant_scale": torch.ones(96)},
        "pre_quant.*unexpected",
    ),
}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_named(fault: str, keep: bool, tmp_path: Path) -> None:
    case, change, words = FAULTS[fault]
    write(tmp_path, case)
    save_file(change(load_file(tmp_path / FILE)), tmp_path / FILE, {"format": "pt"})
    with pytest.raises(P.MismatchError, match=words) as caught:
        P.load_pretrained(tmp_path, keep_quantized=keep)
    assert str(tmp_path) in str(caught.value) and SAID[case]
