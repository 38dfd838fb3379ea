"""fp32 logits equal transformers', for every variant of every family and every form of batch."""

import contextlib
import functools
import io
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import fnmodels
from fnmodels import tree
from fnmodels.errors import UserError
from params.compare import compare
from tests.support.cases import (
    Case,
    assert_routed,
    cases,
    causal,
    is_routed,
    positions_of,
    richest,
    seed_of,
    segments,
    structures,
    tokens_of,
    variants_of,
)
from tests.support.oracle import assert_close, logits_of, model_of, params_of, save, shared_model

LENGTH = 24
MARGIN = 1e-3  # of router logits; a thousand times the fp32 difference of two implementations
WITH_REFERENCE = [case for case in cases() if case.values is not None]

FORMS = {
    "plain": segments((24,), (24,)),
    "left": segments((24,), (-5, 19), (-23, 1)),  # 5: no chunk's length, which would hide counting by index
    "right": segments((24,), (17, -7), (1, -23)),
    "packed": segments((3, 1, 20), (19, 5)),
    "packed_one": segments((1, 1, 2, 20)),
}


def _ours(case: Case, params: Any, tokens: torch.Tensor, **given: Any) -> torch.Tensor:
    kernel = given.pop("kernel", "math")
    inputs, masks, freqs_cis = fnmodels.prepare(case.config, tokens, **given)
    layout = fnmodels.layout(masks) if kernel == "auto" else None  # as in the train step
    return fnmodels.forward(params, inputs, masks, freqs_cis, config=case.config, kernel=kernel, layout=layout)


def _document_by_document(case: Case, tokens: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
    """The reference's logits, each document alone and without padding, for which they are 0."""
    out = torch.zeros(*tokens.shape, case.config.vocab_size)
    for row, ids, logits in zip(tokens, segment_ids, out, strict=True):
        for i in ids[ids > 0].unique():
            logits[ids == i] = logits_of(case.values, row[ids == i][None])[0]
    return out


@functools.cache
def _reference(case: Case) -> Any:
    """The reference's parameters as our tree, read-only."""
    return params_of(shared_model(case.values), case.config)


@functools.cache
def _theirs(case: Case, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, the reference's logits) of a form of batch, for every kernel."""
    segment_ids = FORMS[form]
    tokens, valid = tokens_of(case.config, *segment_ids.shape, seed=seed_of(case)), segment_ids > 0
    if _is_separate(case, form):
        return tokens, _document_by_document(case, tokens, segment_ids)
    return tokens, logits_of(case.values, tokens, positions_of(segment_ids), None if valid.all() else valid)


def _is_separate(case: Case, form: str) -> bool:
    """Whether transformers reads such a batch wrongly: see SEPARATE; and where tokens see later ones, all documents."""
    wrong = getattr(variants_of(case.family), "SEPARATE", {})
    kind = form.partition("_")[0]
    return kind in wrong or f"{case.name} {kind}" in wrong or (form.startswith("packed") and not causal(case))


def _grid() -> list[tuple[Case, str, str]]:
    """Every form on `structures()`, "left" and "packed" on others, with "math".

    "auto" on every form of each family's richest, on one, by its name, of the others.
    """
    grid = []
    for case in WITH_REFERENCE:
        forms = list(FORMS) if case in structures() or case in richest() else ["left", "packed"]
        grid += [(case, "math", form) for form in forms]
        forms = forms if case in richest() else [forms[zlib.crc32(case.name.encode()) % len(forms)]]
        grid += [(case, "auto", form) for form in forms]
    return grid


@pytest.mark.parametrize(("case", "kernel", "form"), _grid(), ids=str)
def test_logits(case: Case, kernel: str, form: str) -> None:
    segment_ids = FORMS[form]
    positions, valid = positions_of(segment_ids), segment_ids > 0
    params, (tokens, theirs) = _reference(case), _theirs(case, form)
    if is_routed(case.config) and kernel == "math":
        prepared = fnmodels.prepare(case.config, tokens, positions=positions, segment_ids=segment_ids)
        ours = assert_routed(case, params, prepared, MARGIN)
    else:
        ours = _ours(case, params, tokens, positions=positions, segment_ids=segment_ids, kernel=kernel)
    try:
        assert_close(ours[valid], theirs[valid])
    except AssertionError as error:
        raise AssertionError(f"{error}\n{first_difference(case)}") from None
    # One document per row: prepare numbers its positions, whatever the kernel.
    numbered = kernel == "math" and form in ("plain", "left", "right")
    if numbered and "dynamic" not in case.name and "longrope" not in case.name:
        same = fnmodels.prepare(case.config, tokens, segment_ids=segment_ids)
        given = fnmodels.prepare(case.config, tokens, positions=positions, segment_ids=segment_ids)
        for one, other in zip(tree.leaves(same), tree.leaves(given), strict=True):
            real = valid if one.shape[:2] == valid.shape else ...
            assert torch.equal(one[real], other[real])


def first_difference(case: Case) -> str:
    """The output of `python -m params.compare`: the first leaf, or first part of a layer, that differs."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
        save(model_of(case.values), Path(folder))
        try:
            equal = compare(Path(folder))
        except (UserError, fnmodels.errors.CheckpointError, ValueError) as error:
            return f"params.compare cannot tell where: {error}"
    said = printed.getvalue().strip()
    hint = "Its plain batch is equal: what differs is in masks or positions." if equal else ""
    return f"python -m params.compare, of the variant saved by save_pretrained, says:\n{said}\n{hint}"


@pytest.mark.parametrize(
    ("name", "ours", "said"), [("llama", "gated_mlp", r"layers\.0.*mlp"), ("granite", "rms_norm", "layers.0")]
)
def test_the_first_difference_is_named(name: str, ours: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in cases() if case.name == name)
    family = fnmodels.family_of(case.config)
    plain = getattr(family, ours)
    monkeypatch.setattr(family, ours, lambda *args, **options: 1.1 * plain(*args, **options))
    with pytest.raises(AssertionError, match=f"(?s)^off by .*params.compare.*first.*{said}"):
        test_logits(case, "math", "plain")


def test_rows_long_enough_for_tiles() -> None:
    """From 256 tokens on, fp32 training uses another kernel.

    It is compared with kernel="math" in fp64 at the usual bound: at these positions the fp32 angles of transformers are
    off by 2.3e-5 themselves.
    """
    case = next(case for case in cases() if case.name == "llama")
    tokens, params = tokens_of(case.config, 2, 300), params_of(model_of(case.values), case.config)
    exact = _ours(case, tree.map(torch.Tensor.double, params), tokens)
    assert_close(_ours(case, params, tokens, kernel="auto").double(), exact)
