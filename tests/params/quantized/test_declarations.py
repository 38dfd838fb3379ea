"""What a file says of a quantized weight in several places: declarations of older releases, and tensors that agree."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import params as P
from tests.params.quantized.test_dialects import up
from tests.params.quantized.test_published import SAID, UP, write

# {name: (case, its quantization_config)}: as other releases of the packages write the same tensors.
_LOADED = {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4", "llm_int8_threshold": 6.0}
_OLD_ROUND = {
    "quant_method": "intel/auto-round",
    "bits": 4,
    "group_size": 32,
    "autoround_version": "0.3.1",
    "sym": False,
}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "pack_dtype": "int32", "zero_point": True, "sym": False}
_AWQ |= {"desc_act": False, "lm_head": False, "meta": {}}
DECLARATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "bitsandbytes of 2023": ("bitsandbytes_nf4", _LOADED),
    "bitsandbytes of 2023, int8": ("bitsandbytes_int8", {"load_in_4bit": False, "load_in_8bit": True}),
    "AutoRound 0.3": (
        "auto_round_4_bits_auto_gptq",
        _OLD_ROUND | {"backend": "auto_round:gptq:exllamav2"},
    ),
    "AutoRound 0.3, zeros as they are": (
        "auto_round_4_bits_gptqmodel",
        _OLD_ROUND | {"backend": "auto_round:exllamav2"},
    ),
    "AutoRound 0.3, AWQ": ("autoawq_gemm", _OLD_ROUND | {"backend": "auto_round:awq:gemm"}),
    "GPTQModel's AWQ": ("autoawq_gemm", _AWQ | {"checkpoint_format": "gemm"}),
    "GPTQModel's AWQ, gemv": ("autoawq_gemv", _AWQ | {"checkpoint_format": "gemv"}),
    "GPTQModel 4": (
        "auto_round_4_bits_auto_gptq",
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "hyb_act": True},
    ),
}


@pytest.mark.parametrize("name", DECLARATIONS)
def test_declarations_of_other_releases_mean_the_same_tensors(name: str, tmp_path: Path) -> None:
    case, said = DECLARATIONS[name]
    wanted = write(tmp_path, case, quantization_config=said)
    assert torch.equal(up(P.load_pretrained(tmp_path, dtype=torch.float32)[1]), wanted)


# {name: (case, the tensor that says again what the form is, its values, what the message says of them)}
REPEATED: dict[str, tuple[str, str, list[int], str]] = {
    **{
        f"int8 in layout {number}": (
            "bitsandbytes_int8",
            "weight_format",
            [number],
            f"0 in int8 by row, found {number}",
        )
        for number in (1, 2, 3, 9)
    },
    "axis": ("hqq_4_bits_axis_1", "axis", [0], "1 in hqq of 4 bits, found 0"),
    "nbits": ("hqq_4_bits_axis_1", "nbits", [8], "4 in hqq of 4 bits, found 8"),
    "group_size": ("hqq_4_bits_axis_1", "group_size", [64], "32 in hqq of 4 bits, found 64"),
    "quant_scale": ("hqq_4_bits_axis_1", "quant_scale", [1], "0 in hqq of 4 bits, found 1"),
    "quant_zero": ("hqq_4_bits_axis_1", "quant_zero", [1], "0 in hqq of 4 bits, found 1"),
    "packing": ("hqq_4_bits_axis_1", "packing", list(b"4bit_v8"), "'4bit_u8' in hqq of 4 bits, found '4bit_v8'"),
    "too long": ("hqq_4_bits_axis_1", "packing", [52] * 65, "'4bit_u8' in hqq of 4 bits, found 65 numbers"),
}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", REPEATED)
def test_a_tensor_that_contradicts_the_declaration_is_named(name: str, keep: bool, tmp_path: Path) -> None:
    case, ending, values, message = REPEATED[name]
    write(tmp_path, case)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    old = tensors[f"{UP}.{ending}"]
    new = torch.tensor(values, dtype=old.dtype)
    tensors[f"{UP}.{ending}"] = new if old.ndim else new[0]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(P.MismatchError, match=rf"{UP}.{ending}' in .*: expected {re.escape(message)}") as caught:
        P.load_pretrained(tmp_path, keep_quantized=keep)
    assert str(tmp_path) in str(caught.value) and SAID[case]
