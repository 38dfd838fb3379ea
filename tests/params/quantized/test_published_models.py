"""Whole models of publishers' quantized files: read to the bit, kept as stored, and saved plain and in their form."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import params as P
from fnmodels.models.common.registry import config_class, family_for
from params.quantized.kept import KeptWeight
from params.quantized.written import by_path
from tests.params.quantized.published_models import PUBLISHED, Published
from tests.support.cases import generic_params

FILE = "model.safetensors"


def write(folder: Path, published: Published) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """A folder as it is published: (Config, its tensors, the values of those that are quantized)."""
    config = config_class(family_for(published.values["model_type"])).from_hf(published.values)
    P.save_pretrained(folder, config, generic_params(config, torch.bfloat16))
    tensors, wanted = published.stored(load_file(folder / FILE))
    save_file(tensors, folder / FILE, {"format": "pt"})
    (folder / "fnmodels_manifest.json").unlink()
    (folder / "config.json").write_text(json.dumps({**published.values, **published.declared, "dtype": "bfloat16"}))
    return config, tensors, wanted


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_model_has_the_values_of_its_file_and_is_saved_plain(name: str, tmp_path: Path) -> None:
    config, tensors, wanted = write(tmp_path, PUBLISHED[name])
    assert wanted
    read, loaded = P.load_pretrained(tmp_path, dtype=torch.float32)
    assert read == config
    P.save_pretrained(tmp_path / "plain", read, loaded)
    back = load_file(tmp_path / "plain" / FILE)
    for key, values in wanted.items():
        assert torch.equal(back.pop(key), values), key
    assert back.keys() <= tensors.keys() and all(torch.equal(t, tensors[key].to(t.dtype)) for key, t in back.items())
    assert not PUBLISHED[name].declared.keys() & json.loads((tmp_path / "plain" / "config.json").read_text()).keys()
    half = P.dequantize(P.load_pretrained(tmp_path)[1])
    P.save_pretrained(tmp_path / "half", read, half)
    back = load_file(tmp_path / "half" / FILE)
    assert all(torch.equal(back[key], values.to(torch.bfloat16)) for key, values in wanted.items())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_model_kept_is_the_file_again(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    config, tensors, wanted = write(tmp_path, published)
    plain = by_path(P.load_pretrained(tmp_path, dtype=torch.float32)[1])
    kept = P.load_pretrained(tmp_path, dtype=torch.float32, keep_quantized=True)[1]
    leaves = by_path(kept)
    stay = {path for path, leaf in leaves.items() if isinstance(leaf, KeptWeight)}
    assert stay == {path for path in leaves if any(re.fullmatch(pattern, path) for pattern in published.kept)}
    assert all(torch.equal(leaves[path].dequantized(), plain[path]) for path in stay)
    P.save_pretrained(tmp_path / "kept", config, kept)
    back = load_file(tmp_path / "kept" / FILE)
    for key, tensor in back.items():
        if (key in wanted and key not in tensors) or (key in wanted and tensor.dtype != tensors[key].dtype):
            assert torch.equal(tensor, wanted[key]), key
        else:
            assert torch.equal(*(t.flatten().view(torch.uint8) for t in (tensor, tensors[key].to(tensor.dtype)))), key
    values = json.loads((tmp_path / "kept" / "config.json").read_text())
    assert {field: values.get(field) for field in published.declared} == published.declared
    again = by_path(P.load_pretrained(tmp_path / "kept", dtype=torch.float32)[1])
    assert all(torch.equal(again[path], leaf) for path, leaf in plain.items())
