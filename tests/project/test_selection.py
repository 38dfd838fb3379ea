"""`pytest tests -k MODEL_TYPE` selects every test of a type; selections of variants leave no kind of part out."""

from tests.support.cases import attention_of, cases, parts, parts_of, representatives
from tests.support.selection import model_types_of


def test_types_are_found_in_parameters() -> None:
    case = next(case for case in cases() if case.name == "gemma2_uncapped")
    assert model_types_of({"case": case, "kernel": "math"}) == {"gemma2"}
    assert model_types_of({"config": case.config}) == {"gemma2"}
    assert model_types_of({"name": "qwen3-30b-a3b"}) == {"qwen3_moe"}
    assert model_types_of({"family": "qwen_moe"}) == {"olmoe", "qwen2_moe", "qwen3_moe"}
    assert model_types_of({"number": 3, "words": "nothing of a model"}) == set()


def test_few_variants_have_the_parts_of_all() -> None:
    """Each kind of layer, name of a parameter and form of attention, after they are cut short."""
    every, few = (set[str]().union(*map(parts_of, group)) for group in (cases(), parts()))
    assert few == every and len(parts()) < len(cases()) / 3
    assert {attention_of(case) for case in representatives()} == {attention_of(case) for case in cases()}
    assert parts()[0].name == representatives()[0].name == "llama"  # in which bugs are planted
