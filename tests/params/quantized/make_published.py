"""Make published.safetensors.xz: a weight [64, 96] as each package saves it, and what it dequantizes that to.

    python tests/params/quantized/make_published.py [PACKAGE ...]

It runs in an environment of its own with bitsandbytes, compressed-tensors, torchao, hqq, nvidia-modelopt, auto-round,
gptqmodel, autoawq and mlx. CASE/NAME are the tensors of a module, CASE/wanted its weight in fp32; the metadata have the
package and the quantization_config of each case. Where a package dequantizes in half precision, it gets its scales in
fp32, so that the values are those that its method defines.
"""

import importlib.metadata
import json
import lzma
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

SHAPE = (64, 96)
FILE = Path(__file__).parent / "published.safetensors.xz"
Case = tuple[dict[str, Tensor], Tensor, dict[str, Any]]


def weight(seed: int = 0) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * 0.3


def bitsandbytes() -> Iterator[tuple[str, Case]]:
    import bitsandbytes.functional as F
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute as dequantize

    for kind, nested in (("nf4", True), ("nf4", False), ("fp4", True), ("fp4", False)):
        packed, state = F.quantize_4bit(weight(), blocksize=64, quant_type=kind, compress_statistics=nested)
        absmax = state.absmax
        if nested:
            absmax = F.dequantize_blockwise(state.absmax, state.state2) + state.offset
        # the operation in torch: release 0.50's kernel for AVX512 is wrong where blocks cross rows
        wanted = dequantize(packed.flatten(), absmax, state.code, state.blocksize, SHAPE, torch.float32)
        parts = {"weight": packed} | {f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}
        said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "_load_in_4bit": True}
        said |= {"_load_in_8bit": False, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
        said |= {"bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8", "llm_int8_threshold": 6.0}
        yield f"bitsandbytes_{kind}{'_nested' if nested else ''}", (parts, wanted, said)
    codes, scales, _ = F.int8_vectorwise_quant(weight().half())
    parts = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    said = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
    yield "bitsandbytes_int8", (parts, F.int8_vectorwise_dequant(codes, scales), said)


def compressed_tensors() -> Iterator[tuple[str, Case]]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    fp8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    mx = fp8 | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    groups = {"strategy": "group", "group_size": 32}
    integers = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}
    dynamic = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
    forms: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
        "fp8_tensor": ("float-quantized", fp8 | {"strategy": "tensor"}, dynamic | {"dynamic": False}),
        "fp8_channel": ("float-quantized", fp8 | {"strategy": "channel"}, dynamic),
        "fp8_block": ("float-quantized", fp8 | {"strategy": "block", "block_structure": [48, 64]}, dynamic),
        "w8a8": ("int-quantized", integers | {"num_bits": 8, "strategy": "channel"}, dynamic | {"type": "int"}),
        "w4a16": ("pack-quantized", integers | groups, None),
        "w3a16": ("pack-quantized", integers | groups | {"num_bits": 3}, None),
        "w4a16_asymmetric": ("pack-quantized", integers | groups | {"symmetric": False}, None),
        "w4a8": ("pack-quantized", integers | {"strategy": "channel"}, dynamic),
        "nvfp4": ("nvfp4-pack-quantized", fp8 | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}, None),
        "mxfp4": ("mxfp4-pack-quantized", mx | {"num_bits": 4}, None),
        "mxfp8": ("mxfp8-quantized", mx, dynamic),
    }  # fmt: skip
    for name, (layout, args, acts) in forms.items():
        read = QuantizationArgs(**args)
        scheme = QuantizationScheme(targets=["Linear"], weights=read)
        values = weight()
        blocks = {"tensor": SHAPE, "channel": (1, 96), "block": (48, 64)}
        rows, columns = blocks.get(args["strategy"], (1, args.get("group_size") or 96))
        padded = nn.functional.pad(values, (0, -96 % columns, 0, -64 % rows))
        tiles = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        state = {"weight": values}
        second = None
        if name == "nvfp4":
            state["weight_global_scale"] = second = (448 * 6 / values.abs().max())[None]
        scale, zero = calculate_qparams(tiles.amin((1, 3)), tiles.amax((1, 3)), read, global_scale=second)
        state |= {"weight_scale": scale.float(), "weight_zero_point": zero}
        compressor = BaseCompressor.get_value_from_registry(layout)
        parts = compressor.compress(state, scheme)
        wanted = compressor.decompress(dict(parts), scheme)["weight"].float()
        if name == "nvfp4":  # what `decompress` would round to bf16
            from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
            from compressed_tensors.quantization.lifecycle.forward import dequantize

            codes = unpack_fp4_from_uint8(parts["weight_packed"], *SHAPE, dtype=torch.float32)
            second = parts["weight_global_scale"]
            wanted = dequantize(codes, parts["weight_scale"].float(), args=read, global_scale=second)
        group = {"targets": ["Linear"], "weights": args | {"observer": "minmax"}, "input_activations": acts}
        said = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}
        said |= {"ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed", "version": "0.13"}
        parts = {key: value for key, value in parts.items() if value is not None}
        yield f"compressed_tensors_{name}", (parts, wanted, said)


