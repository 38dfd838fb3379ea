"""Parameters that are slices of one tensor on disk: the memory they use and share."""

import importlib
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import params as P
from fnmodels import llama, tree
from fnmodels.models.common.storage import Stored, TensorSlice, fuse
from tests.support.cases import generic_params

SMALL = llama.Config(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)
FILE = "model.safetensors"


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama with the on-disk layouts of other families: concatenated rows, grouped rows, transposed."""
    plain = llama.hf_names

    def hf_names(config: llama.Config) -> dict[str, Stored]:
        names: dict[str, Stored] = {**plain(config)}
        for i in range(config.num_hidden_layers):
            attention, mlp = f"layers.{i}.attention.", f"layers.{i}.mlp."
            rows = {"q_proj": 16, "k_proj": 8, "v_proj": 8}
            names |= fuse(f"layers.{i}.qkv", {attention + name: count for name, count in rows.items()})
            names[f"{attention}o_proj"] = TensorSlice(f"layers.{i}.o", 0, 16, 16, transposed=True)
            names[f"{mlp}gate_proj"] = TensorSlice(f"layers.{i}.up", 0, 6, 48, groups=4)
            names[f"{mlp}up_proj"] = TensorSlice(f"layers.{i}.up", 6, 12, 48, groups=4)
        return names

    monkeypatch.setattr(llama, "hf_names", hf_names)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    P.save_pretrained(tmp_path / "model", SMALL, generic_params(SMALL))
    return tmp_path / "model"


def equal(one: Any, two: Any) -> bool:
    flat, other = tree.flatten(one), tree.flatten(two)
    return list(flat) == list(other) and all(torch.equal(leaf, other[path]) for path, leaf in flat.items())


@pytest.mark.parametrize("limit", ["5GB", "2KB"])
@pytest.mark.parametrize("kwargs", [{}, {"copy": True}, {"dtype": torch.float64}], ids=["mapped", "copied", "cast"])
def test_there_and_back(tmp_path: Path, limit: str, kwargs: dict[str, Any]) -> None:
    P.save_pretrained(tmp_path, SMALL, generic_params(SMALL), max_shard_size=limit)
    config, loaded = P.load_pretrained(tmp_path, **kwargs)
    want = tree.map(lambda leaf: leaf.to(kwargs.get("dtype")), generic_params(SMALL))
    assert config == SMALL and equal(loaded, want)
    assert all(kwargs.get("dtype", torch.float32) == leaf.dtype for leaf in tree.leaves(loaded))


def test_parts_are_mapped_and_owned_alone(folder: Path) -> None:
    """A range of rows is mapped as a tensor with its own storage: no copy, and a deep copy copies only its rows."""
    attention = P.load_pretrained(folder)[1]["layers"][0]["attention"]
    q, k, v = (attention[f"{name}_proj"] for name in "qkv")
    assert k.data_ptr() == q.data_ptr() + q.nbytes and v.data_ptr() == k.data_ptr() + k.nbytes
    assert all(leaf.untyped_storage().nbytes() == leaf.nbytes and leaf.is_contiguous() for leaf in (q, k, v))
    copied = P.load_pretrained(folder, copy=True)[1]
    assert all(leaf.untyped_storage().nbytes() == leaf.nbytes for leaf in tree.leaves(copied))
    assert all(leaf.is_contiguous() for leaf in tree.leaves(copied))
    before = (folder / FILE).read_bytes()
    for leaf in tree.leaves(P.load_pretrained(folder)[1]):
        leaf.zero_()
    assert (folder / FILE).read_bytes() == before


def test_one_joined_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("params.checkpoint.export")  # `params.export` is the function
    plain, alive, made = module.join, weakref.WeakSet[torch.Tensor](), []

    def watched(parts: Any) -> torch.Tensor:
        parts = list(parts)
        joined = plain(parts)
        if isinstance(parts[0][0], TensorSlice):
            assert not len(alive), "the last one is still held"
            made.append(joined.shape)
            alive.add(joined)
        return joined

    monkeypatch.setattr(module, "join", watched)
    weights = tree.map(lambda leaf: torch.nn.Parameter(leaf.clone()), generic_params(SMALL))
    P.save_pretrained(tmp_path, SMALL, weights)
    assert made.count((32, 16)) == 2 and equal(P.load_pretrained(tmp_path)[1], generic_params(SMALL))
