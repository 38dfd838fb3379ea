"""State dicts of transformers' models in memory, both ways, in every family: its converter knows the names of files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.core_model_loading import revert_weight_conversion

import fnmodels
import params as P
from fnmodels import tree
from params.checkpoint.config import with_head
from tests.fnmodels.models import test_vision
from tests.support import wrappers
from tests.support.cases import Case, cases, collected, richest
from tests.support.image_texts import ImageCase, image_cases, image_cases_of_all_names
from tests.support.oracle import assert_close, model_of, params_of

# Published files have other tensors than transformers writes: see `as_published` of their variants.
RESHAPED = ("inkling2",)  # queries of messages have a dimension more in memory, which is refused
OTHERS = ("kimi_linear", "olmo_hybrid", "longcat_flash")
CASES = [case for case in richest(lambda case: case.family) if case.values and case.family not in OTHERS]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_out_and_in_again(case: Case) -> None:
    model: Any = model_of(case.values)
    config = fnmodels.family_for(case.values["model_type"]).Config.from_hf(case.values)
    params = P.from_tensors(config, revert_weight_conversion(model, model.state_dict()).items())
    wanted = tree.flatten(params_of(model, config))
    assert wanted.keys() == tree.flatten(params).keys()
    assert all(torch.equal(leaf, wanted[path]) for path, leaf in tree.flatten(params).items())
    if case.family not in RESHAPED:
        memory = tree.flatten(P.from_tensors(config, model.state_dict().items()))
        assert wanted.keys() == memory.keys()
        assert all(torch.equal(leaf, wanted[path]) for path, leaf in memory.items())
    state = dict(P.export(config, params))
    again = type(model).from_pretrained(None, config=model.config, state_dict=state)
    parameters = dict(again.named_parameters())
    left_out = collected("LEFT_OUT").get(config.model_type, ())
    read = {name: value for name, value in model.named_parameters() if not name.endswith(left_out)}
    assert all(torch.equal(value, parameters[name]) for name, value in read.items())


@pytest.mark.parametrize("case", [case for case in cases() if case.family in OTHERS[:2]], ids=str)
def test_convolutions_that_modules_join_are_read(case: Case) -> None:
    """By the names in memory; transformers 5.24 reverts these to equal parts."""
    model = model_of(case.values)
    wanted = tree.flatten(params_of(model, case.config))
    params = tree.flatten(P.from_tensors(case.config, model.state_dict().items()))
    assert wanted.keys() == params.keys() and all(torch.equal(leaf, wanted[path]) for path, leaf in params.items())


def test_names_of_memory_are_explained() -> None:
    case = image_cases()[0]
    state = {name.replace(".layers.", ".blocks."): leaf for name, leaf in case.reference().state_dict().items()}
    with pytest.raises(P.MismatchError, match=r"transformers\.core_model_loading\.revert_weight_conversion"):
        P.from_tensors(case.config, state.items())


@pytest.mark.parametrize("case", image_cases_of_all_names(), ids=str)
def test_wrappers_in_memory(case: ImageCase) -> None:
    """By the names of files and by those that the model has in memory, experts in one tensor included."""
    model, wanted = case.reference(), tree.flatten(case.params())
    states = [wrappers.as_published(model, dict(revert_weight_conversion(model, model.state_dict())))]
    states += [model.state_dict()]
    for state in states:
        params = tree.flatten(P.from_tensors(case.config, state.items()))
        assert params.keys() == wanted.keys()
        assert all(torch.equal(leaf, wanted[path]) for path, leaf in params.items())


# Without blip-2, whose class without a head has one in its text, llama4, of which transformers has no class without a
# head, and qwen3_vl_moe: 5.24 saves its experts in another layout than that of published files.
HEADLESS = [case for case in image_cases() if case.config.model_type not in ("blip-2", "llama4", "qwen3_vl_moe")]


@pytest.mark.parametrize("case", HEADLESS, ids=str)
def test_wrapper_without_a_head_returns_hidden_states(case: ImageCase, tmp_path: Path) -> None:
    """A folder that transformers' class without a head (Gemma3Model) wrote is read and written as one of that class."""
    model, wanted = case.reference(), tree.flatten(case.params())
    model.model.save_pretrained(tmp_path / "theirs")
    config, params = P.load_pretrained(tmp_path / "theirs")
    assert config.text.head == "none"
    leaves = tree.flatten(params)
    assert wanted.keys() - leaves.keys() <= {"text.lm_head"}
    assert all(torch.equal(leaf, wanted[path]) for path, leaf in leaves.items())
    tokens = torch.randint(1, 50, (1, 7), generator=torch.Generator().manual_seed(0))
    inputs, masks, freqs = fnmodels.prepare(config.text, tokens)
    ours = fnmodels.forward(params["text"], inputs, masks, freqs, config=config.text)
    theirs = model.model.language_model(input_ids=tokens).last_hidden_state
    assert_close(ours, theirs.detach())
    P.save_pretrained(tmp_path / "ours", config, params)
    assert json.loads((tmp_path / "ours/config.json").read_text())["architectures"] == [type(model.model).__name__]
    assert P.load_pretrained(tmp_path / "ours")[0] == config


@pytest.mark.parametrize("case", HEADLESS, ids=str)
def test_wrappers_without_a_head_in_memory(case: ImageCase) -> None:
    """The state dict of transformers' class without a head, by the names that the model has in memory."""
    model, wanted = case.reference(), tree.flatten(case.params())
    params = tree.flatten(P.from_tensors(with_head(case.config, "none"), model.model.state_dict().items()))
    assert wanted.keys() - params.keys() <= {"text.lm_head"}
    assert all(torch.equal(leaf, wanted[path]) for path, leaf in params.items())


@pytest.mark.parametrize("name", test_vision.EVERY)
def test_towers_in_memory(name: str) -> None:
    model, wanted = test_vision._reference(name), tree.flatten(test_vision._params(name))
    state = revert_weight_conversion(model, model.state_dict())
    params = tree.flatten(P.from_tensors(test_vision._config(name), state.items()))
    assert params.keys() == wanted.keys()
    assert all(torch.equal(leaf, wanted[path]) for path, leaf in params.items())
