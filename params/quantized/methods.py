"""The methods of quantization: for each name that a file may give, the function that reads its settings, or why not.

METHODS   name -> function of (settings, name) that returns the forms its weights may have
REFUSED   name -> what its files hold that is not read, the end of a sentence
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError, MismatchError, UnsupportedError
from fnmodels.models.common.bookkeeping import QUANTIZATION
from fnmodels.models.common.config_json import Fields, shown
from params.io.files import read_json

from . import forms
from .auto_round import AUTO_ROUND, auto_round
from .declared import Declaration, Described, Quantization, declared_dtype, shape_of
from .form import Form
from .schemes import compressed_tensors, modelopt, quark
from .settings import MODULES, bits_of, group_of, refuse_rotation
from .torchao import torchao

Read = Callable[[Fields, str], Quantization]


HF_QUANT = "hf_quant_config.json"  # where NVIDIA's exporter says it, beside a config.json that may not


def read_quantization(values: Mapping[str, Any], folder: Path | None = None) -> Quantization | None:
    """The quantization by config.json (`values`) or hf_quant_config.json in `folder`; None where neither has one.

    It is looked for at the top of config.json and in the configs of a model's parts. UnsupportedError for a method that
    is not read, ConfigError for what cannot be, both with the name of the file.
    """
    if places := list(_places(values)):
        declared = [
            read_method(inner, f"config.json, {', '.join(keys)}", values, _beside(values, keys))
            for inner, keys in places
        ]
        first = declared[0]
        for other, (_, keys) in zip(declared, places, strict=True):
            if (other.method, other.forms, other.modules) != (first.method, first.forms, first.modules):
                raise ConfigError(
                    f"config.json: {', '.join(places[0][1])} and {', '.join(keys)} disagree: {first.method} and "
                    f"{other.method}, or their settings; one of them is to be removed."
                )
        inner, keys = places[0]
        return replace(first, declaration=_declaration(inner, keys, beside=_beside(values, keys)))
    if folder is not None and os.path.lexists(folder / HF_QUANT):
        content = read_json(folder / HF_QUANT)
        if not isinstance(content, dict):
            raise ConfigError(f"{HF_QUANT} must hold a JSON object.")
        read = read_method({"quant_method": "modelopt", **content}, HF_QUANT, values)
        return replace(read, declaration=_declaration(content, (), HF_QUANT))
    return None


def _declaration(
    content: Any, keys: tuple[str, ...], file: str = "", beside: Mapping[str, Any] | None = None
) -> Declaration:
    return Declaration(json.dumps(content, sort_keys=True), keys, file, json.dumps(beside or {}, sort_keys=True))


def _beside(values: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """The settings of a quantization that stand beside it, in the same config: DeepSeek V4's `expert_dtype`."""
    for key in keys[:-1]:
        values = values[key]
    return {name: values[name] for name in ("expert_dtype",) if values.get(name) is not None}


