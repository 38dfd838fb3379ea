"""The forms of quantized checkpoints that people have, each with a weight [64, 96] or the reason why it is refused.

A weight is one that a package saved (a case of `test_published`), or is made here from the definition of its form, with
its values in fp32 by a loop over blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.params.quantized.test_published import CASES, SAID

SHAPE = (64, 96)
Made = tuple[dict[str, Tensor], Tensor]  # (tensors by the ending of their names, the weight)


@dataclass(frozen=True)
class Dialect:
    """name: in the documentation. said: quantization_config. weight: None where it is refused; refused: words of that.

    file: where `said` stands, "" for config.json.
    """

    name: str
    said: Any
    weight: Callable[[], Made] | None
    refused: str = ""
    file: str = ""


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def case(name: str) -> Callable[[], Made]:
    """What a package saved."""
    return lambda: ({k: t for k, t in CASES[name].items() if k != "wanted"}, CASES[name]["wanted"])


def spread(scales: Tensor, rows: int, columns: int) -> Tensor:
    """The scale of each element, of blocks of rows and columns."""
    out = torch.empty(SHAPE)
    for i, scales_of_rows in enumerate(scales.tolist()):
        for j, scale in enumerate(scales_of_rows):
            out[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] = scale
    return out


def fp8(scale: str, rows: int, columns: int, shape: tuple[int, ...], **more: Tensor) -> Callable[[], Made]:
    """e4m3 with a scale of each block; shape: of the scales in the file. more: further tensors."""

    def made() -> Made:
        codes = (draw(*SHAPE) * 30).to(torch.float8_e4m3fn)
        scales = draw(-(-SHAPE[0] // rows), -(-SHAPE[1] // columns)).abs() * 0.01 + 0.001
        parts = {"weight": codes, scale: scales.reshape(shape)}
        return parts | {name.replace("__", "."): t for name, t in more.items()}, codes.float() * spread(
            scales, rows, columns
        )

    return made


def e8m0(rows: int, columns: int) -> Tensor:
    count = (-(-SHAPE[0] // rows), -(-SHAPE[1] // columns))
    return torch.randint(110, 125, count, generator=torch.Generator().manual_seed(1)).to(torch.uint8)


def fp8_ue8m0() -> Made:
    """DeepSeek V3.1's blocks, whose scales are bytes that stand for powers of two."""
    codes, powers = (draw(*SHAPE) * 30).to(torch.float8_e4m3fn), e8m0(32, 32)
    wanted = codes.float() * spread(2.0 ** (powers.double() - 127), 32, 32)
    return {"weight": codes, "weight_scale_inv": powers.view(torch.float8_e8m0fnu)}, wanted


def fp8_bytes() -> Made:
    """Inkling 2's blocks of 1 x 32, whose powers of two are in a dtype of bytes."""
    codes, powers = (draw(*SHAPE) * 30).to(torch.float8_e4m3fn), e8m0(1, 32)
    return {"weight": codes, "weight_scale": powers}, codes.float() * spread(2.0 ** (powers.double() - 127), 1, 32)


def mxfp8() -> Made:
    codes, powers = (draw(*SHAPE) * 30).to(torch.float8_e4m3fn), e8m0(1, 32)
    return {"weight": codes, "weight_scale_inv": powers}, codes.float() * spread(2.0 ** (powers.double() - 127), 1, 32)


