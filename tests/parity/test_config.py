"""A config.json gives the same Config in every dialect, with default keys removed, and after `to_hf`."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import fnmodels
from fnmodels.models.common.family import field_of
from fnmodels.models.common.registry import family_reading
from fnmodels.models.presets import published
from tests.support.cases import Case, cases, family_modules, tokens_of, variants_of
from tests.support.oracle import assert_close, logits_of, model_of, params_of, reference_values

WITH_REFERENCE = [case for case in cases() if case.values is not None]
every_case = pytest.mark.parametrize("case", WITH_REFERENCE, ids=str)


def _config(values: dict[str, Any]) -> Any:
    return fnmodels.family_for(values["model_type"]).Config.from_hf(values)


def published_dialect(values: dict[str, Any]) -> dict[str, Any]:
    """The 4.x form of a 5.x config.json: `rope_theta` and `rope_scaling` at the top, rules instead of lists."""
    old = copy.deepcopy(values)
    rope = old.pop("rope_parameters", None)
    if rope is None:  # learned positions
        return old
    variants = variants_of(fnmodels.family_for(values["model_type"]).__name__.rpartition(".")[2])
    if any(isinstance(value, dict) for value in rope.values()):  # a table for each layer type
        if not hasattr(variants, "OLDER_ROPES"):  # never published otherwise
            return old | {"rope_parameters": rope}
        scaled, older = variants.OLDER_ROPES
        old |= {key: rope[layer_type]["rope_theta"] for layer_type, key in older.items()}
        rope = dict(rope[scaled])
    old["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    old["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    renamed = getattr(variants, "OLDER_NAMES", {})
    return {renamed.get(name, name): value for name, value in old.items()}


@every_case
def test_both_dialects_give_one_config(case: Case) -> None:
    new = AutoConfig.for_model(
        **reference_values(case.values)
    ).to_dict()  # every key, as save_pretrained writes it today
    assert _config(new) == case.config
    assert _config(published_dialect(case.values)) == case.config
    named = published_dialect(case.values)
    if named.get("rope_scaling"):  # still older: `type` instead of `rope_type`
        named["rope_scaling"]["type"] = named["rope_scaling"].pop("rope_type")
    assert _config(named) == case.config


@every_case
def test_what_we_write_means_the_same_to_transformers(case: Case) -> None:
    written = case.config.to_hf()
    assert _config(written) == case.config
    theirs = [AutoConfig.for_model(**reference_values(values)).to_dict() for values in (written, case.values)]
    if theirs[0] == theirs[1]:
        return
    tokens = tokens_of(case.config, 1, 24)
    assert torch.equal(logits_of(written, tokens), logits_of(case.values, tokens))


# Of which transformers keeps what follows from them beside its default of the key, a contradiction.
FOLLOWED = {"modernbert-decoder": {"local_attention"}}


@every_case
def test_a_key_left_out_has_the_reference_default(case: Case) -> None:
    """Keys with the value that they have in the first variant of the model type are left out of that one only."""
    first = next(one for one in WITH_REFERENCE if one.config.model_type == case.config.model_type)
    full = AutoConfig.for_model(**reference_values(case.values)).to_dict()
    for key in full.keys() - {"model_type"} - FOLLOWED.get(case.config.model_type, set()):
        if case is not first and case.values.get(key) == first.values.get(key):
            continue
        values = {name: value for name, value in full.items() if name != key}
        try:
            ours = _config(values)
        except fnmodels.errors.CheckpointError:
            continue  # required, which is as good as the right default
        assert ours == _config(AutoConfig.for_model(**reference_values(values)).to_dict()), key


@pytest.mark.parametrize("case", [case for case in WITH_REFERENCE if "rope_parameters" in case.values], ids=str)
def test_a_partial_rotation_is_refused_or_means_the_same(case: Case) -> None:
    values = copy.deepcopy(case.values)
    rope = values["rope_parameters"]
    nested = [inner for inner in rope.values() if isinstance(inner, dict)]
    for inner in nested or [rope]:
        inner["partial_rotary_factor"] = 0.5
    try:
        config = _config(values)
    except fnmodels.errors.CheckpointError:
        return
    tokens = tokens_of(config, 1, 24)
    params = params_of(model_of(values), config)
    ours = fnmodels.forward(params, *fnmodels.prepare(config, tokens), config=config, kernel="math")
    assert_close(ours, logits_of(values, tokens))


@pytest.mark.parametrize("family", family_modules())
def test_published_configs_are_read_alike(family: str) -> None:
    for values in variants_of(family).published().values():
        if values["model_type"] in UNKNOWN_TYPES:
            continue
        assert _config(values) == _config(AutoConfig.for_model(**reference_values(values)).to_dict())


# diffusers' config.json names a class instead of a model type; tests/fnmodels/models/test_presets.py counts it
# transformers does not have their model types.
UNKNOWN_TYPES = ("bailing_moe", "llada", "Dream", "sdar", "nemotron-nas", "rwkv7", "kimi_k3", "ouro", "deepseek_v41")
UNKNOWN_TYPES += ("minimax_m1",)
UNKNOWN = (
    "longcat-flash-lite",
    "ling-mini-2.0",
    "ling-flash-2.0",
    "llada-8b",
    "dream-7b",
    "sdar-8b",
    "llama-3.3-nemotron-super-49b-v1",
    "kimi-k3",
    "deepseek-v4.1-flash",
    "ouro-1.4b",
    "ouro-2.6b",
    *(f"rwkv7-world-{size}b" for size in ("0.1", "0.4", "1.5", "2.9")),
)


PUBLISHED = {name: values for name, values in published().items() if "model_type" in values and name not in UNKNOWN}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_presets_are_read_alike(name: str) -> None:
    values = PUBLISHED[name]  # `preset` reads them so, and looks for them in all families each time
    known = AutoConfig.for_model(**reference_values(values)).to_dict()
    part = None if "vision_config" in values else "text"  # transformers adds a tower to a text of a type that has one
    ours, theirs = (family_reading(each, part).Config.from_hf(each) for each in (values, known))
    if field_of(ours, "head_by_file"):  # transformers says that a head is tied whatever the file has
        theirs = dataclasses.replace(theirs, tie_word_embeddings=ours.tie_word_embeddings)
    assert ours == theirs
