"""Methods whose files name a scheme for each group of modules: compressed-tensors, NVIDIA's modelopt, AMD's Quark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.models.common.config_json import Fields, shown

from . import forms
from .declared import Quantization
from .form import ALL, Form
from .settings import MODULES, bits_of, group_of

_FORMATS = (
    *("dense", "float-quantized", "int-quantized", "mixed-precision", "mxfp4-pack-quantized", "mxfp8-quantized"),
    *("naive-quantized", "nvfp4-pack-quantized", "pack-quantized"),
)


def compressed_tensors(inner: Fields, method: str) -> Quantization:
    """llm-compressor's files: each of config_groups has a scheme, and may have a format of its own."""
    layout = inner.choice("format", _FORMATS, "dense")
    cache = inner.take("kv_cache_scheme", None)
    for name in ("transform_config", "sparsity_config"):
        value = inner.take(name, {})
        if value != {} and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise UnsupportedError(f"{inner.where}: {name!r} is {shown(value)}; only an empty one is supported.")
    groups = inner.take("config_groups", {})
    if not isinstance(groups, Mapping) or (not groups and layout != "dense"):
        raise ConfigError(f"{inner.where}: 'config_groups' is {shown(groups)}, but must be an object with groups.")
    scheme_forms: list[Form] = []
    activations: set[str] = set()
    for name, group in groups.items():
        scheme, acts = _compressed_group(Fields(group, f"{inner.where}, {name}"), layout)
        scheme_forms += scheme
        activations |= {acts} if acts else set()
    inner.finish(ignored=("ignore", "global_compression_ratio", "quantization_status", "version"))
    return Quantization(
        method,
        tuple(dict.fromkeys(scheme_forms)),
        activations=" and ".join(sorted(activations)),
        cache=_of_scheme(cache),
    )


def _compressed_group(group: Fields, layout: str) -> tuple[list[Form], str]:
    """(the forms of one of config_groups, how its activations are quantized)."""
    layout = group.choice("format", _FORMATS, layout)
    acts = group.take("input_activations", None)
    group.take("output_activations", None)
    weights = group.take("weights", None)
    group.finish(ignored=("targets",))
    if weights is None or layout == "dense":
        return [], _of_scheme(acts)
    fields = Fields(weights, f"{group.where}, weights")
    fields.expect("dynamic", False)
    kind = fields.choice("type", ("int", "float"), "int")
    strategies = ("tensor", "channel", "group", "block", "tensor_group")
    strategy = fields.choice("strategy", strategies)
    read = _compressed_floats if kind == "float" else _compressed_integers
    made = read(fields, layout, strategy)
    fields.finish(ignored=("block_structure", "group_size", "observer", "observer_kwargs", "scale_dtype", "zp_dtype"))
    return made, _of_scheme(acts)


def _of_scheme(value: Any) -> str:
    """The quantization of activations or of a cache, in words."""
    if not isinstance(value, Mapping):
        return ""
    return f"{value.get('type', 'int')}{value.get('num_bits', 8)}, {'dynamic' if value.get('dynamic') else 'static'}"


def _compressed_floats(fields: Fields, layout: str, strategy: str) -> list[Form]:
    bits = bits_of(fields, "num_bits", 4, 8)
    fields.expect("symmetric", True)
    fields.expect("actorder", None)
    if bits == 4:
        size = fields.integer("group_size")
        if size not in (16, 32):
            raise UnsupportedError(f"{fields.where}: 'group_size' is {size}; of 4-bit floats supported are 16 and 32.")
        if size == 32:
            return [forms.mxfp4("_packed", "_scale")]
        return [forms.nvfp4("_packed", "_global_scale", divides=True)]
    if strategy == "block":
        block = fields.take("block_structure")
        if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 0 < n < 1 << 31 for n in block):
            raise ConfigError(f"{fields.where}: 'block_structure' is {shown(block)}, but must be two sizes.")
        return [forms.fp8_blocks("_scale", (block[0], block[1]))]
    if strategy in ("group", "tensor_group"):
        size = fields.integer("group_size")
        return [forms.mxfp8("_scale")] if layout == "mxfp8-quantized" else [forms.fp8_blocks("_scale", (1, size))]
    return [forms.fp8_tensor("_scale") if strategy == "tensor" else forms.fp8_channel("_scale")]


def _compressed_integers(fields: Fields, layout: str, strategy: str) -> list[Form]:
    symmetric = fields.boolean("symmetric", True)
    order = fields.choice("actorder", ("weight", "static", "group", "dynamic"), "weight")  # with two aliases
    indexed = order in ("group", "dynamic")
    if strategy not in ("tensor", "channel", "group"):
        raise UnsupportedError(f"{fields.where}: 'strategy' is {shown(strategy)}; of integers supported are tensor, "
                               "channel, group.")  # fmt: skip
    group = group_of(fields) if strategy == "group" else 0
    if layout != "pack-quantized":
        bits_of(fields, "num_bits", *range(2, 9))
        rows = {"rows": ALL} if strategy == "tensor" else {}
        return [forms.integers(group, symmetric=symmetric, indexed=indexed, **rows)]
    bits = bits_of(fields, "num_bits", *range(2, 9))
    if strategy == "tensor":
        raise UnsupportedError(f"{fields.where}: 'strategy' is \"tensor\"; of packed integers supported are channel, "
                               "group.")  # fmt: skip
    kinds = (False, True)  # early versions wrote zeros that are not packed
    return [
        forms.packed_integers(bits, group, symmetric=symmetric, indexed=indexed, unpacked=unpacked)
        for unpacked in kinds
    ]


