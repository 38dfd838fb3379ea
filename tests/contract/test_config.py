"""Every Config field that takes part in equality changes the maths, and the others do not."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fnmodels
from fnmodels import tree
from fnmodels.models.common.rope_config import _ROPE_KEYS
from fnmodels.ops.mlp import ACTIVATIONS
from fnmodels.ops.rotary import Rope
from tests.support.cases import Case, batch_of, cases, family_modules, generic_params, richest, segments, variants_of

every_case = pytest.mark.parametrize("case", cases(), ids=str)
BY_TYPE = richest(lambda case: case.config.model_type)
# Fields without effect on the forward pass: the init and the trained length.
DESCRIPTIVE = {"initializer_range", "max_position_embeddings"}
DESCRIPTIVE |= {"dropout"}  # which acts where a batch has keys of noise, see test_dropout
DESCRIPTIVE |= {
    "head",
    "num_labels",
    "problem_type",
    "pooler",
    "classifier_pooling",
}  # other results than logits of tokens: tests/parity/test_heads.py
DESCRIPTIVE |= {"mtp_layer_kinds"}  # of MTP heads, which the logits do not read: tests/parity/test_mtp.py
DESCRIPTIVE |= {"exit"}  # what the head reads: tests/fnmodels/models/test_ouro.py
DESCRIPTIVE |= {"low_gradients"}  # of gradients alone: tests/fnmodels/models/test_hrm_text.py
NARROW = {
    "residual_in_fp32",
    "mrope_section",
    "mrope_interleaved",
}  # of effect in bf16 only, with positions of three axes only
# Fields that determine the shapes of parameters; in some families they change only together.
SIZES = {
    "loop_end",
    "layers_per_stack",
    "hybrid_layers",
    "layers",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
}

# Families whose kinds are two halves in turn, or follow from loops, shared blocks, sizes of each layer or from
# where a layer stands.
FOLLOWING = ("longcat_flash", "hrm_text", "ouro", "zamba2", "nemotron_nas", "rwkv7")


def _others(value: Any) -> list[Any]:
    """Values near this one, of its type, some of which should be valid."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [other for other in (value + 1, value - 1, value * 2, value // 2) if other > 0]
    if isinstance(value, float):
        return [value * 1.5 + 0.01, value * 0.5, value * 0.1]
    if value in ACTIVATIONS:
        return ["relu", "silu"]
    if isinstance(value, tuple) and value and isinstance(value[0], float):
        return [tuple(1.3 * v for v in value)]
    if isinstance(value, tuple) and len(set(value)) > 1:
        return [(*value[1:], value[0]), tuple(reversed(value))]
    return []


def _read(rope: Rope, field: str) -> bool:
    """Whether this kind of rope scaling reads the field; yarn's factors replace each other."""
    if field == "theta":
        return True
    if field == "partial":
        return rope.kind != "longrope"  # which lists a factor for each rotating pair
    if rope.attention_factor is not None and (
        field.startswith("mscale") or (rope.kind, field) == ("longrope", "factor")
    ):
        return False
    if rope.kind == "longrope" and field in ("short_factor", "long_factor"):
        return (field == "long_factor") == (rope.original_max_position_embeddings < 24)  # the length of the batch below
    if field.startswith("mscale"):
        return bool(rope.mscale and rope.mscale_all_dim)
    if field == "original_max_position_embeddings":
        return rope.kind in ("dynamic", "llama3", "yarn", "longrope")
    return field in _ROPE_KEYS.get(rope.kind, ())


