"""Weights as the packages of each method save them: equal to the bit to what the package dequantizes them to."""

import json
import lzma
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from torch import Tensor

import params as P
from fnmodels import llama
from params.checkpoint import header_checks
from params.io import safetensors_file
from params.quantized import weight
from tests.support.cases import generic_params

CONFIG = llama.Config(
    vocab_size=24,
    hidden_size=96,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
UP = "model.layers.0.mlp.up_proj"
FILE = Path(__file__).parent / "published.safetensors.xz"


def _read() -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """({case: its tensors by the ending of their names}, {case: quantization_config})."""
    with lzma.open(FILE) as file:
        content = file.read()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    said = {name: json.loads(value)["said"] for name, value in header["__metadata__"].items()}
    cases: dict[str, dict[str, Tensor]] = {name: {} for name in said}
    for key, tensor in load(content).items():
        name, _, ending = key.partition("/")
        cases[name][ending] = tensor
    return cases, said


CASES, SAID = _read()


def write(folder: Path, case: str, **changes: Any) -> Tensor:
    """A checkpoint whose up projection is that of the case; the weight that it stands for."""
    P.save_pretrained(folder, CONFIG, generic_params(CONFIG, torch.bfloat16))
    tensors = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if UP not in name}
    tensors |= {f"{UP}.{ending}": tensor for ending, tensor in CASES[case].items() if ending != "wanted"}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "fnmodels_manifest.json").unlink()
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": SAID[case]} | changes))
    return CASES[case]["wanted"]


@pytest.mark.parametrize("case", CASES)
def test_every_package(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 equal to the bit, by default rounded once; in chunks, and any shard of it."""
    wanted = write(tmp_path, case)
    exact = P.load_pretrained(tmp_path, dtype=torch.float32)[1]["layers"][0]["mlp"]["up_proj"]
    assert torch.equal(exact, wanted)
    rounded = P.load_pretrained(tmp_path)[1]["layers"][0]["mlp"]["up_proj"]
    assert rounded.is_floating_point() and torch.equal(rounded, wanted.to(rounded.dtype))
    monkeypatch.setattr(weight, "CHUNK", 300)
    buffer = safetensors_file.cast_buffer()
    with ExitStack() as stack:
        _, stored = header_checks.check_folder(tmp_path, stack).found[f"{UP}.weight"]
        assert isinstance(stored, weight.QuantizedWeight)
        for box in ((slice(0, 64), slice(5, 6)), (slice(3, 41), slice(11, 90)), (slice(9, 10), slice(0, 33))):
            assert torch.equal(weight.read_quantized(stored, torch.float32, buffer, box), wanted[box])