_ALGORITHMS = {
    "FP8": [forms.fp8_tensor("_scale")],
    "FP8_PER_CHANNEL_PER_TOKEN": [forms.fp8_channel("_scale")],
    "FP8_PB_WO": [forms.fp8_blocks("_scale", (128, 128))],
    "MXFP8": [forms.mxfp8("_scale")],
    "NVFP4": [forms.nvfp4("", "_scale_2", divides=False, needed=False)],
    "W4A16_NVFP4": [forms.nvfp4("", "_scale_2", divides=False, needed=False)],
    "MXFP4": [forms.mxfp4("", "_scale")],
    "W4A8_MXFP4_FP8": [forms.mxfp4("", "_scale")],
}
_MERGED = ("autosmoothquant", "awq", "gptq", "smooth")  # algorithms of Quark whose results are in the weights
_WEIGHTS_ONLY = ("FP8_PB_WO", "W4A16_NVFP4", "MXFP4")


def modelopt(inner: Fields, method: str) -> Quantization:
    """NVIDIA's exporter: in config.json, in an older form of it, or in hf_quant_config.json."""
    nested = inner.take("quantization", None)
    inner.take("producer", None)
    fields = inner if nested is None else Fields(nested, f"{inner.where}, quantization")
    algorithm = fields.take("quant_algo", None)
    layers = fields.take("quantized_layers", {})
    cache = fields.take("kv_cache_quant_algo", None) or _of_scheme(fields.take("kv_cache_scheme", None))
    named = [algorithm]
    if algorithm == "MIXED_PRECISION":
        if not isinstance(layers, Mapping) or not all(isinstance(layer, Mapping) for layer in layers.values()):
            raise ConfigError(
                f"{fields.where}: 'quantized_layers' is {shown(layers)}, but must map modules to objects."
            )
        named = [layer.get("quant_algo") for layer in layers.values()]
    for name in named:
        if name is None:
            continue
        if not isinstance(name, str) or name not in _ALGORITHMS:
            raise UnsupportedError(
                f"{fields.where}: 'quant_algo' is {shown(name)}; supported are {', '.join(_ALGORITHMS)}."
            )
    ignored = (*MODULES, "quant_method", "kv_cache_scheme", "config_groups", "group_size", "has_zero_point")
    fields.finish(ignored=(*ignored, "pre_quant_scale", "version"))
    inner.finish(ignored=ignored)
    known = sorted({name for name in named if name is not None})
    modelopt_forms = tuple(form for name in known for form in _ALGORITHMS[name])
    acts = [name for name in known if name not in _WEIGHTS_ONLY]
    return Quantization("modelopt", modelopt_forms, activations=", ".join(acts), cache=str(cache or ""))


def _check_algorithms(inner: Fields) -> None:
    """UnsupportedError for an algorithm of Quark that may turn activations while the model runs, as rotations do."""
    value = inner.take("algo_config", [])
    for algorithm in value if isinstance(value, list) else [value]:
        name = algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm
        if name not in _MERGED:
            raise UnsupportedError(
                f"{inner.where}: 'algo_config' has {shown(name)}; supported are {', '.join(_MERGED)}, of which the "
                "weights in the files hold everything."
            )


def quark(inner: Fields, method: str) -> Quantization:
    """AMD's Quark: e4m3 by tensor or channel, and mxfp4."""
    _check_algorithms(inner)
    quark_forms: list[Form] = []
    base = inner.take("global_quant_config")
    layers = inner.take("layer_quant_config", {})
    kinds = inner.take("layer_type_quant_config", {})
    each = [base] if isinstance(base, Mapping) else []
    for others in (layers, kinds):
        each += list(others.values()) if isinstance(others, Mapping) else []
    acts = False
    for settings in each:
        weights = settings.get("weight") if isinstance(settings, Mapping) else None
        if weights is None:
            continue
        acts = acts or settings.get("input_tensors") is not None
        fields = Fields(weights, f"{inner.where}, weight")
        dtype, scheme = fields.take("dtype"), fields.take("qscheme")
        key = (dtype, scheme)
        known = {
            ("fp8_e4m3", "per_tensor"): forms.fp8_tensor("_scale"),
            ("fp8_e4m3", "per_channel"): forms.fp8_channel("_scale"),
            ("fp4", "per_group"): forms.mxfp4("", "_scale"),
        }
        if not (isinstance(dtype, str) and isinstance(scheme, str)) or key not in known:
            names = ", ".join(" ".join(pair) for pair in known)
            raise UnsupportedError(f"{fields.where} is {shown(dtype)} {shown(scheme)}; supported are {names}.")
        if dtype == "fp4":
            fields.expect("group_size", 32)
            fields.expect("scale_format", "e8m0")
        quark_forms.append(known[key])
    inner.finish(ignored=("exclude", "export", "softmax_quant_spec", "quant_mode", "quant_method",
                          "kv_cache_quant_config", "kv_cache_post_rope", "version"))  # fmt: skip
    cache = "fp8" if inner.values.get("kv_cache_quant_config") else ""
    return Quantization(
        "quark", tuple(dict.fromkeys(quark_forms)), activations="as weights" if acts else "", cache=cache
    )