def fp4(codes: str, scale: str, dtype: torch.dtype = torch.uint8) -> Callable[[], Made]:
    """e2m1 with a power of two for each 32 columns."""

    def made() -> Made:
        numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
        packed = torch.randint(0, 256, (64, 48), generator=torch.Generator().manual_seed(2))
        pairs = [(numbers[byte % 16], numbers[byte // 16]) for byte in packed.flatten().tolist()]
        values = torch.tensor(pairs).view(SHAPE)
        powers = e8m0(1, 32)
        return {codes: packed.to(torch.uint8).view(dtype), scale: powers}, values * spread(
            2.0 ** (powers.double() - 127), 1, 32
        )

    return made


def gptq_4_and_8() -> Made:
    """A module of 8 bits in a file whose others have 4."""
    return case("gptqmodel_8_bits")()


def bitnet() -> Made:
    """Four slabs of rows, two bits each; transformers divides the product by weight_scale."""
    codes = torch.randint(0, 3, SHAPE, generator=torch.Generator().manual_seed(3))
    packed = sum(codes[16 * slab : 16 * slab + 16] << 2 * slab for slab in range(4))
    scale = torch.tensor([0.37])
    return {"weight": packed.to(torch.uint8), "weight_scale": scale}, (codes - 1).float() / scale


def torchao_int4() -> Made:
    """Signed halves of bytes, scales and additions [G, out]."""
    codes = torch.randint(-8, 8, SHAPE, generator=torch.Generator().manual_seed(4))
    packed = (codes[:, ::2] & 15 | (codes[:, 1::2] & 15) << 4).to(torch.uint8).view(torch.int8)
    scales, added = draw(3, 64).abs() + 0.1, draw(3, 64, seed=1)
    parts = {"_weight_qdata": packed, "_weight_scale": scales, "_weight_zero_point": added}
    return parts, codes.float() * spread(scales.T, 1, 32) + spread(added.T, 1, 32)


def w8a16() -> Made:
    """Bytes that are 128 more than the codes, four in a word."""
    codes = torch.randint(-128, 128, SHAPE, generator=torch.Generator().manual_seed(6))
    scales, words = draw(64, 1).abs() * 0.01 + 0.001, torch.zeros(64, 24, dtype=torch.int64)
    for column in range(96):
        words[:, column // 4] += codes[:, column] + 128 << 8 * (column % 4)
    words = torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32)
    parts = {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor(SHAPE)}
    return parts, codes.float() * spread(scales, 1, 96)


def with_input_scale(made: Callable[[], Made], name: str) -> Callable[[], Made]:
    """The same beside the scale of quantized activations."""

    def more() -> Made:
        parts, weight = made()
        return parts | {name: torch.tensor([0.02])}, weight

    return more


def kv_only() -> Made:
    """Plain weights, and scales of a quantized cache beside the attention."""
    return {"weight": draw(*SHAPE), "k_scale": torch.tensor(0.1), "v_scale": torch.tensor(0.1)}, draw(*SHAPE)


def compressed(layout: str, weights: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "input_activations": None, "weights": weights}
    groups = {"config_groups": {} if weights is None else {"group_0": group}}
    return {"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"]} | groups | more


def refuse(name: str, method: str, words: str, **said: Any) -> Dialect:
    return Dialect(name, {"quant_method": method} | said, None, words)


FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
STATIC = FP8 | {"activation_scheme": "static", "weight_block_size": None}
BLOCKS = FP8 | {"weight_block_size": [32, 32], "fmt": "e4m3"}
_MIXED = compressed("mixed-precision", None)
_MIXED["config_groups"] = {
    "group_0": SAID["compressed_tensors_nvfp4"]["config_groups"]["group_0"] | {"format": "nvfp4-pack-quantized"},
    "group_1": SAID["compressed_tensors_fp8_channel"]["config_groups"]["group_0"] | {"format": "float-quantized"},
}
_GROUP = SAID["compressed_tensors_nvfp4"]["config_groups"]["group_0"]
_INPUTS = _GROUP["weights"] | {"dynamic": "local", "observer": "static_minmax"}
_WITH_ACTIVATIONS = SAID["compressed_tensors_nvfp4"] | {
    "config_groups": {"group_0": _GROUP | {"input_activations": _INPUTS}}
}
_INT4 = {"_type": "Int4PackingFormat", "_data": "PLAIN"}
_SPARSE = compressed("dense", None, sparsity_config={"format": "sparse-24-bitmask", "sparsity_structure": "2:4"})
_NVFP4 = {k: v for k, v in SAID["modelopt_nvfp4"].items() if k != "quant_method"}
_OLDER = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}}
_ACTIVATION = torch.tensor(0.02)

