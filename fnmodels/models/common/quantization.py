"""`quantization`: the checked `quantization_config` of a config.json. It has no effect on the maths.

`params.checkpoint` dequantizes what this accepts (`dequantize`, `integer_weights`). Which tensors are quantized is
determined from the files, not from lists of modules.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fnmodels.errors import ConfigError, UnsupportedError

from .config_json import Fields, shown


@dataclass(frozen=True)
class Quantization:
    """How the weights in a checkpoint's files are quantized.

    method: "fp8", "mxfp4", "gptq", "awq", or a format of compressed-tensors, "pack-quantized" or "int-quantized".
    block: for fp8, how many rows and columns share a scale. Of integers: bits of a code; group, the inputs that share
    a scale (0: all inputs of an output); zero_offset, what is added to stored zeros; symmetric, whether zeros may be
    missing; indexed, whether each input's group has to be in the files.
    """

    method: str
    block: tuple[int, int] = (128, 128)
    bits: int = 4
    group: int = 0
    zero_offset: int = 0
    symmetric: bool = False
    indexed: bool = False


def quantization(fields: Fields) -> Quantization | None:
    """The checked `quantization_config`, or None; UnsupportedError for a scheme that loading cannot dequantize."""
    value = fields.take("quantization_config", None)
    if value is None:
        return None
    inner = Fields(value, f"{fields.where}, quantization_config")
    readers = {"fp8": _fp8, "mxfp4": _fp8, "gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}
    method = inner.choice("quant_method", tuple(readers))
    return readers[method](inner, method)


def quantization_of(values: Mapping[str, Any]) -> Quantization | None:
    """`quantization` of a config.json accepted by a family; of its `text_config` if only that has it."""
    text = values.get("text_config")
    inner = quantization(Fields(text)) if isinstance(text, Mapping) else None
    return quantization(Fields(values)) or inner


def _fp8(inner: Fields, method: str) -> Quantization:
    block = inner.take("weight_block_size", [128, 128])
    if method == "fp8" and inner.values.get("weight_block_size", block) is None:
        raise UnsupportedError(
            f"{inner.where}: 'weight_block_size' is null, one scale for all of a tensor; only blocks are supported."
        )
    sizes = isinstance(block, list) and all(type(n) is int and 0 < n < 1 << 31 for n in block)
    if not sizes or len(block) != 2:
        raise ConfigError(f"{inner.where}: 'weight_block_size' is {shown(block)}, but must be two sizes, [128, 128].")
    inner.expect("activation_scheme", "dynamic")  # static activation scales would be further tensors
    inner.expect("fmt", "e4m3", "float8_e4m3fn")  # MiniMax's files have the second name
    inner.expect("scale_fmt", "float", "ue8m0")  # ue8m0: powers of two, in fp32 all the same
    inner.expect("expert_dtype", "fp8")
    inner.finish(ignored=("modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize"))
    return Quantization(method, (block[0], block[1]))


# Settings of the quantizer and of kernels, without effect on what the files mean.
_GPTQ_IGNORED = """
    act_group_aware backend batch_size block_name_to_quantize cache_block_outputs damp_auto_increment damp_percent
    dataset disable_exllama exllama_config lm_head max_input_length meta model_file_base_name
    model_name_or_path model_seqlen module_name_preceding_first_block modules_in_block_to_quantize pad_token_id
    quantizer static_groups sym tokenizer true_sequential use_cuda_fp16 use_exllama
