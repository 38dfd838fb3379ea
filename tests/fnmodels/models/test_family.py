"""`LayerKind` reads the names of kinds; `Traits` are what a family declares, and a wrong one is an error."""

import types
from typing import Any

import pytest

import fnmodels
from fnmodels.models.common.family import LayerKind, Traits, parsed, traits_of
from tests.support.cases import cases

MADE = {
    "full": {},
    "sliding_nope_moe": {"slides": True, "rotates": False, "routed": True},
    "chunked_nope": {"rotates": False},
    "full_reuse_moe": {"source": "full_moe", "routed": True},
    "indexed_moe": {"indexed": True, "routed": True},
    "indexed_shared": {"indexed": True, "shares_choice": True},
    "linear_moe": {"ordered": True, "routed": True},
    "conv": {"ordered": True},
    "sliding_first": {"slides": True, "first": True},
    "full_3": {},  # a word of GPT-2's own
}
DEFAULTS = {"slides": False, "rotates": True, "routed": False, "source": None, "indexed": False}
DEFAULTS |= {"shares_choice": False, "ordered": False, "first": False}


@pytest.mark.parametrize("name", MADE)
def test_layer_kind_reads_the_words_of_a_name(name: str) -> None:
    kind = LayerKind.parse(name)
    assert {trait: getattr(kind, trait) for trait in DEFAULTS} == DEFAULTS | MADE[name]
    assert kind.name == name and kind.attends == name.partition("_")[0] and LayerKind.parse(name) is kind


def test_layer_kind_words_inside_other_words_mean_nothing() -> None:
    assert LayerKind.parse("fullmoe_nopes_smoe") == LayerKind("fullmoe_nopes_smoe", attends="fullmoe")


def test_kinds_of_every_family_are_declared() -> None:
    for case in cases():
        family = fnmodels.family_of(case.config)
        for kind in parsed(family.kinds(case.config)):
            assert kind.source is None or kind.source in family.kinds(case.config), case
            assert not kind.routed or traits_of(family).routed, case


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rooted": True}, "Traits has no trait 'rooted'; did you mean 'routed'?"),
        ({"zzz": 1}, "Traits has no trait 'zzz'; there are kinds, heads, "),
        ({"causal": 1}, "The trait causal is 1; it must be True or False."),
        ({"kinds": ["full"]}, "The trait kinds is ['full']; it must be a tuple."),
        ({"kinds": ()}, "must name at least one kind"),
        ({"router": "wide"}, "The trait router is 'wide'; it must be a RouterDtypes, or None."),
        ({"inputs": "pixels"}, "The trait inputs is 'pixels'; it must be 'tokens', 'patches' or 'latents'."),
    ],
)
def test_traits_refuse_unknown_names_and_wrong_values(values: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError) as caught:
        Traits(**values)
    assert words in str(caught.value)


def test_traits_of_a_family_come_from_its_file() -> None:
    mine: Any = types.ModuleType("mine")
    assert traits_of(mine) == Traits()
    mine.CAUSAL, mine.KINDS = False, ("full", "sliding")
    assert traits_of(mine) == Traits(causal=False, kinds=("full", "sliding"))
    mine.TRAITS = Traits(sinks=True)
    assert traits_of(mine) is mine.TRAITS
    mine.TRAITS = {"sinks": True}
    with pytest.raises(TypeError, match=r"^mine\.TRAITS is \{'sinks': True\}; it must be a Traits\(\.\.\.\)\.$"):
        traits_of(mine)