DIALECTS: tuple[Dialect, ...] = (
    Dialect("fp8 in blocks (DeepSeek V3, Qwen 3)", BLOCKS, fp8("weight_scale_inv", 32, 32, (2, 3))),
    Dialect("fp8 in blocks, ue8m0 scales", BLOCKS | {"scale_fmt": "ue8m0"}, fp8_ue8m0),
    Dialect(
        "fp8 in blocks, ue8m0 scales in bytes (Inkling 2)",
        FP8 | {"weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
        fp8_bytes,
    ),
    Dialect(
        "fp8 by tensor, static (Mistral's instruct files)",
        STATIC,
        fp8("weight_scale_inv", 64, 96, (), activation_scale=_ACTIVATION),
    ),
    Dialect(
        "fp8 by tensor, static (vLLM 2024)",
        {"quant_method": "fp8", "activation_scheme": "static"},
        fp8("weight_scale", 64, 96, (1,), input_scale=_ACTIVATION),
    ),
    Dialect("fp8 by tensor, dynamic, weight_scale", FP8, fp8("weight_scale", 64, 96, ())),
    Dialect(
        "fp8 by tensor, dynamic, weight_scale_inv",
        FP8 | {"weight_block_size": None},
        fp8("weight_scale_inv", 64, 96, ()),
    ),
    Dialect(
        "fp8 in blocks with fp4 experts (DeepSeek V4)",
        BLOCKS | {"expert_dtype": "fp4"},
        fp4("weight", "scale", torch.int8),
    ),
    Dialect("mxfp8", {"quant_method": "mxfp8"}, mxfp8),
    Dialect(
        "fbgemm_fp8",
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        fp8("weight_scale", 1, 96, (64, 1), input_scale_ub=_ACTIVATION),
    ),
    *(
        Dialect(f"compressed-tensors {name}", SAID[f"compressed_tensors_{key}"], case(f"compressed_tensors_{key}"))
        for name, key in {
            "FP8 dynamic": "fp8_channel",
            "FP8 static": "fp8_tensor",
            "FP8 in blocks": "fp8_block",
            "W8A8": "w8a8",
            "W4A16 in groups": "w4a16",
            "W4A16 in groups, asymmetric": "w4a16_asymmetric",
            "W3A16": "w3a16",
            "W4A8": "w4a8",
            "NVFP4": "nvfp4",
            "MXFP4": "mxfp4",
            "MXFP8": "mxfp8",
        }.items()
    ),
    Dialect(
        "compressed-tensors W8A16",
        compressed("pack-quantized", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}),
        w8a16,
    ),
    Dialect(
        "compressed-tensors NVFP4 with activations",
        _WITH_ACTIVATIONS,
        with_input_scale(case("compressed_tensors_nvfp4"), "input_global_scale"),
    ),
    Dialect("compressed-tensors mixed precision", _MIXED, case("compressed_tensors_fp8_channel")),
    Dialect(
        "compressed-tensors, a quantized cache alone",
        compressed("dense", None, kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False}),
        kv_only,
    ),
    Dialect("compressed-tensors 2:4 sparse", _SPARSE, None, "'sparsity_config' is"),
    Dialect("compressed-tensors marlin-24", compressed("marlin-24", {"num_bits": 4}), None, '"marlin-24"; supported'),
    Dialect("modelopt NVFP4", SAID["modelopt_nvfp4"], case("modelopt_nvfp4")),
    Dialect(
        "modelopt FP8",
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        case("modelopt_fp8_older"),
    ),
    Dialect("modelopt, hf_quant_config.json alone", _OLDER, case("modelopt_nvfp4"), file="hf_quant_config.json"),
    Dialect(
        "modelopt FP8, hf_quant_config.json alone",
        {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": {"quant_algo": "FP8"}},
        case("modelopt_fp8_older"),
        file="hf_quant_config.json",
    ),
    Dialect("modelopt, without quant_method", SAID["modelopt_fp8_older"], case("modelopt_fp8_older")),
    Dialect("awq gemm", SAID["autoawq_gemm"], case("autoawq_gemm")),
    Dialect("awq gemv", SAID["autoawq_gemv"], case("autoawq_gemv")),
    Dialect("gptq 4 bits, desc_act", SAID["gptqmodel_4_bits"], case("gptqmodel_4_bits")),
    Dialect(
        "gptq v2",
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
        case("auto_round_4_bits_gptqmodel"),
    ),
    Dialect("gptq 2 bits", SAID["gptqmodel_2_bits"], case("gptqmodel_2_bits")),
    Dialect("gptq 3 bits", SAID["gptqmodel_3_bits"], case("gptqmodel_3_bits")),
    Dialect("gptq 8 bits", SAID["gptqmodel_8_bits"], case("gptqmodel_8_bits")),
    Dialect(
        "gptq with dynamic bits",
        SAID["gptqmodel_4_bits"] | {"dynamic": {"-:.*gate": {}, "+:.*up_proj": {"bits": 8, "group_size": 32}}},
        gptq_4_and_8,
    ),
    Dialect(
        "gptq marlin",
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
        None,
        '"marlin"; supported are gptq',
    ),
    Dialect("auto-round, zeros less 1", SAID["auto_round_4_bits_auto_gptq"], case("auto_round_4_bits_auto_gptq")),
    Dialect("auto-round, zeros as they are", SAID["auto_round_2_bits_gptqmodel"], case("auto_round_2_bits_gptqmodel")),
    Dialect("bitsandbytes nf4", SAID["bitsandbytes_nf4"], case("bitsandbytes_nf4")),
    Dialect("bitsandbytes nf4, nested", SAID["bitsandbytes_nf4_nested"], case("bitsandbytes_nf4_nested")),
    Dialect("bitsandbytes fp4", SAID["bitsandbytes_fp4"], case("bitsandbytes_fp4")),
    Dialect("bitsandbytes int8", SAID["bitsandbytes_int8"], case("bitsandbytes_int8")),
    Dialect(
        "torchao int4",
        {
            "quant_method": "torchao",
            "quant_type": {
                "default": {
                    "_type": "Int4WeightOnlyConfig",
                    "_version": 2,
                    "_data": {"group_size": 32, "int4_packing_format": _INT4},
                }
            },
        },
        torchao_int4,
    ),
    Dialect("torchao int8", SAID["torchao_int8"], case("torchao_int8")),
    Dialect("torchao fp8", SAID["torchao_fp8"], case("torchao_fp8")),
    Dialect("torchao integers of any width", SAID["torchao_intx"], case("torchao_intx")),
    Dialect("hqq 4 bits", SAID["hqq_4_bits_axis_1"], case("hqq_4_bits_axis_1")),
    Dialect("hqq 3 bits, groups of rows", SAID["hqq_3_bits_axis_0"], case("hqq_3_bits_axis_0")),
    Dialect("mlx", SAID["mlx_4_bits"], case("mlx_4_bits")),
    Dialect(
        "mlx, a module of other bits",
        SAID["mlx_4_bits"] | {"model.layers.0.mlp.up_proj": {"group_size": 32, "bits": 6}},
        case("mlx_6_bits"),
    ),
    Dialect(
        "bitnet",
        {"quant_method": "bitnet", "linear_class": "bitlinear", "quantization_mode": "offline"},
        bitnet,
    ),
    Dialect(
        "quark fp8",
        {
            "quant_method": "quark",
            "global_quant_config": {
                "weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
                "input_tensors": {"dtype": "fp8_e4m3", "is_dynamic": False},
            },
            "export": {"weight_format": "real_quantized"},
        },
        fp8("weight_scale", 64, 96, (), input_scale=_ACTIVATION),
    ),
    Dialect(
        "quark mxfp4",
        {
            "quant_method": "quark",
            "global_quant_config": {
                "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"},
            },
        },
        fp4("weight", "weight_scale"),
    ),
    refuse("quanto", "quanto", "X.weight._data", weights="int8"),
    refuse("aqlm", "aqlm", "codebooks"),
    refuse("vptq", "vptq", "codebooks"),
    refuse("exl2", "exl2", "its own kernels", bits=4.0),
    refuse("exl3", "exl3", "its own kernels", bits=3.0),
    refuse("eetq", "eetq", "its own kernels", weights="int8"),
    refuse("higgs", "higgs", "Hadamard", bits=4),
)
