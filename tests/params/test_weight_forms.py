"""Weights in forms for decoding are the same model, exactly or up to the rounding that their bits say."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.ops import torch_internals
from fnmodels.ops.invariant.rows import invariant_rows
from fnmodels.ops.linear import linears
from params.lora import is_linear, map_leaves
from params.weight_forms import GROUP, Int4, Int8, Joined, LinearOnly, PackedWeight
from tests.support.cases import Case, batch_of, generic_params, off, richest, segments
from tests.support.encoder_losses import SETTINGS, weights_of

WIDE = fnmodels.llama.Config(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
FORMS = {"int8": Int8, "int4": Int4}


def logits(params: Any, config: Any, **options: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = batch_of(config, segments((7, 5), (12,))).forward(params, **options)
    return found


def dequantized(form: Any) -> Tensor:
    """The weight of a form, by its definition."""
    if isinstance(form, Int8):
        return form.codes.float() * form.scales.float()[:, None]
    width = form.scales.shape[0] * GROUP
    with torch.no_grad():  # the codes are in torch's layout
        return form.product(torch.eye(width, dtype=torch.bfloat16), None).float().T


def alone(*_: Any) -> Tensor:
    raise AssertionError("A family multiplies by joined weights one by one: take fnmodels.ops.linear.linears.")


@pytest.mark.parametrize("case", richest(), ids=str)
def test_packed_weights_are_the_model(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    params = generic_params(case.config)
    packed = P.packed(params)
    assert any(isinstance(leaf, PackedWeight) for leaf in _leaves(packed))
    assert off(logits(packed, case.config), logits(params, case.config)) < 2e-5
    monkeypatch.setattr(Joined, "product", alone)
    logits(packed, case.config)


@pytest.mark.parametrize("name", SETTINGS)
def test_packed_encoders_towers_and_readers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of each, whose joined weights are multiplied as one."""
    config, loss, halves = SETTINGS[name]()
    batch = {entry: torch.cat([half[entry] for half in halves]) for entry in halves[0]}
    params, batch = tree.map(_narrow, weights_of(config)), tree.map(_narrow, batch)
    packed = P.packed(params)
    assert any(isinstance(leaf, LinearOnly) for leaf in _leaves(packed))
    monkeypatch.setattr(Joined, "product", alone)
    with torch.no_grad():
        assert off(loss(packed, batch)[0], loss(params, batch)[0]) < 2e-5


def _narrow(leaf: Tensor) -> Tensor:
    return leaf.float() if leaf.is_floating_point() else leaf


def test_joined_products_have_the_checks_of_the_invariant_kernel() -> None:
    packed = P.packed({f"{name}_proj": torch.randn(8, 16) for name in "qkv"})
    with torch.no_grad(), invariant_rows(True):
        assert linears(torch.randn(2, 16), packed, "qkv")[0].shape == (2, 8)
        with pytest.raises(NotImplementedError):
            torch.vmap(lambda x: linears(x, packed, "qkv"))(torch.randn(3, 2, 16))


def test_joined_weights_are_the_same_one_by_one() -> None:
    """Copies are no longer one tensor, and a weight that `skip` leaves out keeps the others apart."""
    params = generic_params(WIDE)
    packed = P.packed(params)
    attention, mlp = packed["layers"][0]["attention"], packed["layers"][0]["mlp"]
    assert (
        len({attention[f"{name}_proj"].layout for name in "qkv"})
        == 1
        == len({mlp["gate_proj"].layout, mlp["up_proj"].layout})
    )

    def copied(_: str, leaf: Any) -> Any:
        return dataclasses.replace(leaf, layout=leaf.layout.clone()) if isinstance(leaf, Joined) else leaf

    skipping = P.packed(params, skip=("*.k_proj",))
    assert isinstance(skipping["layers"][0]["attention"]["q_proj"], PackedWeight)
    for given in (map_leaves(copied, packed), skipping):
        assert off(logits(given, WIDE), logits(packed, WIDE)) < 2e-6


