"""Files with the experts of a layer in one tensor, as published ones of Qwen 3.5, equal those with a tensor of each."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import params as P
from fnmodels import tree
from tests.support.cases import cases, generic_params, off
from tests.support.mtp import with_heads

FILE = "model.safetensors"


def stacked(tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """The tensors with the experts of layers whose names begin with `where` in two: gate and up, and down."""
    of_layers: dict[str, list[dict[str, Tensor]]] = {}
    rest = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(rf"({where}.*\.experts)\.(\d+)\.(\w+)\.weight", name)
        if match is None:
            rest[name] = tensor
            continue
        experts = of_layers.setdefault(match[1], [])
        experts += [{} for _ in range(int(match[2]) + 1 - len(experts))]
        experts[int(match[2])][match[3]] = tensor
    for layer, experts in of_layers.items():
        rest[f"{layer}.gate_up_proj"] = torch.stack([torch.cat((e["gate_proj"], e["up_proj"])) for e in experts])
        rest[f"{layer}.down_proj"] = torch.stack([e["down_proj"] for e in experts])
    return rest


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_5_moe_wrapped", "qwen4_exp", "qwen4_exp_wrapped"])
@pytest.mark.parametrize("where", ["", "mtp"], ids=["all", "of the head"])
def test_experts_in_one_tensor(name: str, where: str, tmp_path: Path) -> None:
    config: Any = with_heads(next(case.config for case in cases() if case.name == name), 1)
    params = generic_params(config)
    P.save_pretrained(tmp_path, config, params)
    tensors = load_file(tmp_path / FILE)
    found = stacked(tensors, where)
    assert len(found) < len(tensors) and any(one.startswith("mtp.") and "gate_up" in one for one in found)
    save_file(found, tmp_path / FILE, metadata={"format": "pt"})
    for copy in (False, True):
        again, loaded = P.load_pretrained(tmp_path, copy=copy)
        assert (
            again == config and tree.flatten(loaded).keys() == tree.flatten(params).keys() and off(loaded, params) == 0
        )
    assert "mtp" not in P.load_pretrained(tmp_path, drop=("mtp",))[1]
    P.save_pretrained(tmp_path / "again", again, loaded)
    assert load_file(tmp_path / "again" / FILE).keys() == tensors.keys()

    gone = next(one for one in found if one.endswith("experts.down_proj"))
    save_file({one: leaf for one, leaf in found.items() if one != gone}, tmp_path / FILE, metadata={"format": "pt"})
    with pytest.raises(P.MismatchError, match=re.escape(gone.removesuffix(".down_proj"))):
        P.load_pretrained(tmp_path)
