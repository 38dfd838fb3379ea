"""Streaming export: the names, dtypes and bits of the files that were loaded, one tensor at a time."""

import dataclasses
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fnmodels
import params as P
from fnmodels import tree
from tests.support.cases import Case, cases, generic_params, namings


@pytest.mark.parametrize("case", namings(), ids=str)
def test_export_is_the_inverse_of_loading(case: Case, tmp_path: Path) -> None:
    """R5: files to parameters and back for every family and on-disk layout, mapped and copied."""
    P.save_pretrained(tmp_path, case.config, generic_params(case.config))
    wanted = load_file(tmp_path / "model.safetensors")
    for copy in (False, True):
        exported = list(P.export(*P.load_pretrained(tmp_path, copy=copy)))
        names = [name for name, _ in exported]
        assert len(set(names)) == len(names) and set(names) == wanted.keys()
        for name, tensor in exported:
            assert tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name]), name
    config, loaded = P.load_pretrained(tmp_path)
    again = P.from_tensors(config, exported)
    tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True), again, loaded)


def test_tensors_in_memory_are_checked_as_files_are() -> None:
    case = next(case for case in cases() if case.family == "llama")
    named = dict(P.export(case.config, generic_params(case.config)))
    first, *_ = named
    wrong = {**named, first: named[first][1:], "x.weight": torch.ones(2)}
    wrong.pop("model.norm.weight")
    with pytest.raises(P.MismatchError, match="3 differences") as caught:
        P.from_tensors(case.config, wrong.items())
    assert all(words in str(caught.value) for words in ("found [", "norm.weight: missing", "x.weight: unexpected"))
    with pytest.raises(P.MismatchError, match="expected a floating dtype"):
        P.from_tensors(case.config, {**named, first: named[first].long()}.items())
    with pytest.raises(P.MismatchError, match="given twice"):
        P.from_tensors(case.config, [*named.items(), (first, named[first])])
    tied = dataclasses.replace(case.config, tie_word_embeddings=True)
    named["lm_head.weight"] = named["model.embed_tokens.weight"].clone()
    P.from_tensors(tied, named.items())
    named["lm_head.weight"][0, 0] += 1
    with pytest.raises(P.MismatchError, match="they are one tensor"):
        P.from_tensors(tied, named.items())


@pytest.mark.parametrize("case", namings(), ids=str)
def test_nothing_is_copied_that_lies_as_it_is_on_disk(case: Case) -> None:
    """Other tensors are made one at a time, and not kept after they are yielded."""
    weights = tree.map(lambda leaf: leaf.clone().requires_grad_(leaf.is_floating_point()), generic_params(case.config))
    leaves = {leaf.data_ptr() for leaf in tree.leaves(weights)}
    plain = {name for name in fnmodels.family_of(case.config).hf_names(case.config).values() if isinstance(name, str)}
    earlier = None
    for name, tensor in P.export(case.config, weights):
        assert not tensor.requires_grad
        assert earlier is None or earlier() is None
        assert tensor.data_ptr() in leaves or name not in plain
        earlier = weakref.ref(tensor) if tensor.data_ptr() not in leaves else None
        del tensor


def test_what_does_not_fit_is_named_before_anything_is_handed_out() -> None:
    case = cases()[0]
    weights = dict(generic_params(case.config))
    weights.pop("embed_tokens")
    with pytest.raises(P.MismatchError, match="embed_tokens: missing"):
        P.export(case.config, weights)