def torchao() -> Iterator[tuple[str, Case]]:
    import torchao.quantization as Q
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import quantize_
    from transformers import TorchAoConfig

    configs = {
        "int8": Q.Int8WeightOnlyConfig(version=2),
        "int8_groups": Q.Int8WeightOnlyConfig(version=2, granularity=Q.PerGroup(32)),
        "int8_dynamic": Q.Int8DynamicActivationInt8WeightConfig(version=2),
        "fp8": Q.Float8WeightOnlyConfig(version=2),
        "intx": Q.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=Q.PerGroup(32), version=2),
    }
    for name, config in configs.items():
        model = nn.ModuleDict({"up_proj": nn.Linear(*SHAPE[::-1], bias=False)})
        model["up_proj"].weight.data.copy_(weight())
        quantize_(model, config)
        wanted = model["up_proj"].weight.dequantize()
        parts, _ = flatten_tensor_state_dict(model.state_dict())
        said = json.loads(json.dumps(TorchAoConfig(config).to_dict()))
        yield f"torchao_{name}", ({key.removeprefix("up_proj."): t for key, t in parts.items()}, wanted, said)


def hqq() -> Iterator[tuple[str, Case]]:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    for bits, axis in ((8, 1), (4, 1), (4, 0), (3, 1), (3, 0), (2, 1), (2, 0), (1, 1)):
        linear = nn.Linear(*SHAPE[::-1], bias=False)
        linear.weight.data.copy_(weight())
        said = BaseQuantizeConfig(nbits=bits, group_size=32, axis=axis)
        layer = HQQLinear(linear, dict(said), compute_dtype=torch.float32, device="cpu")
        parts = layer.state_dict()
        config = {"quant_method": "hqq", "quant_config": said, "skip_modules": ["lm_head"]}
        yield f"hqq_{bits}_bits_axis_{axis}", (parts, layer.dequantize().float(), config)


def modelopt() -> Iterator[tuple[str, Case]]:
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    packed, scale, second = NVFP4QTensor.quantize(weight(), 16)
    wanted = packed.dequantize(torch.float32, scale=scale, double_scale=second, block_sizes={-1: 16})
    parts = {"weight": packed._quantized_data, "weight_scale": scale, "weight_scale_2": second}
    parts["input_scale"] = torch.tensor(0.01)
    said = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
    said["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}}}
    yield "modelopt_nvfp4", (parts, wanted, said)
    packed, scale = FP8QTensor.quantize(weight())
    wanted = packed.dequantize(torch.float32, scale=scale)
    parts = {"weight": packed._quantized_data, "weight_scale": scale.reshape(()), "input_scale": torch.tensor(0.01)}
    older = {"producer": {"name": "modelopt", "version": "0.23"}}
    older["quantization"] = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    yield "modelopt_fp8_older", (parts, wanted, older)


def integers() -> Iterator[tuple[str, Case]]:
    """Packed by auto-round (its layout of GPTQ) and dequantized by gptqmodel."""
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    for bits in (2, 3, 4, 8):
        for layout, module in (("auto_gptq", qlinear_torch_zp), ("gptqmodel", qlinear_torch)):
            low, high = (f(weight().unflatten(1, (-1, 32)), -1) for f in (torch.amin, torch.amax))
            scale = ((high - low) / ((1 << bits) - 1)).half().float()
            zero = (-low / scale).round().clamp(1, (1 << bits) - 1)
            steps = (weight() / scale.repeat_interleave(32, 1)).round() + zero.repeat_interleave(32, 1)
            wanted = (steps.clamp(0, (1 << bits) - 1) - zero.repeat_interleave(32, 1)) * scale.repeat_interleave(32, 1)
            linear = nn.Linear(*SHAPE[::-1], bias=False)
            linear.weight.data.copy_(wanted)
            layer = module.QuantLinear(bits, 32, *SHAPE[::-1], False)
            layer.device = "cpu"
            layer.pack(linear, scale, zero, None, device="cpu")
            parts = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
            said = {"quant_method": "auto-round", "bits": bits, "group_size": 32, "sym": False, "data_type": "int"}
            said |= {"packing_format": f"auto_round:{layout}", "autoround_version": "0.9", "iters": 200}
            yield f"auto_round_{bits}_bits_{layout}", (parts, wanted, said)


def gptqmodel() -> Iterator[tuple[str, Case]]:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    for bits in (2, 3, 4, 8):
        draw = torch.Generator().manual_seed(bits)
        sizes = {"bits": bits, "group_size": 32, "in_features": 96, "out_features": 64}
        layer = TorchLinear(**sizes, sym=False, desc_act=True, bias=False, register_buffers=True)
        for name in ("qweight", "qzeros"):
            buffer = getattr(layer, name)
            buffer.copy_(torch.randint(-(1 << 31), 1 << 31, buffer.shape, generator=draw).int())
        layer.scales = torch.rand(layer.scales.shape, generator=draw).half().float() + 0.1
        layer.g_idx = torch.randperm(96, generator=draw).int() // 32
        layer.post_init()
        layer.optimized = False
        wanted = layer.dequantize_weight().T.float()
        parts = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales, "g_idx": layer.g_idx}
        said = {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": 32,
            "desc_act": True,
            "checkpoint_format": "gptq_v2",
        }
        yield f"gptqmodel_{bits}_bits", (parts, wanted, said)


