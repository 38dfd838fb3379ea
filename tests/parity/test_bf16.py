"""bf16 rounding: each norm equals that of transformers bit for bit, and a layer is as close to fp32."""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.models.common import encoder, moe
from fnmodels.models.common.decoder import embed_and_head, older
from fnmodels.models.common.layers import post_norm
from fnmodels.ops import mla, norm
from params.compare.activations import our_taps, their_taps
from params.compare.batches import batches_of
from tests.support.cases import Case, cases, is_routed, richest, seed_of, sublayers, tokens_of
from tests.support.oracle import model_of, on_disk, params_of


def with_every_key(case: Case) -> Case:
    """The case without a choice of keys, which bf16 would make otherwise where scores are close."""
    counts = {field.name for field in dataclasses.fields(case.config)} & {"index_topk", "index_topk_blocks"}
    if not counts:
        return case
    many = dict.fromkeys(counts, 64)
    return dataclasses.replace(case, values=case.values | many, config=dataclasses.replace(case.config, **many))


BY_TYPE = [with_every_key(c) for c in richest(lambda case: case.config.model_type) if c.values is not None]
every_type = pytest.mark.parametrize("case", BY_TYPE, ids=str)

Norm = Callable[[Tensor], Tensor]


@functools.cache
def reference(case: Case) -> Any:
    """The reference model in bf16, read-only, but for what Inkling 2 computes with in fp32 alone."""
    model: Any = model_of(case.values).bfloat16()
    kept = model._keep_in_fp32_modules_strict if case.family == "inkling2" else ()
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if any(part in name for part in kept):
            value.data = value.data.float()
    return model


def tokens(case: Case) -> Tensor:
    return tokens_of(case.config, 2, 24, seed=seed_of(case))


def norms_of_reference(case: Case) -> dict[str, tuple[Tensor, Tensor]]:
    """{name of a norm's weight on disk: (input, output)} of one forward in bf16."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    model, handles = reference(case), []
    on_file = {tensor.data_ptr(): name for name, tensor in on_disk(model).items()}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if "norm" in type(module).__name__.lower() and isinstance(weight, Tensor) and weight.ndim == 1:
            name = on_file.get(weight.data_ptr())
            if name is None:  # ones that are no parameter (Falcon Mamba)
                continue

            def note(_: Any, given: tuple[Tensor, ...], output: Tensor, name: str = name) -> None:
                found[name] = (given[0], output)

            handles.append(module.register_forward_hook(note))
    try:
        with torch.no_grad():
            model(input_ids=tokens(case), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


def our_norms(case: Case, params: Any) -> dict[str, Norm]:
    """{path of a norm's weight: the function of its input alone that our forward applies}."""
    paths = {id(leaf): path for path, leaf in tree.flatten(params).items()}
    found: dict[str, Norm] = {}
    with pytest.MonkeyPatch.context() as patch:
        for module in (fnmodels.family_of(case.config), embed_and_head, encoder, mla, moe, older, post_norm):
            for name, function in inspect.getmembers(module, inspect.isfunction):
                if function.__module__ == norm.__name__ and "norm" in name:

                    def watched(x: Tensor, *args: Any, function: Any = function, **options: Any) -> Tensor:
                        if id(args[0]) in paths:
                            found[paths[id(args[0])]] = lambda x: function(x, *args, **options)
                        return function(x, *args, **options)

                    patch.setattr(module, name, watched)
        prepared = fnmodels.prepare(case.config, tokens(case))
        with torch.no_grad():
            fnmodels.forward(params, *prepared, config=case.config, kernel="math")
    return found


# Nemotron hands 1 + weight to its norm, and norms without a weight have no parameter, so no call can be matched to
# one; the test of a layer covers it. Those of qwen4_exp stand in modules of ops, and read all rows of a stream there.
_WITHOUT_LAYERS = ("xlm",)  # whose layers have no module of their own in transformers
_UNMATCHED = ("nemotron", "olmo1", "nanochat", "hrm_text", "qwen4_exp")
_ROUNDED_THRICE = ("deberta",)  # normalized values, products and sums, where torch's layer norm and ours round once
matched_types = pytest.mark.parametrize(
    "case", [c for c in BY_TYPE if c.family not in _UNMATCHED and c.config.model_type not in _ROUNDED_THRICE], ids=str
)


@matched_types
def test_norms_round_as_in_transformers(case: Case) -> None:
    params = params_of(reference(case), case.config)
    stored = fnmodels.family_of(case.config).hf_names(case.config)
    theirs, compared = norms_of_reference(case), 0
    for path, function in our_norms(case, params).items():
        if stored[path] in theirs:
            x, wanted = theirs[stored[path]]
            same = float((function(x) == wanted).float().mean())
            assert same > 0.999, f"{path}: {1 - same:.1%} of the elements are rounded otherwise than in transformers"
            compared += 1
    assert compared >= 1 + case.config.num_hidden_layers, compared


@pytest.mark.parametrize("case", [case for case in BY_TYPE if case.family not in _WITHOUT_LAYERS], ids=str)
def test_a_layer_is_as_close_to_fp32_as_transformers(case: Case) -> None:
    """The first layer's parts in bf16 against the reference's in fp32; without experts, whose choice may differ."""
    model, ids = reference(case), tokens(case)
    batch = next(iter(batches_of(case.config, ids.shape[1])))
    with torch.no_grad():
        theirs = their_taps(model, case.config, ids, batch)
        exact = their_taps(copy.deepcopy(model).float(), case.config, ids, batch)
        ours = our_taps(case.config, params_of(model, case.config), ids, batch)
    first = next(i for i, parts in enumerate(sublayers(case.config)) if parts)
    taps = [f"layers.{first}.{name}" for name in ("attention", "output")]
    taps = [tap for tap in taps if tap in ours and tap in theirs]
    taps = [tap for tap in taps if not is_routed(case.config) or tap.endswith("attention")]
    assert taps or is_routed(case.config)
    for tap in taps:
        off, usual = (float((found[tap].float() - exact[tap]).square().mean().sqrt()) for found in (ours, theirs))
        assert off <= 1.3 * usual, f"{tap}: {off / usual:.2f} times as far from fp32 as transformers in bf16"


@pytest.mark.parametrize(
    ("name", "ours", "twin"),
    [("llama", "rms_norm", norm.rms_norm_fp32_weight), ("olmo2", "rms_norm_fp32_weight", norm.rms_norm)],
)
def test_a_norm_swapped_with_its_twin_is_found(
    name: str, ours: str, twin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in cases() if case.name == name)
    owner = post_norm if name == "olmo2" else fnmodels.family_of(case.config)
    monkeypatch.setattr(owner, ours, twin)
    with pytest.raises(AssertionError, match="are rounded otherwise than in transformers"):
        test_norms_round_as_in_transformers(case)
