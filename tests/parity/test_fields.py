"""Each field of a config.json has the same effect as in transformers, or is refused.

A field that is read but not used, or ignored although it changes the maths, gives other logits than the reference.
"""

import contextlib
import copy
import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

import fnmodels
from fnmodels import hy_v4, tree
from fnmodels.models.common import context
from tests.support.cases import Case, cases, collected, richest, tokens_of
from tests.support.oracle import assert_close, model_of, params_of

BY_TYPE = richest(lambda case: case.config.model_type)
WITH_REFERENCE = [case for case in BY_TYPE if case.values is not None and case.config.model_type in CONFIG_MAPPING]
# Gated norms divide by the size of a head's output, which magnifies the reference's own noise (2e-5 in fp32). MiMo's
# values are scaled: 1.3e-5 on a CPU with AVX-512, over 2e-5 on another.
BOUNDS = {"qwen3_next": 4e-5, "jamba": 4e-5, "mimo_v2_flash": 4e-5}
# Names of other things, or sizes of a vocabulary that token ids must fit.
NAMES = {"model_type", "pad_token_id", "bos_token_id", "eos_token_id"}


def others(value: Any) -> list[Any]:
    """Values near this one, some of which should be valid; None could be a size, a cap or a switch."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2, max(1, value // 2)]
    if isinstance(value, float):
        return [value * 1.5 + 0.01]
    if isinstance(value, str):
        return ["relu"]
    if isinstance(value, list) and len(value) > 1:
        return [[*value[1:], value[0]]]
    return [5, 1.5, True] if value is None else []


def changed(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(field, config.json that differs in it alone), over all fields that transformers declares for this model type."""
    config = AutoConfig.for_model(**values)
    full = config.to_dict()
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)} - {"tie_word_embeddings"}
    for key in sorted({field.name for field in dataclasses.fields(config)} - common - NAMES):
        if key == "rope_parameters":
            yield from _changed_ropes(values, full[key])
        else:
            yield from ((key, {**values, key: other}) for other in others(full.get(key)))