def autoawq() -> Iterator[tuple[str, Case]]:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.modules.linear.gemv import WQLinear_GEMV
    from awq.utils.packing_utils import dequantize_gemm

    low, high = (f(weight().unflatten(1, (-1, 32)), -1) for f in (torch.amin, torch.amax))
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(0, 15)
    steps = ((weight() / scale.repeat_interleave(32, 1)).round() + zero.repeat_interleave(32, 1)).clamp(0, 15)
    wanted = (steps - zero.repeat_interleave(32, 1)) * scale.repeat_interleave(32, 1)
    linear = nn.Linear(*SHAPE[::-1], bias=False)
    linear.weight.data.copy_(wanted)
    said = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    gemm = WQLinear_GEMM.from_linear(linear, 4, 32, scales=scale.T.contiguous(), zeros=zero.T.contiguous())
    parts = {name: getattr(gemm, name) for name in ("qweight", "qzeros", "scales")}
    theirs = dequantize_gemm(gemm.qweight, gemm.qzeros, gemm.scales.float(), 4, 32).T
    yield "autoawq_gemm", (parts, theirs, said | {"version": "gemm"})
    gemv = WQLinear_GEMV.from_linear(linear, 4, 32, scales=scale, zeros=zero.to(torch.int32))
    parts = {name: getattr(gemv, name) for name in ("qweight", "qzeros", "scales")}
    yield "autoawq_gemv", (parts, wanted, said | {"version": "gemv"})


def mlx() -> Iterator[tuple[str, Case]]:
    import mlx.core as mx
    import numpy as np

    for bits in (2, 3, 4, 5, 6, 8):
        packed, scales, biases = mx.quantize(mx.array(weight().numpy()), group_size=32, bits=bits)
        wanted = mx.dequantize(packed, scales, biases, group_size=32, bits=bits)
        parts = {"weight": packed, "scales": scales, "biases": biases}
        tensors = {name: torch.from_numpy(np.array(value)) for name, value in parts.items()}
        said = {"group_size": 32, "bits": bits, "mode": "affine"}
        yield f"mlx_{bits}_bits", (tensors, torch.from_numpy(np.array(wanted)), said)


PACKAGES: dict[str, Callable[[], Iterator[tuple[str, Case]]]] = {
    "bitsandbytes": bitsandbytes,
    "compressed-tensors": compressed_tensors,
    "torchao": torchao,
    "hqq": hqq,
    "nvidia-modelopt": modelopt,
    "auto-round": integers,
    "gptqmodel": gptqmodel,
    "autoawq": autoawq,
    "mlx": mlx,
}


def main() -> None:
    tensors, metadata = {}, {}
    if FILE.exists():
        with lzma.open(FILE) as file:
            content = file.read()
        tensors = load(content)
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    for package in sys.argv[1:] or PACKAGES:
        version = importlib.metadata.version(package)
        for name, (parts, wanted, said) in PACKAGES[package]():
            own = parts | {"wanted": wanted.float()}
            tensors |= {f"{name}/{key}": value.detach().contiguous().clone() for key, value in own.items()}
            metadata[name] = json.dumps({"package": f"{package} {version}", "said": said})
    FILE.write_bytes(lzma.compress(save(tensors, metadata), preset=9))


if __name__ == "__main__":
    main()