def _places(values: Mapping[str, Any]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """(quantization, its path of keys) of each place that has one, the outermost first."""
    parts = {(name,): part for name, part in values.items() if isinstance(part, Mapping) and name not in QUANTIZATION}
    for keys, config in ({(): values} | parts).items():
        for name in QUANTIZATION:
            if config.get(name) is not None:
                yield config[name], (*keys, name)


def read_method(
    value: Any, where: str, values: Mapping[str, Any], beside: Mapping[str, Any] | None = None
) -> Quantization:
    """The `Quantization` of a quantization_config; `where` names the file, `values` are those of config.json.

    beside: settings that may stand beside it; those of the same name in it come first, as in transformers.
    """
    inner = Fields(value, where)
    name = _name(inner)
    if beside and name == "fp8":
        inner = Fields({**beside, **value}, where)
        inner.take("quant_method", None)
    if name in REFUSED:
        raise UnsupportedError(f"{where}: 'quant_method' is {shown(name)}, {REFUSED[name]}.")
    if name not in METHODS:
        raise UnsupportedError(f"{where}: 'quant_method' is {shown(name)}; supported are {', '.join(sorted(METHODS))}.")
    return replace(METHODS[name](inner, name), dtype=declared_dtype(values))


_LOADED_IN = frozenset(("load_in_4bit", "load_in_8bit"))


def _name(inner: Fields) -> str:
    """The method's name; of MLX and of older files of modelopt and bitsandbytes, which have none, by the fields."""
    method = inner.take("quant_method", None)
    if method is None and ("quant_algo" in inner.values or isinstance(inner.values.get("quantization"), Mapping)):
        return "modelopt"
    if method is None and inner.values.keys() >= _LOADED_IN:  # transformers of 2023
        return "bitsandbytes"
    if method is None and {"group_size", "bits"} <= inner.values.keys() and isinstance(inner.values["bits"], int):
        return "mlx"
    if method is None:
        raise ConfigError(f"{inner.where} has no 'quant_method', which is needed.")
    if not isinstance(method, str):
        raise ConfigError(f"{inner.where}: 'quant_method' is {shown(method)}, but must be a string.")
    return method


# Settings of quantizers and of kernels, without effect on what the files mean.
_GPTQ = """
    act_group_aware backend batch_size block_name_to_quantize cache_block_outputs damp_auto_increment damp_percent
    dataset disable_exllama exllama_config hyb_act lm_head max_input_length model_file_base_name
    model_name_or_path model_seqlen module_name_preceding_first_block modules_in_block_to_quantize pad_token_id
    quantizer static_groups sym tokenizer true_sequential use_cuda_fp16 use_exllama
"""
_AWQ = "desc_act do_fuse fuse_max_seq_len modules_to_fuse exllama_config"
_BNB = """
    bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_use_double_quant
    llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_skip_modules llm_int8_threshold
"""


def _fp8(inner: Fields, method: str) -> Quantization:
    """e4m3: in blocks, by tensor, or by row; some files spell the scale `weight_scale`, others `weight_scale_inv`."""
    block_size = inner.take("weight_block_size", None)
    blocks = [128, 128] if "weight_block_size" not in inner.values else block_size
    scheme = inner.choice("activation_scheme", ("dynamic", "static"), "dynamic")
    inner.expect("fmt", "e4m3", "float8_e4m3fn")  # MiniMax's files have the second name
    powers_of_two = inner.choice("scale_fmt", ("float", "ue8m0"), "float") == "ue8m0"
    experts = inner.choice("expert_dtype", ("fp8", "fp4"), "fp8")
    inner.expect("is_checkpoint_fp8_serialized", True)
    inner.finish(ignored=(*MODULES, "kv_cache_scheme", "quantization_skip_layers", "kv_cache_quant_algo"))
    if method == "mxfp8":
        blocks = None
    if blocks is not None:
        sizes = isinstance(blocks, list) and all(type(n) is int and 0 < n < 1 << 31 for n in blocks)
        if not sizes or len(blocks) != 2:
            raise ConfigError(
                f"{inner.where}: 'weight_block_size' is {shown(blocks)}, but must be two sizes, [128, 128]."
            )
    named = block_size is not None

    def forms_of(scale: str) -> Iterator[Form]:
        # By tensor comes first: one scale for a small weight would be one block too, which no mesh may cut.
        if not named:
            yield from (forms.fp8_tensor(scale), forms.fp8_channel(scale))
        if blocks is not None:
            yield replace(forms.fp8_blocks(scale, (1, blocks[1])), only=forms.ENGRAM)
            yield forms.fp8_blocks(scale, (blocks[0], blocks[1]))
        if method == "mxfp8":
            yield forms.mxfp8(scale)
        if experts == "fp4":
            yield forms.mxfp4("", scale)
        if named:  # shards of tables, whose one scale would be too few blocks of any other weight
            yield replace(forms.fp8_tensor(scale), only=forms.SHARD)

    fp8_forms = [form for scale in ("_scale_inv", "_scale") for form in forms_of(scale)]
    # DeepSeek V4's and Mistral's own names
    fp8_forms += [forms.in_module(form, scale) for scale in ("scale", "qscale_weight") for form in forms_of("")]
    if powers_of_two:
        fp8_forms = [forms.ue8m0(form) for form in fp8_forms]
    return Quantization(method, tuple(fp8_forms), activations=f"fp8, {scheme}")


def _mxfp4(inner: Fields, method: str) -> Quantization:
    inner.finish(ignored=MODULES)
    return Quantization(method, (forms.mxfp4_blocks(),))


def _fbgemm(inner: Fields, method: str) -> Quantization:
    inner.take("activation_scale_ub", None)
    inner.finish(ignored=MODULES)
    fbgemm_forms = (forms.fp8_channel("_scale"), forms.fp8_column("_scale"))
    return Quantization(method, fbgemm_forms, activations="fp8, dynamic")


def _gptq(inner: Fields, method: str) -> Quantization:
    bits, group = bits_of(inner, "bits", 2, 3, 4, 8), group_of(inner)
    inner.expect("is_marlin_format", False)
    inner.expect("pack_dtype", "int32")
    formats = {
        inner.choice(name, ("gptq", "gptq_v2"), "")
        for name in ("checkpoint_format", "format")
        if inner.take(name, None) is not None
    } or {"gptq"}
    if len(formats) > 1:
        raise ConfigError(f"{inner.where}: 'checkpoint_format' and 'format' disagree.")
    offset, indexed = int(formats == {"gptq"}), inner.boolean("desc_act", False)
    if inner.take("autoround_version", None) is not None:  # AutoRound writes files of GPTQ under this name
        inner.expect("data_type", "int")
    overrides = inner.take("dynamic", {})
    if not isinstance(overrides, Mapping) or not all(isinstance(entry, Mapping) for entry in overrides.values()):
        raise ConfigError(f"{inner.where}: 'dynamic' is {shown(overrides)}, but must map patterns to settings.")
    refuse_rotation(inner)
    quantizer = AUTO_ROUND.split() if inner.read["autoround_version"] is not None else []
    inner.finish(ignored=(*_GPTQ.split(), *quantizer))
    settings = {(bits, group)}
    for pattern, override in overrides.items():
        if not pattern.startswith("-:"):  # patterns are not matched: shapes tell which settings a module has
            each = Fields({"bits": bits, "group_size": group or -1, **override}, f"{inner.where}, dynamic, {pattern}")
            settings.add((bits_of(each, "bits", 2, 3, 4, 8), group_of(each)))
            each.finish(ignored=("sym", "desc_act", "static_groups", "mse", "damp_percent", "act_group_aware"))
    ordered = sorted(settings, key=lambda setting: setting != (bits, group))
    gptq_forms = (forms.gptq(*each, zero_offset=offset, indexed=indexed) for each in ordered)
    return Quantization(method, tuple(gptq_forms))


def _awq(inner: Fields, method: str) -> Quantization:
    bits_of(inner, "bits", 4)
    group, names = group_of(inner), ("version", "format", "checkpoint_format")  # the last two are GPTQModel's
    versions = {inner.choice(name, ("gemm", "GEMM", "gemv", "GEMV"), "gemm").lower() for name in names
                if inner.take(name, None) is not None} or {"gemm"}  # fmt: skip
    if len(versions) > 1:
        values = ", ".join(sorted(versions))
        raise ConfigError(f"{inner.where}: two of {', '.join(map(repr, names))} disagree: {values}.")
    (version,) = versions
    inner.expect("pack_dtype", "int32")
    inner.expect("zero_point", True)
    if inner.take("backend", "") == "llm-awq":
        raise UnsupportedError(f"{inner.where}: 'backend' is \"llm-awq\", whose files have another layout than gemm.")
    refuse_rotation(inner)
    inner.finish(ignored=(*_GPTQ.split(), *_AWQ.split(), *MODULES))
    return Quantization(method, (forms.awq_gemm(group) if version == "gemm" else forms.awq_gemv(group),))


def _bitsandbytes(inner: Fields, method: str) -> Quantization:
    four, eight = (
        any([inner.boolean(name, False), inner.boolean(f"_{name}", False)]) for name in ("load_in_4bit", "load_in_8bit")
    )
    kind = inner.choice("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    inner.finish(ignored=_BNB.split())
    if four == eight:
        raise ConfigError(f"{inner.where}: one of 'load_in_4bit' and 'load_in_8bit' must be true.")
    if eight:
        return Quantization(method, (forms.row_int8(),), activations="int8, dynamic, but for outliers")
    return Quantization(method, (forms.codebook4(kind, 64, 0),), describe=_bnb_state)


def _bnb_state(form: Form, state: Tensor) -> Described:
    """The form and shape that a quant_state says, a JSON object as bytes."""
    try:
        values = json.loads(bytes(state.flatten().tolist()) if state.dtype == torch.uint8 else b"")
    except ValueError:
        values = None
    values = values if isinstance(values, dict) else {}
    shape = values.get("shape")
    sizes = isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and 0 < n < 1 << 31 for n in shape)
    if not isinstance(shape, list) or not sizes or values.get("quant_type") != form.name:
        raise MismatchError(f"must be the JSON object of a {form.name} weight with its 'shape', two sizes")
    block = _power(values.get("blocksize"))
    nested = 0
    numbers: tuple[tuple[str, float], ...] = ()
    if values.get("nested_blocksize") is not None:
        offset = values.get("nested_offset")
        if not isinstance(offset, float | int) or not abs(offset) < 3e38:
            raise MismatchError("has no finite 'nested_offset'")
        nested, numbers = _power(values["nested_blocksize"]), ((forms.NESTED_OFFSET, float(offset)),)
    return Described(forms.codebook4(form.name, block, nested), (shape[0], shape[1]), numbers)


def _power(value: Any) -> int:
    if type(value) is not int or not 2 <= value <= 1 << 20 or value & value - 1:
        raise MismatchError(f"has a block size of {shown(value)}, which is no power of two")
    return value


def _hqq(inner: Fields, method: str) -> Quantization:
    settings = inner.take("quant_config")
    inner.finish(ignored=("skip_modules", *MODULES))
    hqq_forms: dict[tuple[int, int, int], Form] = {}
    outer = {"": settings} if isinstance(settings, Mapping) and "weight_quant_params" in settings else settings
    if not isinstance(outer, Mapping) or not outer:
        raise ConfigError(f"{inner.where}: 'quant_config' is {shown(settings)}, but must be an object.")
    for name, group_settings in outer.items():
        group = Fields(group_settings, f"{inner.where}, quant_config{', ' + name if name else ''}")
        weights = Fields(group.take("weight_quant_params"), f"{group.where}, weight_quant_params")
        for nested in ("scale_quant_params", "zero_quant_params"):
            if group.take(nested, None) is not None:
                raise UnsupportedError(f"{group.where}: {nested!r} is set; scales and zeros that are quantized are not "
                                       "read.")  # fmt: skip
        group.finish(ignored=("offload_meta",))
        key = (bits_of(weights, "nbits", 1, 2, 3, 4, 8), group_of(weights), weights.integer("axis", 0, low=0, high=1))
        weights.finish(ignored=("channel_wise", "optimize", "round_zero", "view_as_float"))
        hqq_forms.setdefault(key, forms.hqq(key[0], key[1], by_row=key[2] == 1))
    axes = {key: key[2] for key in hqq_forms}

    def describe(form: Form, state: Tensor) -> Described:
        return _hqq_shape(form, state, axes[next(key for key, known in hqq_forms.items() if known is form)])

    return Quantization(method, tuple(hqq_forms.values()), describe=describe)


def _hqq_shape(form: Form, state: Tensor, axis: int) -> Described:
    """With axis 0, groups are columns of the matrix of all elements with `group` rows."""
    out, inputs = shape_of(form, state).shape or (0, 0)
    group = form.width or inputs
    if out * inputs % group:
        raise MismatchError(f"is {[out, inputs]}, which groups of {group} do not divide")
    return Described(replace(form, width=group if axis else out * inputs // group), (out, inputs))


def _mlx(inner: Fields, method: str) -> Quantization:
    """MLX, and transformers' metal: integers with a scale and a bias for each group of inputs."""
    biases = "qbiases" if method == "metal" else "biases"
    base = _affine(inner, biases)
    if method == "metal":
        inner.finish(ignored=MODULES)
        return Quantization(method, (base,))
    modules: dict[str, tuple[Form, ...]] = {}
    for name, value in inner.values.items():
        if isinstance(value, Mapping):
            each = Fields(value, f"{inner.where}, {name}")
            modules[name] = (_affine(each, biases),)
            each.finish()
        elif value is False:  # not quantized
            modules[name] = ()
    inner.finish(ignored=(*modules, "quant_method", "linear_class", "quantization_mode"))
    return Quantization(method, (base,), modules)


def _affine(fields: Fields, biases: str) -> Form:
    fields.expect("mode", "affine")
    return forms.affine(bits_of(fields, "bits", 2, 3, 4, 5, 6, 8), fields.integer("group_size"), biases)


def _bitnet(inner: Fields, method: str) -> Quantization:
    divides = inner.choice("linear_class", ("bitlinear", "autobitlinear"), "bitlinear") == "bitlinear"
    inner.expect("quantization_mode", "offline")
    inner.expect("use_rms_norm", False)
    inner.finish(ignored=(*MODULES, "rms_norm_eps"))
    return Quantization(method, (forms.ternary(divides=divides),), activations="int8, dynamic")


METHODS: dict[str, Read] = {
    "auto-round": auto_round,
    "awq": _awq,
    "bitnet": _bitnet,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": compressed_tensors,
    "fbgemm_fp8": _fbgemm,
    "fp8": _fp8,
    "gptq": _gptq,
    "hqq": _hqq,
    "intel/auto-round": auto_round,
    "metal": _mlx,
    "mlx": _mlx,
    "modelopt": modelopt,
    "modelopt_fp4": modelopt,
    "modelopt_mixed": modelopt,
    "mxfp4": _mxfp4,
    "mxfp8": _fp8,
    "quark": quark,
    "torchao": torchao,
}
_KERNELS = "whose files hold weights in the order that its own kernels for GPUs read, which is not read here"
_CODEBOOKS = "whose files hold indices into learned codebooks of vectors, which are not read here"
_ROTATED = "whose files hold weights that are rotated by Hadamard matrices, which are not read here"
_ON_LOADING = "which quantizes while it loads: its files are not meant to be quantized, and what these hold is not read"
REFUSED = {
    "aqlm": _CODEBOOKS,
    "vptq": _CODEBOOKS,
    "quip": _CODEBOOKS,
    "exl2": _KERNELS,
    "exl3": _KERNELS,
    "eetq": _KERNELS,
    "marlin": _KERNELS,
    "gptq_marlin": _KERNELS,
    "higgs": _ROTATED,
    "fp_quant": _ROTATED,
    "quanto": "whose tensors, X.weight._data and X.weight._scale, are not read here",
    "spqr": "whose files hold outliers apart from the weights, which are not read here",
    "squeezellm": "whose files hold outliers apart from the weights, which are not read here",
    "sinq": "whose files hold a second scale for each input, which is not read here",
    "gemma": "whose activations are rounded to ranges in the files, which is part of that model and not read here",
    "fouroversix": _ON_LOADING,
    "nvfp4": _ON_LOADING,
    "experts_int8": _ON_LOADING,
    "tpu_int8": _ON_LOADING,
    "deepspeedfp": _ON_LOADING,
    "gguf": "which is a file format of its own: load_pretrained reads *.gguf files, and fnmodels-convert converts them",
}
