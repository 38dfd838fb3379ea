"""Experts are one leaf [E, ...], whether the files have one tensor per expert or one for all."""

import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import params as P
from fnmodels import llama, tree
from fnmodels.models.common.moe import expert_names
from fnmodels.models.common.spec import weight
from fnmodels.models.common.storage import Stored, TensorSlice
from params.checkpoint import read_leaf, tensor_map
from tests.support.cases import generic_params

SMALL = llama.Config(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)
EXPERTS, INNER = 3, 10
FILE = "model.safetensors"


@pytest.fixture(autouse=True, params=["each", "halves", "turns"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Llama with experts stored one tensor each, or all in one: transposed, concatenated or interleaved."""
    plain, spec = llama.hf_names, llama.spec

    def with_experts(config: llama.Config) -> Any:
        made: Any = spec(config)
        for layer in made["layers"]:
            layer["experts"] = {
                "gate": weight((EXPERTS, INNER, 16), ("expert", "expert_mlp", "embed")),
                "up": weight((EXPERTS, INNER, 16), ("expert", "expert_mlp", "embed")),
                "gate_bias": weight((EXPERTS, INNER), ("expert", "expert_mlp")),
                "up_bias": weight((EXPERTS, INNER), ("expert", "expert_mlp")),
                "down": weight((EXPERTS, 16, INNER), ("expert", "embed", "expert_mlp")),
            }
        return made

    def hf_names(config: llama.Config) -> dict[str, Stored]:
        named: dict[str, Stored] = {
            path: name for path, name in plain(config).items() if ".experts." not in path and isinstance(name, str)
        }
        for i in range(config.num_hidden_layers):
            ours, theirs = f"layers.{i}.experts", f"model.layers.{i}.experts"
            if request.param == "each":
                for leaf in ("gate", "up", "gate_bias", "up_bias", "down"):
                    named[f"{ours}.{leaf}"] = expert_names(theirs, EXPERTS, leaf)
                continue
            for ending in ("", "_bias"):
                for index, leaf in enumerate(("gate", "up")):
                    start, stop, groups = (
                        (index * INNER, (index + 1) * INNER, 1)
                        if request.param == "halves"
                        else (index, index + 1, INNER)
                    )
                    part = TensorSlice(f"{theirs}.gate_up{ending}", start, stop, 2 * INNER, groups, True, True)
                    named[f"{ours}.{leaf}{ending}"] = part
            named[f"{ours}.down"] = TensorSlice(f"{theirs}.down", 0, 16, 16, transposed=True, batched=True)
        return named

    monkeypatch.setattr(llama, "spec", with_experts)
    monkeypatch.setattr(llama, "hf_names", hf_names)
    generic_params.cache_clear()
    yield str(request.param)
    generic_params.cache_clear()


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


def test_what_is_on_disk(folder: Path, layout: str) -> None:
    on_disk, experts = load_file(folder / FILE), generic_params(SMALL)["layers"][1]["experts"]
    where = "model.layers.1.experts"
    if layout == "each":
        assert torch.equal(on_disk[f"{where}.2.up"], experts["up"][2])
    else:
        gate_up, bias = on_disk[f"{where}.gate_up"], on_disk[f"{where}.gate_up_bias"]
        chosen = slice(INNER, None) if layout == "halves" else slice(1, None, 2)
        assert torch.equal(gate_up[2, :, chosen], experts["up"][2].T)
        assert torch.equal(bias[:, chosen], experts["up_bias"])
        assert torch.equal(on_disk[f"{where}.down"][2], experts["down"][2].T)


def test_what_is_mapped(folder: Path, layout: str) -> None:
    """If one tensor holds all experts in our layout, nothing is copied; otherwise each leaf is one allocation."""
    experts = P.load_pretrained(folder)[1]["layers"][0]["experts"]
    assert not experts["down"].is_contiguous() or layout == "each"
    if layout == "halves":
        assert experts["gate"].untyped_storage().data_ptr() == experts["up"].untyped_storage().data_ptr()
    else:
        assert all(experts[leaf].is_contiguous() for leaf in ("gate", "up", "gate_bias", "up_bias"))
    copied = P.load_pretrained(folder, copy=True)[1]
    assert all(leaf.untyped_storage().nbytes() == leaf.nbytes for leaf in tree.leaves(copied))
    assert all(leaf.is_contiguous() for leaf in tree.leaves(copied))
    before = (folder / FILE).read_bytes()
    for leaf in tree.leaves(P.load_pretrained(folder)[1]):
        leaf.zero_()
    assert (folder / FILE).read_bytes() == before


@pytest.mark.parametrize("dtype", [None, torch.float64], ids=["as it is", "cast"])
def test_at_most_one_tensor_beside_the_result(
    folder: Path, layout: str, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporary memory is that of one expert, freed before the next is read."""
    plain, alive, largest = read_leaf.read_tensor, weakref.WeakSet[torch.Tensor](), []

    def watched(file: Any, entry: Any, *rest: Any) -> torch.Tensor:
        assert not len(alive), "the last one is still held"
        tensor = plain(file, entry, *rest)
        if tensor.ndim > 1 and tensor.shape[-1] in (INNER, 2 * INNER):
            alive.add(tensor)
            largest.append(tensor.numel())
        return tensor

    monkeypatch.setattr(read_leaf, "read_tensor", watched)
    loaded = P.load_pretrained(folder, copy=True, dtype=dtype)[1]
    assert equal(loaded, tree.map(lambda leaf: leaf.to(dtype), generic_params(SMALL)))
    # one tensor each: read straight into the result
    wide = 2 * INNER if layout == "turns" else INNER  # of concatenated halves only the needed one is read
    assert (not largest) if layout == "each" else max(largest) == 16 * wide


def test_a_difference_in_one_expert_is_named(folder: Path, layout: str) -> None:
    tensors = load_file(folder / FILE)
    name = next(name for name in tensors if re.fullmatch(r"model.layers.1.experts.(1.)?down", name))
    save_file({n: t for n, t in tensors.items() if n != name}, folder / FILE)
    with pytest.raises(P.MismatchError, match=rf"{name}: missing; expected"):
        P.load_pretrained(folder)
    save_file({**tensors, name: tensors[name][..., 1:].contiguous()}, folder / FILE)
    with pytest.raises(P.MismatchError, match=rf"{name} in .*: expected \[.*\], found \["):
        P.load_pretrained(folder)
    save_file({**tensors, name: tensors[name].bfloat16()}, folder / FILE)
    if layout == "each":
        with pytest.raises(P.MismatchError, match=rf"{name}: bfloat16, but .*experts\.0\.down, .* is float32"):
            P.load_pretrained(folder)
    else:
        assert P.load_pretrained(folder)[1]["layers"][1]["experts"]["down"].dtype == torch.bfloat16


def test_a_leaf_needs_as_many_tensors_as_experts(layout: str) -> None:
    if layout == "each":
        leaf = weight((2, INNER, 16), ("expert", "expert_mlp", "embed"))
        slot = tensor_map.StoredLeaf("experts.gate", leaf, expert_names("experts", 3, "gate"))
        with pytest.raises(ValueError, match="2 entries, but 3 tensors"):
            tensor_map.pieces(slot)