def test_a_joined_weight_with_wrong_rows_is_found() -> None:
    """The planted bug: a projection that begins or ends at a row of its neighbour."""
    packed = P.packed(generic_params(WIDE))
    attention = packed["layers"][0]["attention"]
    key = attention["k_proj"]
    assert (key.start, key.stop) == (64, 96)
    attention["k_proj"] = dataclasses.replace(key, start=key.start - 1, stop=key.stop - 1)
    assert off(logits(packed, WIDE), logits(P.packed(generic_params(WIDE)), WIDE)) > 1e-3


def _leaves(params: Any) -> list[Any]:
    found: list[Any] = []
    map_leaves(lambda _, leaf: found.append(leaf), params)
    return found


def test_packed_weights_in_a_graph_are_an_operator_of_their_own() -> None:
    from torch._dynamo.testing import EagerAndRecordGraphs

    x, bias, backend = torch.randn(3, 64), torch.randn(96), EagerAndRecordGraphs()
    packed = P.packed({"up_proj": torch.randn(96, 64)})["up_proj"]
    with torch.no_grad():
        found = torch.compile(packed.linear, backend=backend, fullgraph=True)(x, bias)
        assert "fnmodels.packed_linear" in str(backend.graphs[0].graph)
        assert torch.equal(found, packed.linear(x, bias))


@pytest.mark.parametrize("rows", [1, 3])
def test_packed_weights_have_the_bits_of_the_invariant_kernel(rows: int) -> None:
    config = dataclasses.replace(WIDE, qkv_bias=True)
    params = generic_params(config)
    tokens = torch.arange(rows * 9).view(rows, 9) % 61
    found = []
    for given in (params, P.packed(params)):
        cache = fnmodels.init_cache(config, rows, 16)
        parts = []
        for part in tokens.split((6, 1, 1, 1), 1):
            step = fnmodels.prepare_step(config, part, cache)
            out, cache = fnmodels.decode_(given, *step, cache, config=config, kernel="invariant")
            parts.append(out)
        found.append(torch.cat(parts, 1))
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", FORMS)
def test_quantized_weights_are_those_that_they_say(kind: str) -> None:
    params = generic_params(WIDE)
    quantized = P.quantize(params, WIDE, kind=kind)
    forms = [leaf for leaf in _leaves(quantized) if isinstance(leaf, LinearOnly)]
    assert len(forms) == 14 and all(isinstance(form, FORMS[kind]) for form in forms)
    assert {leaf.dtype for leaf in _leaves(quantized) if isinstance(leaf, Tensor)} == {torch.bfloat16}
    restored = map_leaves(
        lambda _, leaf: dequantized(leaf) if isinstance(leaf, LinearOnly) else leaf.float(), quantized
    )
    for old, new in zip(tree.leaves(params), tree.leaves(restored), strict=True):
        span = (old.amax(-1) - old.amin(-1)).max()
        assert (new - old).abs().max() <= span * {"int8": 0.006, "int4": 0.05}[kind]
    # bf16 rounds activations in both: compared with the same weights in bf16
    wanted = logits(tree.map(lambda leaf: leaf.bfloat16(), restored), WIDE).float()
    assert off(logits(quantized, WIDE).float(), wanted) < 0.05


@pytest.mark.parametrize("kind", FORMS)
def test_a_quantized_model_generates(kind: str) -> None:
    quantized = P.quantize(generic_params(WIDE), WIDE, kind=kind)
    cache = fnmodels.init_cache(WIDE, 2, 16, dtype=torch.bfloat16)
    tokens = torch.arange(18).view(2, 9)
    whole = logits_of(quantized, tokens)
    step = fnmodels.prepare_step(WIDE, tokens[:, :8], cache)
    _, cache = fnmodels.decode_(quantized, *step, cache, config=WIDE)
    step = fnmodels.prepare_step(WIDE, tokens[:, 8:], cache)
    last, _ = fnmodels.decode_(quantized, *step, cache, config=WIDE)
    assert off(last[:, 0].float(), whole[:, -1].float()) < 0.05