def _changed_ropes(values: dict[str, Any], ropes: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    nested = {name: rope for name, rope in ropes.items() if isinstance(rope, dict)}
    for name, rope in (nested or {"": ropes}).items():
        for key in rope.keys() - {"rope_type", "type"}:
            for other in others(rope[key]):
                new = copy.deepcopy(ropes)
                (new[name] if nested else new)[key] = other
                yield f"rope_parameters.{name}.{key}", {**values, "rope_parameters": new}


def _reference(values: dict[str, Any], tokens: torch.Tensor) -> tuple[torch.nn.Module, torch.Tensor] | None:
    """transformers' model and its logits; None if it refuses the config."""
    try:
        model = model_of(values)
        with torch.no_grad():
            logits = model(input_ids=tokens, use_cache=False).logits
    except Exception:  # transformers raises many types
        return None
    return (model, logits) if torch.isfinite(logits).all() else None


def _compared(case: Case, values: dict[str, Any], tokens: torch.Tensor) -> bool:
    """Whether both read the config.json. AssertionError: to other logits."""
    config = fnmodels.family_of(case.config).Config.from_hf(values)
    reference = _reference(values, tokens)
    if reference is None:
        return False
    model, logits = reference
    if getattr(config, "num_nextn_predict_layers", 0):  # MTP heads, which transformers' model does not have
        config = dataclasses.replace(config, num_nextn_predict_layers=0)
    params = params_of(model, config)
    ours = fnmodels.forward(params, *fnmodels.prepare(config, tokens), config=config, kernel="math")
    assert_close(ours, logits, bound=BOUNDS.get(case.family, 2e-5))
    return True


def _together(case: Case, changes: list[tuple[str, dict[str, Any]]]) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """The changes that hide no other: those that our Config does not show, other factors, and other sizes, with
    parameters that are there or not, an activation and a limit of positions beside them."""
    family, groups = fnmodels.family_of(case.config), defaultdict[tuple[str, int], dict[str, dict[str, Any]]](dict)
    sizes, seen = _sizes(case.config), set[str]()
    for key, values in changes:
        with contextlib.suppress(fnmodels.errors.CheckpointError):
            config = family.Config.from_hf(values) if key not in seen else None
            if config is None:
                continue
            seen.add(key)
            value = values.get(key, 1.0)  # of a rope, whose numbers are factors
            hides_nothing = value == "relu" or key == "max_position_embeddings"
            if config == case.config:
                kind = "not shown"
            elif isinstance(value, float):
                kind = "factors"
            elif hides_nothing or (isinstance(value, int) and _sizes(config) != sizes):
                kind = "sizes"
            else:
                continue
            new = _new_value(key, values)
            # Two fields of one value may be exchanged unseen.
            number = next(n for n in count() if new not in [_new_value(*one) for one in groups[kind, n].items()])
            groups[kind, number][key] = values
    yield from (list(group.items()) for group in groups.values() if len(group) > 1)


def _new_value(key: str, values: dict[str, Any]) -> Any:
    """The changed field's value; `key` as `changed` writes it."""
    if not key.startswith("rope_parameters."):
        return values.get(key)
    _, name, field = key.split(".")
    ropes = values["rope_parameters"]
    return (ropes[name] if name else ropes)[field]


def _sizes(config: Any) -> dict[str, Any]:
    return {path: leaf.shape for path, leaf in tree.flatten(fnmodels.family_of(config).spec(config)).items()}


def _merged(values: dict[str, Any], changes: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The config.json with all of these changes."""
    merged = dict(values)
    ropes = [(key, other["rope_parameters"]) for key, other in changes if key.startswith("rope_parameters.")]
    if ropes:
        merged["rope_parameters"] = copy.deepcopy(ropes[0][1])
    for key, other in ropes:
        _, name, field = key.split(".")
        (merged["rope_parameters"][name] if name else merged["rope_parameters"])[field] = (
            other[name] if name else other
        )[field]
    return merged | {key: other[key] for key, other in changes if key in other}


@pytest.mark.parametrize("case", WITH_REFERENCE, ids=str)
def test_a_changed_field_is_followed_or_refused(case: Case) -> None:
    """Fields that hide no other are changed together first; where that fails, each by itself, to name it."""
    tokens, changes = tokens_of(case.config, 1, 24), list(changed(case.values))
    followed, refused, always = set(), set(), collected("REFUSED").get(case.config.model_type, set())
    for group in _together(case, changes):
        with contextlib.suppress(Exception):  # of either library, or a difference: found again below
            if _compared(case, _merged(case.values, group), tokens):
                followed |= {key for key, _ in group}
    for key, values in changes:
        if key in followed:
            continue
        try:
            if _compared(case, values, tokens):
                followed.add(key)
        except fnmodels.errors.CheckpointError:
            if key not in refused | always and _reference(values, tokens) is not None:
                refused.add(key)
        except AssertionError as error:
            raise AssertionError(f"{key}: {error}") from None
    assert len(followed) >= 8, followed
    wrongly = refused - followed
    assert not wrongly, (
        f"{sorted(wrongly)} are refused whatever they say, though transformers computes something: read them in "
        f"from_hf, or add them to REFUSED in tests/variants/{case.family}.py, {{model type: {{fields}}}}."
    )


@pytest.mark.parametrize(
    ("name", "field", "ours", "fixed"),
    [
        ("llama", "rms_norm_eps", "rms_norm", {"eps": 1e-2}),
        ("granite", "hidden_act", "gated_mlp", {"activation": "silu"}),
        ("gemma2", "query_pre_attn_scalar", "attention", {"scale": 20**-0.5}),
    ],
)
def test_a_field_that_is_read_and_not_used_is_seen(
    name: str, field: str, ours: str, fixed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in cases() if case.name == name)
    owner = context if ours == "attention" else fnmodels.family_of(case.config)
    plain = getattr(owner, ours)
    monkeypatch.setattr(owner, ours, lambda *args, **options: plain(*args, **{**options, **fixed}))
    with pytest.raises(AssertionError, match=f"^{field}: off by"):
        test_a_changed_field_is_followed_or_refused(case)


def test_fields_that_are_exchanged_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that are equal at first."""
    case = next(case for case in cases() if case.name == "hy_v4")
    right = hy_v4.Config.hyper.fget

    def exchanged(config: Any) -> Any:
        return right(dataclasses.replace(config, hyper_eps=config.rms_norm_eps, rms_norm_eps=config.hyper_eps))

    monkeypatch.setattr(hy_v4.Config, "hyper", property(exchanged))
    with pytest.raises(AssertionError, match=r"^(hc_eps|rms_norm_eps): off by"):
        test_a_changed_field_is_followed_or_refused(case)
