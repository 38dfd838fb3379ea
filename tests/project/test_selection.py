"""`pytest tests -k MODEL_TYPE` selects every test of a type; selections of variants leave no kind of part out."""

import os
from pathlib import Path
from typing import Any

import pytest

import fnmodels
from tests.support.cases import (
    OPERATIONS,
    PARTS,
    attention_of,
    block_of,
    cases,
    causal,
    chosen_operations,
    chosen_parts,
    layer_structures,
    operations_of,
    parts,
    parts_of,
    representatives,
)
from tests.support.naming import fewest
from tests.support.selection import model_types_of


def test_types_are_found_in_parameters() -> None:
    case = next(case for case in cases() if case.name == "gemma2_uncapped")
    assert model_types_of({"case": case, "kernel": "math"}) == {"gemma2"}
    assert model_types_of({"config": case.config}) == {"gemma2"}
    assert model_types_of({"name": "qwen3-30b-a3b"}) == {"qwen3_moe"}
    assert model_types_of({"family": "qwen_moe"}) == {"olmoe", "qwen2_moe", "qwen3_moe"}
    assert model_types_of({"number": 3, "words": "nothing of a model"}) == set()


def test_few_variants_have_the_parts_of_all() -> None:
    """Each function, kind of layer, name of a parameter and form of attention, after they are cut short."""
    if os.environ.get("FNMODELS_UPDATE_DOCS"):
        PARTS.write_text("\n".join(chosen_parts()) + "\n")
        parts.cache_clear()
    assert tuple(PARTS.read_text().split()) == chosen_parts(), (
        "FNMODELS_UPDATE_DOCS=1 pytest tests/project/test_selection.py writes tests/support/parts.txt"
    )
    every, few = (set[str]().union(*map(parts_of, group)) for group in (cases(), parts()))
    assert few == every and len(parts()) < len(cases()) / 2  # each family has functions of its own
    assert set(map(block_of, parts())) == set(map(block_of, cases()))
    assert {attention_of(case) for case in representatives()} == {attention_of(case) for case in cases()}
    assert parts()[0].name == representatives()[0].name == "llama"  # in which bugs are planted


def test_fewer_variants_have_the_operations_of_all() -> None:
    if os.environ.get("FNMODELS_UPDATE_DOCS"):
        OPERATIONS.write_text("\n".join(chosen_operations()) + "\n")
        layer_structures.cache_clear()
    assert tuple(OPERATIONS.read_text().split()) == chosen_operations(), (
        "FNMODELS_UPDATE_DOCS=1 pytest tests/project/test_selection.py writes tests/support/operations.txt"
    )
    every, few = (set[str]().union(*map(operations_of, group)) for group in (cases(), layer_structures()))
    assert few == every and len(layer_structures()) < len(parts())
    assert {attention_of(case) for case in layer_structures()} == {attention_of(case) for case in cases()}
    assert {causal(case) for case in layer_structures()} == {True, False}
    assert layer_structures()[0].name == "llama"  # in which bugs are planted


def test_operations_of_few_variants_are_among_the_parts() -> None:
    """Whose parameters, kinds of layers and forms of attention other variants have as well."""
    assert set[str]().union(*map(parts_of, parts())) >= {
        "ops/attention/alibi.py with_alibi",
        "ops/moe/router.py sparse_mixer",
        "ops/moe/router.py capped_sigmoid_top_k",
        "models/common/layers/post_norm.py post_norm_layer",
        "models/common/decoder/older.py post_norm_layer",
    }


def test_a_function_that_one_variant_enters_chooses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {case.name for case in parts()}
    odd = next(case for case in cases() if case.name not in chosen)
    own: dict[str, Any] = {}
    path = Path(fnmodels.__file__).parent / "ops" / "rare.py"
    exec(compile("def rare(x):\n    return 2 * x\n", str(path), "exec"), own)
    family: Any = fnmodels.family_of(odd.config)
    unembed, before = family.unembed, {case: parts_of(case) for case in cases()}  # kept from now on
    monkeypatch.setattr(family, "unembed", lambda *args, **options: own["rare"](unembed(*args, **options)))
    found = before | {odd: parts_of.__wrapped__(odd)}
    assert found[odd] - before[odd] >= {"ops/rare.py rare"}
    assert odd in fewest(found)