def logits_of(params: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = fnmodels.forward(params, *fnmodels.prepare(WIDE, tokens), config=WIDE)
    return found


@pytest.mark.parametrize("kind", ["packed", *FORMS])
def test_without_the_private_operators_results_are_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = generic_params(WIDE)

    def made() -> Tensor:
        return logits(P.packed(params) if kind == "packed" else P.quantize(params, WIDE, kind=kind), WIDE).float()

    wanted = made()
    for name in torch_internals.PRIVATE:
        if name.startswith(("_convert_weight", "_weight_int", "ops.mkldnn")):
            monkeypatch.setitem(torch_internals.PRIVATE, name, None)
    assert off(made(), wanted) < (1e-5 if kind == "packed" else 0.05)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    params = generic_params(WIDE)
    with pytest.raises(ValueError, match="kind is 'int2'; it is one of int8, int4"):
        P.quantize(params, WIDE, kind="int2")
    narrow = dataclasses.replace(WIDE, intermediate_size=40)
    with pytest.raises(ValueError, match=r"layers.0.mlp.gate_proj is \[40, 64\], but int4 takes multiples of"):
        P.quantize(generic_params(narrow), narrow, kind="int4")
    skipped = P.quantize(generic_params(narrow), narrow, kind="int4", skip=("*.mlp.*", "lm_head"))
    assert skipped["layers"][0]["mlp"]["down_proj"].dtype is torch.bfloat16
    with pytest.raises(ValueError, match=r"layers.0.mlp.down_proj is \[64, 40\], but int8 takes multiples of"):
        P.quantize(generic_params(narrow), narrow, kind="int8")
    quantized = P.quantize(params, WIDE, kind="int8")
    with pytest.raises(ValueError, match="merge adapters, and quantize before other forms"):
        P.quantize(quantized, WIDE, kind="int8")
    wide = quantized | {"embed_tokens": quantized["embed_tokens"].float(), "norm": quantized["norm"].float()}
    with pytest.raises(ValueError, match=r"bf16 activations.*torch.float32"):
        logits(wide, WIDE)
    with pytest.raises(ValueError, match=r"has no gradient: compute under torch\.no_grad"):
        fnmodels.forward(
            P.packed({**params, "norm": params["norm"].clone().requires_grad_()}),
            *fnmodels.prepare(WIDE, torch.ones(1, 3, dtype=torch.long)),
            config=WIDE,
        )
    for given in (quantized, P.packed(params)):
        with pytest.raises((ValueError, P.MismatchError)) as error:
            P.save_pretrained(tmp_path / "model", WIDE, given)
        assert "q_proj" in str(error.value) or "down_proj" in str(error.value)
        assert not (tmp_path / "model").exists()


def test_every_linear_weight_is_one_of_the_spec() -> None:
    spec = tree.flatten(fnmodels.family_of(WIDE).spec(WIDE))
    assert sum(is_linear(path, leaf) for path, leaf in spec.items()) == 15


def test_quantized_params_of_wider_ones_have_the_dtypes_that_the_family_fixes() -> None:
    """ERNIE 4.5's routers are in fp32, whatever the others are; of fp64 params they were fp64, which failed."""
    case = next(case for case in richest() if case.name == "ernie4_5_moe")
    wide = tree.map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, generic_params(case.config))
    quantized = P.quantize(wide, case.config, kind="int8", skip=("lm_head", "*.down_proj"))
    dtypes = {leaf.dtype for leaf in _leaves(quantized) if isinstance(leaf, Tensor)}
    assert dtypes == {torch.bfloat16, torch.float32}
    assert torch.isfinite(logits(quantized, case.config)).all()