"""
_AWQ_IGNORED = "desc_act do_fuse fuse_max_seq_len ignore modules_to_fuse modules_to_not_convert"


def _gptq(inner: Fields, method: str) -> Quantization:
    bits, group = _bits(inner, "bits", 4, 8), _group(inner)
    inner.expect("is_marlin_format", False)
    inner.expect("pack_dtype", "int32")
    formats = {
        inner.choice(name, ("gptq", "gptq_v2"), "")
        for name in ("checkpoint_format", "format")
        if inner.take(name, None) is not None
    } or {"gptq"}
    if len(formats) > 1:
        raise ConfigError(f"{inner.where}: 'checkpoint_format' and 'format' disagree.")
    overrides = inner.take("dynamic", {})
    if not isinstance(overrides, Mapping) or not all(name.startswith("-:") for name in overrides):
        raise UnsupportedError(
            f"{inner.where}: 'dynamic' is {shown(overrides)}; only modules left out, '-:PATTERN', are supported."
        )
    indexed = inner.boolean("desc_act", False)
    inner.finish(ignored=_GPTQ_IGNORED.split())
    return Quantization(method, bits=bits, group=group, zero_offset=int(formats == {"gptq"}), indexed=indexed)


def _awq(inner: Fields, method: str) -> Quantization:
    bits, group = _bits(inner, "bits", 4), _group(inner)
    inner.expect("version", "gemm", "GEMM")
    inner.expect("format", "gemm")
    inner.expect("zero_point", True)
    if inner.take("backend", "") == "llm-awq":
        raise UnsupportedError(f"{inner.where}: 'backend' is \"llm-awq\", whose files have another layout than gemm.")
    inner.finish(ignored=(*_GPTQ_IGNORED.split(), *_AWQ_IGNORED.split()))
    return Quantization(method, bits=bits, group=group)


def _compressed(inner: Fields, method: str) -> Quantization:
    formats = ("pack-quantized", "int-quantized", "naive-quantized")
    method = inner.choice("format", formats).replace("naive", "int")  # two names of one layout
    if inner.take("kv_cache_scheme", None) is not None:
        raise UnsupportedError(f"{inner.where}: 'kv_cache_scheme' is set; only null is supported.")
    for name in ("transform_config", "sparsity_config"):
        value = inner.take(name, {})
        if value != {} and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise UnsupportedError(f"{inner.where}: {name!r} is {shown(value)}; only an empty one is supported.")
    groups = inner.take("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError(f"{inner.where}: 'config_groups' is {shown(groups)}, but must be an object with groups.")
    found = {_scheme(Fields(group, f"{inner.where}, {name}"), method) for name, group in groups.items()}
    inner.finish(ignored=("ignore", "global_compression_ratio", "quantization_status", "version"))
    if len(found) > 1:
        raise UnsupportedError(f"{inner.where}: 'config_groups' has groups that differ; one scheme is supported.")
    return found.pop()


def _scheme(group: Fields, method: str) -> Quantization:
    """One of compressed-tensors' config_groups: integers, with activations as they are."""
    for name in ("input_activations", "output_activations"):
        if group.take(name, None) is not None:
            raise UnsupportedError(
                f"{group.where}: {name!r} is set: quantized activations would change the maths; only weights are "
                "dequantized, and null is supported."
            )
    group.expect("format", method, method.replace("int", "naive"))
    weights = Fields(group.take("weights"), f"{group.where}, weights")
    group.finish(ignored=("targets",))
    weights.choice("type", ("int",))
    weights.expect("dynamic", False)
    bits, symmetric = _bits(weights, "num_bits", 4, 8), weights.boolean("symmetric", True)
    grouped = weights.choice("strategy", ("group", "channel")) == "group"
    size = _group(weights) if grouped else 0
    order = weights.choice("actorder", ("weight", "static", "group", "dynamic"), "weight")  # with two aliases
    ignored = ("block_structure", "group_size", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    weights.finish(ignored=ignored)
    indexed = order in ("group", "dynamic")
    return Quantization(method, bits=bits, group=size, symmetric=symmetric, indexed=indexed)


def _bits(fields: Fields, name: str, *read: int) -> int:
    bits = fields.integer(name)
    if bits not in read:
        raise UnsupportedError(f"{fields.where}: {name!r} is {bits}; supported are {', '.join(map(str, read))}.")
    return bits


def _group(fields: Fields) -> int:
    """Inputs that share a scale; 0 for the -1 that stands for all."""
    size = fields.integer("group_size", low=-1)
    if size == 0:
        raise ConfigError(f"{fields.where}: 'group_size' is 0, but must be -1 (all inputs) or above 0.")
    return max(0, size)
