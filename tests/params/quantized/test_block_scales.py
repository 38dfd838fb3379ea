"""fp8 and mxfp4 checkpoints: equal to a ten-line reference, in bounded memory, refused where scales do not fit."""

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
from fnmodels import deepseek, llama, phi3, tree
from params.io import safetensors_file
from params.quantized import forms, weight
from params.quantized.declared import Quantization
from tests.support.cases import generic_params

SIZES = {
    "vocab_size": 40,
    "hidden_size": 200,  # blocks of 128 leave 72
    "intermediate_size": 300,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
LATENT = {"q_lora_rank": 150, "kv_lora_rank": 130, "qk_nope_head_dim": 30, "qk_rope_head_dim": 8, "v_head_dim": 20}
EXPERTS = {"n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 140}
CONFIGS = {
    "llama": llama.Config(**SIZES),
    "phi3": phi3.Config(**SIZES),  # fused tensors
    "deepseek": deepseek.Config(  # a tensor per expert, and an MTP head
        **{name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "head_dim")},
        **LATENT,
        **EXPERTS,
        layer_kinds=("full", "full_moe"),
        num_nextn_predict_layers=1,
    ),
}
FILE = "model.safetensors"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def from_fp8(values: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The fp8 reference, element by element."""
    out = torch.empty(values.shape, dtype=dtype)
    for i in range(values.shape[-2]):
        for j in range(scales.shape[-1]):
            block = values[..., i, 128 * j : 128 * j + 128].float()
            out[..., i, 128 * j : 128 * j + 128] = block * scales[..., i // 128, j, None].float()
    return out


def from_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The mxfp4 reference, byte by byte; [.., in, out]."""
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    flat = [(numbers[byte % 16], numbers[byte // 16]) for byte in blocks.flatten().tolist()]
    values = torch.tensor(flat, dtype=torch.float64).view(*scales.shape, 32)
    return (values * 2.0 ** (scales.double()[..., None] - 127)).flatten(-2).transpose(-1, -2).to(dtype)


def to_fp8(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Random values and scales; they need not approximate the originals."""
    *lead, out, width = tensor.shape
    scales = torch.rand(*lead, -(-out // 128), -(-width // 128), generator=torch.Generator().manual_seed(out)) + 0.01
    return (tensor * 30).to(torch.float8_e4m3fn), scales


def write(folder: Path, config: Any, **changes: Any) -> dict[str, Tensor]:
    """A checkpoint whose projections are fp8, as DeepSeek's and Qwen's; its tensors."""
    P.save_pretrained(folder, config, generic_params(config, torch.bfloat16))
    return rewrite(folder, quantized_tensors(load_file(folder / FILE)), quantization_config={**FP8, **changes})


def quantized_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if "_proj" in name:
            out[name], out[f"{name}_scale_inv"] = to_fp8(tensor)
        else:
            out[name] = tensor
    return out


def rewrite(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> dict[str, Tensor]:
    save_file(tensors, folder / FILE, {"format": "pt"})
    (folder / "fnmodels_manifest.json").unlink(missing_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return tensors


def dequantized(tensors: dict[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    plain = {name: t for name, t in tensors.items() if not name.endswith("_scale_inv")}
    made = {
        name: from_fp8(t, tensors[f"{name}_scale_inv"], dtype) if f"{name}_scale_inv" in tensors else t.to(dtype)
        for name, t in plain.items()
    }
    return made | {name: t.float() for name, t in plain.items() if name.endswith("e_score_correction_bias")}


@pytest.mark.parametrize("kwargs", [{}, {"copy": True}, {"dtype": torch.float32}], ids=["mapped", "copied", "cast"])
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_fp8(family: str, kwargs: dict[str, Any], chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit-equal to the reference, smaller last blocks included; saving gives the dequantized bf16 checkpoint."""
    monkeypatch.setattr(weight, "CHUNK", chunk)
    config = CONFIGS[family]
    tensors = write(tmp_path / "fp8", config)
    loaded_config, loaded = P.load_pretrained(tmp_path / "fp8", **kwargs)
    assert loaded_config == config
    P.save_pretrained(tmp_path / "back", loaded_config, loaded)
    back, wanted = load_file(tmp_path / "back" / FILE), dequantized(tensors, kwargs.get("dtype", torch.bfloat16))
    assert back.keys() == wanted.keys()
    for name, tensor in back.items():
        assert tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name]), name
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert all(leaf.untyped_storage().nbytes() == leaf.nbytes for leaf in tree.leaves(loaded))


@pytest.mark.parametrize("scale", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_fp8_with_scales_in_half_precision(scale: torch.dtype, dtype: torch.dtype | None, tmp_path: Path) -> None:
    """bf16 scales, as in Qwen 3's files: the product is still taken in fp32."""
    values, scales = to_fp8(torch.randn(3, 200, 150, generator=torch.Generator().manual_seed(0)))
    scales = scales.to(scale)
    got = read(tmp_path, {"w": values, "w_scale_inv": scales}, blocks(128, 128), "w", dtype)
    assert got.dtype == (dtype or torch.bfloat16)
    assert torch.equal(got, from_fp8(values, scales, got.dtype))
    rounded = (
        values.to(scale) * scales.repeat_interleave(128, -2)[:, :200].repeat_interleave(128, -1)[..., :150]
    ).float()
    assert dtype is None or not torch.equal(got, rounded)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
@pytest.mark.parametrize("lead", [(), (3,)])
def test_mxfp4(dtype: torch.dtype | None, lead: tuple[int, ...], tmp_path: Path) -> None:
    """Every byte and every scale except NaN, exactly."""
    tensors = {
        "w_blocks": torch.arange(256, dtype=torch.uint8).repeat(2 * 48).view(2 * 48, 16, 16)[: 2 * 48].contiguous(),
        "w_scales": torch.arange(2 * 48 * 16).remainder(255).to(torch.uint8).view(2 * 48, 16),
    }
    if lead:
        tensors = {name: t.view(*lead, 32, *t.shape[1:]) for name, t in tensors.items()}
    got = read(tmp_path, tensors, Quantization("mxfp4", (forms.mxfp4_blocks(),)), "w", dtype)
    wanted = from_mxfp4(tensors["w_blocks"], tensors["w_scales"], dtype or torch.bfloat16)
    assert got.dtype == wanted.dtype and got.shape == (*lead, 512, 32 if lead else 96)
    # products beyond the largest float are infinite, as they are in fp32
    assert torch.equal(got, wanted if dtype != torch.float64 else wanted.float().double())
    assert torch.isfinite(got).double().mean() > 0.99 and (got.float().abs() < 1e-38).any()


def test_mxfp4_with_a_scale_that_is_not_a_number(tmp_path: Path) -> None:
    tensors = {"w_blocks": torch.zeros(1, 1, 16, dtype=torch.uint8), "w_scales": torch.tensor([[255]]).to(torch.uint8)}
    with pytest.raises(P.MismatchError, match=r"'w_scales': 1 of 1 scales, nan for one, are not finite and above 0"):
        read(tmp_path, tensors, Quantization("mxfp4", (forms.mxfp4_blocks(),)), "w", None)


def test_fp8_has_numbers_that_are_none(tmp_path: Path) -> None:
    values = torch.tensor([[0x7F, 0xFF, 0x7E, 0x80]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    got = read(tmp_path, {"w": values, "w_scale_inv": torch.tensor([[2.0]])}, blocks(128, 128), "w", None)
    assert got[0, :2].isnan().all() and got[0, 2:].tolist() == [896.0, 0.0] and got[0, 3].signbit()


def blocks(rows: int, columns: int) -> Quantization:
    return Quantization("fp8", (forms.fp8_blocks("_scale_inv", (rows, columns)),))


def read(
    folder: Path, tensors: dict[str, Tensor], quantization: Quantization, name: str, dtype: torch.dtype | None
) -> Tensor:
    """One tensor by itself; a shard equals that slice of the full tensor."""
    save_file(tensors, folder / FILE)
    with ExitStack() as stack:
        file = safetensors_file.open_tensors(folder / FILE, stack)
        buffer = safetensors_file.cast_buffer()
        found, faults = weight.pair({key: (file, entry) for key, entry in file.entries.items()}, quantization, buffer)
        if faults:
            raise P.MismatchError(", ".join(faults))
        assert list(found) == [name]
        tensor = found[name][1]
        assert isinstance(tensor, weight.QuantizedWeight)
        whole = weight.read_quantized(tensor, dtype, buffer)
        box = tuple(slice(size // 3, size // 3 + max(1, size // 2)) for size in whole.shape)
        part = weight.read_quantized(tensor, dtype, buffer, box)
        assert torch.equal(part.nan_to_num(), whole[box].nan_to_num())
        return whole


def test_what_is_held_on_the_way_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are read in chunks of rows, and each is dequantized before the next is read."""
    plain, largest = weight.read_tensor, []

    def watched(file: Any, entry: Any, *rest: Any) -> Tensor:
        tensor = plain(file, entry, *rest)
        largest.append(tensor.numel())
        return tensor

    monkeypatch.setattr(weight, "read_tensor", watched)
    monkeypatch.setattr(weight, "CHUNK", 128 * 1024)
    values, scales = to_fp8(torch.randn(2, 1000, 700))
    wanted = from_fp8(values, scales)
    got = read(tmp_path, {"w": values, "w_scale_inv": scales}, blocks(128, 128), "w", None)
    assert torch.equal(got, wanted) and 128 * 700 <= max(largest) <= weight.CHUNK


FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "no scale": (
        lambda t: {name: x for name, x in t.items() if name != "model.layers.1.mlp.up_proj.weight_scale_inv"},
        r"layers.1.mlp.up_proj.weight' in .*: float8_e4m3fn in fp8 in blocks, but missing are .*weight_scale_inv'",
    ),
    "floor in place of ceil": (
        lambda t: {**t, "model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(2, 1)},
        r"model.layers.0.mlp.up_proj.weight_scale_inv' in .*: expected \[3, 2\] of float32 or .* found \[2, 1\]",
    ),
    "scales of more than fp32 holds": (
        lambda t: {**t, "model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(3, 2).double()},
        r"up_proj.weight_scale_inv' in .*: expected \[3, 2\] of float32 or bfloat16 or float16 .* \[3, 2\] of float64",
    ),
    "a scale of nothing": (
        lambda t: {**t, "model.norm.weight_scale_inv": torch.ones(1, 1)},
        r"'model.norm.weight_scale_inv' in .*: unexpected",
    ),
    "another shape": (
        lambda t: {
            **t,
            "model.layers.0.mlp.up_proj.weight": torch.ones(300, 201).to(torch.float8_e4m3fn),
        },
        r"model.layers.0.mlp.up_proj.weight in .*: expected \[300, 200\], found \[300, 201\]",
    ),
    "another kind of 8 bits": (
        lambda t: {**t, "model.layers.0.mlp.up_proj.weight": torch.ones(300, 200).to(torch.float8_e5m2)},
        r"model.layers.0.mlp.up_proj.weight in .*: expected a floating dtype, found float8_e5m2",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_named(fault: str, tmp_path: Path) -> None:
    change, words = FAULTS[fault]
    rewrite(tmp_path, change(write(tmp_path, CONFIGS["llama"])))
    with pytest.raises(P.MismatchError, match=words):
        P.load_pretrained(tmp_path)


def test_fp8_that_config_json_does_not_speak_of(tmp_path: Path) -> None:
    write(tmp_path, CONFIGS["llama"])
    rewrite(tmp_path, load_file(tmp_path / FILE), quantization_config=None)
    with pytest.raises(P.MismatchError, match=r"q_proj.weight in .*: expected a floating dtype, found float8_e4m3fn"):
        P.load_pretrained(tmp_path)


def test_weights_that_are_dequantized_already(tmp_path: Path) -> None:
    """A dequantized model whose config.json still has the quantization_config loads unchanged."""
    P.save_pretrained(tmp_path, CONFIGS["llama"], generic_params(CONFIGS["llama"]))
    rewrite(tmp_path, load_file(tmp_path / FILE), quantization_config=FP8)
    flat, wanted = (tree.flatten(t) for t in (P.load_pretrained(tmp_path)[1], generic_params(CONFIGS["llama"])))
    assert all(torch.equal(flat[path], wanted[path]) for path in wanted)


MXFP4_FAULTS: dict[str, tuple[dict[str, Tensor], str]] = {
    "no scales": (
        {"w_blocks": torch.zeros(2, 1, 16, dtype=torch.uint8)},
        "'w_blocks' in .*: uint8 in mxfp4, but missing are 'w_scales'",
    ),
    "scales of another shape": (
        {"w_blocks": torch.zeros(2, 1, 16, dtype=torch.uint8), "w_scales": torch.zeros(2, 2, dtype=torch.uint8)},
        r"'w_scales' in .*: expected \[2, 1\] of uint8 .* found \[2, 2\] of uint8",
    ),
    "blocks of another size": (
        {"w_blocks": torch.zeros(2, 1, 8, dtype=torch.uint8), "w_scales": torch.zeros(2, 1, dtype=torch.uint8)},
        r"'w_blocks' in .*: expected \[.., out, in / 32, 16\] of uint8, found \[2, 1, 8\] of uint8",
    ),
    "twice": (
        {
            "w_blocks": torch.zeros(2, 1, 16, dtype=torch.uint8),
            "w_scales": torch.zeros(2, 1, dtype=torch.uint8),
            "w": torch.zeros(32, 2),
        },
        "'w_blocks' in .*: 'w' is there as well",
    ),
}


@pytest.mark.parametrize("fault", MXFP4_FAULTS)
def test_mxfp4_that_does_not_fit_is_named(fault: str, tmp_path: Path) -> None:
    tensors, words = MXFP4_FAULTS[fault]
    with pytest.raises(P.MismatchError, match=words):
        read(tmp_path, tensors, Quantization("mxfp4", (forms.mxfp4_blocks(),)), "w", None)


CONFIG_FAULTS: dict[str, tuple[Any, type[Exception], str]] = {
    "unknown": (
        {"quant_method": "no such", "bits": 4},
        P.UnsupportedError,
        "'quant_method' is \"no such\"; supported are auto-round",
    ),
    "none": ({"bits": 4}, P.ConfigError, "has no 'quant_method'"),
    "not an object": ([], P.ConfigError, "must hold a JSON object"),
    "three sizes": ({**FP8, "weight_block_size": [1, 2, 3]}, P.ConfigError, "must be two sizes"),
    "no sizes": ({**FP8, "weight_block_size": [0, 128]}, P.ConfigError, "must be two sizes"),
    "fp6": ({**FP8, "expert_dtype": "fp6"}, P.UnsupportedError, "'expert_dtype' is \"fp6\""),
    "unheard of": ({**FP8, "group_size": 32}, P.ConfigError, "group_size = 32"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_what_config_json_says_and_nobody_can_read(fault: str, tmp_path: Path) -> None:
    value, kind, words = CONFIG_FAULTS[fault]
    write(tmp_path, CONFIGS["llama"])
    rewrite(tmp_path, load_file(tmp_path / FILE), quantization_config=value)
    with pytest.raises(kind, match=words) as caught:
        P.load_pretrained(tmp_path)
    assert "quantization_config" in str(caught.value)


def test_other_block_sizes(tmp_path: Path) -> None:
    values, _ = to_fp8(torch.randn(5, 7))
    scales = torch.rand(3, 3)
    got = read(tmp_path, {"w": values, "w_scale_inv": scales}, blocks(2, 3), "w", torch.float32)
    wanted = torch.stack([values.float()[i, j] * scales[i // 2, j // 3] for i in range(5) for j in range(7)])
    assert torch.equal(got.flatten(), wanted)
