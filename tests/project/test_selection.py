"""`pytest tests -k MODEL_TYPE` selects every test of a type."""

from tests.support.cases import cases
from tests.support.selection import model_types_of


def test_types_are_found_in_parameters() -> None:
    case = next(case for case in cases() if case.name == "gemma2_uncapped")
    assert model_types_of({"case": case, "kernel": "math"}) == {"gemma2"}
    assert model_types_of({"config": case.config}) == {"gemma2"}
    assert model_types_of({"name": "qwen3-30b-a3b"}) == {"qwen3_moe"}
    assert model_types_of({"family": "qwen_moe"}) == {"olmoe", "qwen2_moe", "qwen3_moe"}
    assert model_types_of({"number": 3, "words": "nothing of a model"}) == set()
