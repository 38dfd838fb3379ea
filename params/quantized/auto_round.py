"""Intel's AutoRound, whose files have the layouts of GPTQ and AWQ."""

import re
from collections.abc import Mapping

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.models.common.config_json import Fields, shown

from . import forms
from .declared import Quantization
from .form import Form
from .settings import MODULES, bits_of, group_of

# Settings of the quantizer, without effect on what the files mean.
AUTO_ROUND = """
    act_bits act_data_type act_dynamic act_group_size act_sym amp autoround_version batch_size block_name_to_quantize
    dataset enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input gradient_accumulate_steps iters
    low_gpu_mem_usage lr minmax_lr nsamples quant_block_list quant_lm_head scale_dtype seqlen super_bits
    super_group_size sym to_quant_block_names train_bs enable_alg_ext supported_types static_kv_dtype provider
"""


def _backend_layout(inner: Fields) -> str:
    """The layout by `backend`, which releases before 0.4 wrote: auto_round:gptq:exllamav2 has a kernel last."""
    backend = inner.take("backend", "auto")
    if backend == "auto":
        return ""
    words = re.fullmatch(r"(?:auto_round:)?(?:auto_)?(gptq|awq|round)(?::(?:exllamav2|tritonv2|gemm))?", str(backend))
    if not isinstance(backend, str) or words is None:
        raise UnsupportedError(
            f"{inner.where}: 'backend' is {shown(backend)}; supported are auto_round, auto_round:gptq and "
            "auto_round:awq, also with the name of a kernel: auto_round:gptq:exllamav2."
        )
    layout = {"gptq": "auto_round:auto_gptq", "awq": "auto_round:auto_awq", "round": "auto_round"}[words[1]]
    if inner.take("packing_format", layout) != layout:
        raise ConfigError(f"{inner.where}: 'backend' and 'packing_format' disagree.")
    return layout


def auto_round(inner: Fields, method: str) -> Quantization:
    """GPTQ's or AWQ's layout under a name of its own; zeros are stored less 1 where the layout is called auto_gptq."""
    layouts = ("auto_round:auto_gptq", "auto_round:gptqmodel", "auto_round", "auto_round:auto_awq")
    layout = inner.choice("packing_format", layouts, _backend_layout(inner) or layouts[0])
    inner.expect("data_type", "int")
    base = (bits_of(inner, "bits", 2, 3, 4, 8), group_of(inner))
    extra = inner.take("extra_config", {})
    if not isinstance(extra, Mapping) or not all(isinstance(entry, Mapping) for entry in extra.values()):
        raise ConfigError(f"{inner.where}: 'extra_config' is {shown(extra)}, but must map modules to settings.")
    inner.finish(ignored=(*AUTO_ROUND.split(), *MODULES))

    def form(where: Fields, bits: int, group: int) -> Form:
        if not layout.endswith("awq"):
            return forms.gptq(bits, group, zero_offset=int(layout.endswith("auto_gptq")))
        if bits != 4:
            raise UnsupportedError(f"{where.where}: 'bits' is {bits}; in {layout} supported is 4.")
        return forms.awq_gemm(group)

    settings = {base: inner}
    for module, override in extra.items():
        defaults = {"bits": base[0], "group_size": base[1] or -1}
        each = Fields(defaults | dict(override), f"{inner.where}, extra_config, {module}")
        if each.values["bits"] is None or each.values["bits"] in (16, 32):  # not quantized
            continue
        each.expect("data_type", "int")
        settings.setdefault((bits_of(each, "bits", 2, 3, 4, 8), group_of(each)), each)
        each.finish(ignored=AUTO_ROUND.split())
    return Quantization(method, tuple(form(where, *each) for each, where in settings.items()))
