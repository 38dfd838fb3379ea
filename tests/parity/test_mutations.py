"""Planted bugs that the comparison detects: wrongly converted weights, slightly changed maths."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
from fnmodels import llama, tree
from fnmodels.inputs import Window
from fnmodels.inputs.rules import Tokens
from fnmodels.ops import rotary
from fnmodels.ops.attention.select import attention
from fnmodels.ops.norm import rms_norm
from tests.support.cases import Case, block_of, cases, richest, seed_of, structure, structures, tokens_of
from tests.support.naming import fewest
from tests.support.oracle import assert_close, logits_of, model_of, params_of, shared_model

WITH_REFERENCE = [case for case in structures() if case.values is not None]


def _with_every_tensor() -> list[Case]:
    """Of each block few model types, with all names and kinds of layers of the others between them: its code is one."""
    blocks: dict[Any, dict[Case, set[str]]] = {}
    for case in richest(lambda case: case.config.model_type):
        if case.values is not None:
            _, kinds, names, looks_back = structure(case)
            blocks.setdefault((block_of(case), looks_back), {})[case] = {*kinds, *names}
    return [case for parts in blocks.values() for case in fewest(parts)]


TENSORS = _with_every_tensor()


def _interleaved(weight: Tensor, head_dim: int) -> Tensor:
    """Rows in the order of the original Llama files (pairs side by side) where the half layout is expected."""
    heads = weight.unflatten(0, (-1, 2, head_dim // 2))
    return heads.transpose(1, 2).reshape(weight.shape)


def _fails(case: Case, params: object, theirs: Tensor, tokens: Tensor) -> bool:
    ours = fnmodels.forward(params, *fnmodels.prepare(case.config, tokens), config=case.config, kernel="math")
    try:
        assert_close(ours, theirs)
    except AssertionError:
        return True
    return False


def _gradients(case: Case, params: Any, tokens: Tensor) -> dict[str, list[Tensor]]:
    """{path: the gradients of a few logits by the leaf}."""
    flat = tree.flatten(params)
    leaves = {path: leaf.clone().requires_grad_() for path, leaf in flat.items() if leaf.is_floating_point()}
    prepared = fnmodels.prepare(case.config, tokens)
    logits = fnmodels.forward(tree.unflatten(flat | leaves), *prepared, config=case.config, kernel="math")
    found: dict[str, list[Tensor]] = {}
    for logit in (logits[0, -1, 0], logits[0, -1, 1], logits[0, 12, 2]):
        gradients = torch.autograd.grad(logit, list(leaves.values()), allow_unused=True, retain_graph=True)
        for path, gradient in zip(leaves, gradients, strict=True):
            found.setdefault(path, []).extend([] if gradient is None else [gradient])
    return found


@pytest.mark.parametrize("case", TENSORS, ids=str)
def test_every_tensor_counts(case: Case) -> None:
    """A 2% change of any single tensor changes the logits, so no tensor has a value that hides its use.

    A gradient above ten times the bound takes the place of that pass.
    """
    tokens = tokens_of(case.config, 1, 24, seed=seed_of(case))
    theirs = logits_of(case.values, tokens)
    params = params_of(shared_model(case.values), case.config)
    assert not _fails(case, params, theirs, tokens)
    enough = 2e-4 * max(1.0, float(theirs.std()))  # ten times the bound of `_fails`
    gradients = _gradients(case, params, tokens)
    kinds, (_, _, tables) = fnmodels.family_of(case.config).kinds(case.config), fnmodels.prepare(case.config, tokens)
    for path, tensor in tree.flatten(params).items():
        layer = int(path.split(".")[1]) if path.startswith("layers.") else None
        if layer is not None and kinds[layer] in kinds[:layer]:
            continue  # the same code reads the first layer of this kind
        tables_of_layer = [] if layer is None else tree.leaves(tables[kinds[layer]])
        if path.endswith("k_bias") and any(table.shape[-2:] == (0, 2) for table in tables_of_layer):
            continue  # without rotary embedding a key bias shifts all scores of a query: no effect on softmax
        if ".attention.global." in path:
            continue  # read for the head "classification": tests/fnmodels/models/test_longformer.py
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
        chooses = path.endswith(("selection_bias", "tid2eid", "token_map")) or ".indexer." in path
        share = 1.0 if chooses else 0.02  # large enough to change a choice
        change = share * tensor.std().clamp(min=0.1) * noise
        if any(abs(float((gradient * change).sum())) > enough for gradient in gradients.get(path, ())):
            continue
        moved = tree.flatten(params) | {path: tensor + change}
        assert _fails(case, tree.unflatten(moved), theirs, tokens), path


@pytest.mark.parametrize("leaf", ["q_proj", "k_proj"])
def test_a_wrong_permutation_is_seen(leaf: str) -> None:
    for case in cases():
        if case.values is None or case.values["model_type"] not in ("llama", "qwen3"):
            continue
        tokens = tokens_of(case.config, 1, 24, seed=seed_of(case))
        params = params_of(model_of(case.values), case.config)
        for layer in params["layers"]:
            layer["attention"][leaf] = _interleaved(layer["attention"][leaf], case.config.head_dim)
        assert _fails(case, params, logits_of(case.values, tokens), tokens), case


def _off_by_one(self: Window, q: Tokens, kv: Tokens) -> Tensor:
    return q.positions - kv.positions <= self.size


WRONG_MATHS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "window": ("mistral_sliding", lambda patch: patch.setattr(Window, "__call__", _off_by_one)),
    "layout of rotary pairs": (
        "llama",
        lambda patch: patch.setattr("fnmodels.models.decoder.llama.apply_rotary", rotary.apply_rotary_interleaved),
    ),
    "the square of yarn's factor": (
        "llama_yarn",
        lambda patch: patch.setattr(rotary, "attention_factor", lambda rope: factor_of(rope) ** 2),
    ),
    "no rope layers the other way": (
        "smollm3",
        lambda patch: patch.setattr(
            "fnmodels.models.decoder.llama.freqs_cis",
            lambda config, positions, **o: dict(_swapped(tables_of(config, positions, **o))),
        ),
    ),
    "gate and up": (
        "llama",
        lambda patch: patch.setattr(
            "fnmodels.models.decoder.llama.gated_mlp",
            lambda layer, x, **o: mlp({**layer, "gate_proj": layer["up_proj"], "up_proj": layer["gate_proj"]}, x, **o),
        ),
    ),
    "keys shared by neighbors": (
        "llama",
        lambda patch: patch.setattr(
            "fnmodels.models.common.context.attention",
            lambda q, k, v, mask, **o: attention(q, k.flip(2), v.flip(2), mask, **o),
        ),
    ),
    "norm of queries after rotation": (
        "qwen3",
        lambda patch: patch.setattr(
            "fnmodels.models.decoder.llama.apply_rotary",
            lambda x, table: rms_norm(rotary.apply_rotary(x, table), None, eps=1e-2),
        ),
    ),
}
factor_of, tables_of, mlp = rotary.attention_factor, llama.freqs_cis, llama.gated_mlp


def _swapped(tables: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield from zip(tables, reversed(tables.values()), strict=True)


@pytest.mark.parametrize("name", WRONG_MATHS)
def test_wrong_maths_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variant, plant = WRONG_MATHS[name]
    case = next(case for case in cases() if case.name == variant)
    tokens = tokens_of(case.config, 1, 24, seed=seed_of(case))
    theirs, params = logits_of(case.values, tokens), params_of(shared_model(case.values), case.config)
    assert not _fails(case, params, theirs, tokens)
    plant(monkeypatch)
    assert _fails(case, params, theirs, tokens)
