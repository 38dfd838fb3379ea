"""The settings of torchao, in which each kind of weight has the name and the fields of a class."""

from collections.abc import Mapping
from typing import Any

from fnmodels.errors import UnsupportedError
from fnmodels.models.common.config_json import Fields, shown

from . import forms
from .declared import Quantization
from .form import ALL, EACH, Axis, Form
from .settings import MODULES, group_of


def torchao(inner: Fields, method: str) -> Quantization:
    """The forms of the weights that the settings of torchao may give."""
    kinds = inner.take("quant_type")
    inner.finish(ignored=(*MODULES, "include_input_output_embeddings", "untie_embedding_weights",
                          "quant_type_kwargs", "include_embedding"))  # fmt: skip
    if isinstance(kinds, str) or not isinstance(kinds, Mapping) or not kinds:
        raise UnsupportedError(
            f"{inner.where}: 'quant_type' is {shown(kinds)}, of a release of torchao that saved pickles; read is what "
            "later releases save as safetensors, {'default': {'_type': ..., '_data': ...}}."
        )
    read = [form for settings in kinds.values() for form in _forms(inner, settings)]
    acts = {name for settings in kinds.values() if "DynamicActivation" in (name := str(settings.get("_type")))}
    return Quantization(method, tuple(read), activations=", ".join(sorted(acts)))


def _forms(inner: Fields, one: Any) -> list[Form]:
    kind = one.get("_type") if isinstance(one, Mapping) else None
    data = one.get("_data") if isinstance(one, Mapping) else None
    data = data if isinstance(data, Mapping) else {}
    if kind in ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"):
        return [forms.torchao_fp8(EACH, ALL), forms.torchao_fp8(ALL, ALL), forms.torchao_fp8(Axis(128), Axis(128))]
    group = _group(inner, data)
    integers = ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "IntxWeightOnlyConfig")
    if kind in (*integers, "Int8DynamicActivationIntxWeightConfig"):
        return [forms.torchao_integers(group)]
    packing = data.get("int4_packing_format", {})
    if kind == "Int4WeightOnlyConfig" and (packing.get("_data") if isinstance(packing, Mapping) else "") == "PLAIN":
        return [forms.torchao_int4(group)]
    raise UnsupportedError(
        f"{inner.where}: 'quant_type' is {shown(one)}; supported are {', '.join(integers)}, "
        "Int8DynamicActivationIntxWeightConfig, Float8WeightOnlyConfig, Float8DynamicActivationFloat8WeightConfig, and "
        "Int4WeightOnlyConfig with the packing PLAIN."
    )


def _group(inner: Fields, data: Mapping[str, Any]) -> int:
    """Inputs that share a scale: of `group_size`, or of a granularity; 0 for all."""
    for name in ("granularity", "weight_granularity"):
        granularity = data.get(name)
        sizes = granularity.get("_data") if isinstance(granularity, Mapping) else None
        if isinstance(sizes, Mapping) and "group_size" in sizes:
            return group_of(Fields(sizes, f"{inner.where}, {name}"))
    return group_of(Fields(data, inner.where)) if data.get("group_size") is not None else 0