def changed(config: Any) -> Iterator[tuple[str, Any]]:
    """(field, config that differs in it alone) of all fields that can change without changing any parameter's shape."""
    half_the_head = 2 * (config.head_dim // 4) / config.head_dim + 1e-9  # an even number of dimensions
    for field in dataclasses.fields(config):
        if not field.compare or field.name in DESCRIPTIVE | NARROW:
            continue
        value, name = getattr(config, field.name), field.name
        if dataclasses.is_dataclass(value):
            inner = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
            options = [
                (f"{name}.{n}", changed_part)
                for n, v in inner
                if not isinstance(value, Rope) or _read(value, n)
                for other in ([half_the_head, 1.0] if n == "partial" else _others(v))
                if (changed_part := _replaced(value, n, other)) is not None
            ]
        else:
            options = [(name, other) for other in _others(value)]
        for label, other in options:
            try:
                yield label, dataclasses.replace(config, **{name: other})
            except ValueError:
                continue


def _replaced(part: Any, field: str, other: Any) -> Any:
    """The dataclass with another value of one field, or None where it refuses it."""
    try:
        return dataclasses.replace(part, **{field: other})
    except ValueError:
        return None


def shapes(config: Any) -> dict[str, Any]:
    return {path: leaf.shape for path, leaf in tree.flatten(fnmodels.family_of(config).spec(config)).items()}


@every_case
def test_every_field_changes_the_logits(case: Case) -> None:
    """With the same parameters: a field without effect is unused in the forward, or these variants do not reach it."""
    weights = generic_params(case.config)
    blind = getattr(variants_of(case.family), "BLIND", {}).get(case.name, ())
    segment_ids = segments((24,), (13, 11))
    wanted = batch_of(case.config, segment_ids).forward(weights)
    moved: dict[str, float] = {}
    own = shapes(case.config)
    for field, other in changed(case.config):
        if moved.get(field, 0.0) > 1e-4 or shapes(other) != own:
            continue  # one value of a field is enough
        logits = batch_of(other, segment_ids).forward(weights) if other.vocab_size == case.config.vocab_size else wanted
        moved[field] = max(moved.get(field, 0.0), float((logits - wanted).abs().max()))
    assert moved, "nothing could be changed"
    still = {field for field, size in moved.items() if size <= 1e-4} - set(blind)
    assert not still, (
        f"{sorted(still)} change no logit: read them in the block, or say in BLIND of tests/variants/{case.family}.py, "
        "{variant: {fields}}, that this variant has no use for them."
    )


@pytest.mark.parametrize("family", family_modules())
def test_every_field_is_changed_in_some_variant(family: str) -> None:
    """Otherwise the test above would not cover it."""
    mine = [case for case in cases() if case.family == family]
    blind = getattr(variants_of(family), "BLIND", {})
    seen = {f.partition(".")[0] for case in mine for f, _ in changed(case.config) if f not in blind.get(case.name, ())}
    fields = {field.name for case in mine for field in dataclasses.fields(case.config) if field.compare}
    fields -= {"intermediate_size"} if family == "nemotron_nas" else set()  # follows from its layers
    fields -= {"residual_streams"} if family == "hrm_text" else set()  # of which there are two
    fields -= {"ngram_rows"} if family == "deepseek_v41" else set()  # whose next prime says the shapes of tables
    alike = all(len(set(fnmodels.family_of(case.config).kinds(case.config))) == 1 for case in mine)
    alike = alike or family in FOLLOWING
    assert fields - seen <= DESCRIPTIVE | NARROW | SIZES | ({"layer_kinds"} if alike else set())


@pytest.mark.parametrize("case", [case for case in cases() if hasattr(case.config, "residual_in_fp32")], ids=str)
def test_a_residual_stream_in_fp32(case: Case) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for switch in (True, False):
            config = dataclasses.replace(case.config, residual_in_fp32=switch)
            logits, tapped = batch_of(config, segments((9,))).forward(generic_params(config, dtype), taps=("hidden",))
            wide = torch.promote_types(dtype, torch.float32) if switch else dtype
            assert tapped["hidden"].dtype == wide and logits.dtype == dtype


@pytest.mark.parametrize("case", richest(lambda case: str(type(case.config))), ids=str)
def test_what_is_kept_for_saving_is_no_part_of_the_identity(case: Case) -> None:
    # what follows from the other fields, such as hashes of n-grams, is not kept
    kept = [field.name for field in dataclasses.fields(case.config) if field.init and not field.compare]
    other = dataclasses.replace(case.config)
    for name in kept:
        object.__setattr__(other, name, "something else")
    assert other == case.config and hash(other) == hash(case.config)
    batch, weights = batch_of(case.config, segments((6,))), generic_params(case.config)
    assert torch.equal(dataclasses.replace(batch, config=other).forward(weights), batch.forward(weights))
    with pytest.raises(dataclasses.FrozenInstanceError):
        case.config.vocab_size = 3


@pytest.mark.parametrize("case", [case for case in BY_TYPE if case.values is not None], ids=str)
def test_an_unknown_field_is_an_error(case: Case) -> None:
    """L9: what might change the maths is never ignored."""
    read = fnmodels.family_of(case.config).Config.from_hf
    with pytest.raises(fnmodels.errors.ConfigError, match="logit_wobble"):
        read({**case.values, "logit_wobble": 0.5})
    assert read({**case.values, "logit_wobble": None}) == case.config
    with pytest.raises(fnmodels.errors.UnsupportedError, match="of_my_own"):
        read({**case.values, "model_type": "of_my_own"})
