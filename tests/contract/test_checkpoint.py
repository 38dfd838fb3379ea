"""Checkpoints of every family: saved and loaded bit for bit, under the names that the config implies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.models.common import storage
from tests.support.cases import Case, generic_params, namings, representatives

every_naming = pytest.mark.parametrize("case", namings(), ids=str)
every_part = pytest.mark.parametrize("case", representatives(), ids=str)


def saved(case: Case, folder: Path, **options: Any) -> Path:
    P.save_pretrained(folder, case.config, generic_params(case.config), **options)
    return folder


@every_naming
def test_round_trip(case: Case, tmp_path: Path) -> None:
    """L5: config and the bits of every tensor come back.

    Each leaf has a name on disk, a tied head has none, and no other tensor is written.
    """
    folder = saved(case, tmp_path / "model")
    config, weights = P.load_pretrained(folder)
    assert config == case.config and hash(config) == hash(case.config)
    flat, wanted = tree.flatten(weights), tree.flatten(generic_params(case.config))
    assert flat.keys() == wanted.keys()
    for path, tensor in flat.items():
        assert tensor.dtype == wanted[path].dtype and torch.equal(tensor, wanted[path]), path
    names = fnmodels.family_of(case.config).hf_names(case.config)
    assert names.keys() == wanted.keys()
    with safe_open(folder / "model.safetensors", "pt") as file:
        on_disk = set(file.keys())
    assert on_disk == {name for stored in names.values() for name in storage.disk_names(stored)}


@every_part
def test_a_missing_and_an_unexpected_tensor_are_both_named(case: Case, tmp_path: Path) -> None:
    """L3: strict both ways, in one error."""
    file = saved(case, tmp_path / "model") / "model.safetensors"
    tensors = load_file(file)
    lost = sorted(tensors)[0]
    kept = {name: tensor.clone() for name, tensor in tensors.items() if name != lost}
    save_file({**kept, "model.layers.0.surprise.weight": torch.ones(2)}, file, metadata={"format": "pt"})
    with pytest.raises(P.MismatchError) as caught:
        P.load_pretrained(file.parent)
    assert lost in str(caught.value) and "model.layers.0.surprise.weight" in str(caught.value)


@every_part
def test_loading_in_another_precision(case: Case, tmp_path: Path) -> None:
    """L7: leaves are cast to the requested dtype, except keep_dtype leaves, which are fp32 even for files in bf16."""
    spec = tree.flatten(fnmodels.family_of(case.config).spec(case.config))
    wide = generic_params(case.config)
    narrow = tree.map(Tensor.bfloat16, wide)
    for stored, asked in ((wide, torch.bfloat16), (narrow, torch.bfloat16), (narrow, None)):
        P.save_pretrained(tmp_path / f"{asked}", case.config, stored)
        _, weights = P.load_pretrained(tmp_path / f"{asked}", dtype=asked)
        wanted = tree.flatten(stored)
        for path, tensor in tree.flatten(weights).items():
            dtype = torch.float32 if spec[path].keep_dtype else torch.bfloat16
            assert tensor.dtype == dtype and torch.equal(tensor, wanted[path].to(dtype)), path
