"""The note that a call leaves on a mask of the masks and tables it has made ready: no result depends on it."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import fnmodels
import params as P
from fnmodels import llama, tree

CONFIG = llama.Config(
    vocab_size=31,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)
PARAMS = P.init(CONFIG, seed=0)
TOKENS = torch.arange(12).view(2, 6)


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _forward(prepared: Any, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = fnmodels.forward(PARAMS, *prepared, config=CONFIG, **options)
    return logits


def _fresh(prepared: Any) -> torch.Tensor:
    """The logits of copies, which have no notes."""
    return _forward(tree.map(torch.clone, prepared))


def test_a_second_call_with_a_batch_makes_no_tables_and_has_the_bits_of_the_first() -> None:
    prepared = fnmodels.prepare(CONFIG, TOKENS)
    first, second = _Names(), _Names()
    with first:
        _forward(prepared)  # a mode keeps the call from leaving a note
    logits = _forward(prepared)
    with second:
        again = _forward(prepared)
    assert torch.equal(logits, again) and torch.equal(logits, _fresh(prepared))
    assert "aten.cat.default" in first.names and "aten.cat.default" not in second.names


@pytest.mark.parametrize("what", ["table", "positions", "segments", "valid"])
def test_a_write_to_what_was_read_is_seen(what: str) -> None:
    inputs, masks, freqs_cis = prepared = fnmodels.prepare(CONFIG, TOKENS, segment_ids=torch.ones_like(TOKENS))
    before, mask = _forward(prepared), masks["full"]
    assert isinstance(mask, fnmodels.inputs.Mask)
    tensors = {"table": freqs_cis["full"], "positions": mask.q_positions, "segments": mask.q_segments}
    written = (tensors | {"valid": inputs["valid"]})[what]
    if what == "table":
        written.copy_(written.flip(1).clone())
    else:
        written[0, 3:] = 0 if what != "positions" else 7
    assert torch.equal(_forward(prepared), _fresh(prepared))
    assert not torch.equal(_forward(prepared), before) or what == "valid"


def test_another_table_mask_or_valid_of_the_same_sizes_is_read() -> None:
    inputs, masks, freqs_cis = fnmodels.prepare(CONFIG, TOKENS)
    before = _forward((inputs, masks, freqs_cis))
    table = {"full": freqs_cis["full"].flip(1)}
    assert torch.equal(_forward((inputs, masks, table)), _fresh((inputs, masks, table)))
    some = inputs["valid"].clone()
    some[1, 2:] = False
    others = inputs | {"valid": some}
    assert torch.equal(_forward((others, masks, freqs_cis)), _fresh((others, masks, freqs_cis)))
    _, packed, _ = fnmodels.prepare(CONFIG, TOKENS, positions=TOKENS % 3, segment_ids=1 + TOKENS % 6 // 3)
    found = _forward((inputs, packed, freqs_cis))
    assert torch.equal(found, _fresh((inputs, packed, freqs_cis))) and not torch.equal(found, before)
    masks["full"] = packed["full"]
    assert torch.equal(_forward((inputs, masks, freqs_cis)), found)


def test_tokens_of_other_sizes_are_refused_after_a_call_that_fits() -> None:
    inputs, masks, freqs_cis = fnmodels.prepare(CONFIG, TOKENS)
    _forward((inputs, masks, freqs_cis))
    with pytest.raises(ValueError, match="made for 6 queries and 6 keys, but x has 5 tokens"):
        _forward((TOKENS[:, :5], masks, freqs_cis))
    with pytest.raises(ValueError, match="params has 1 layers, but the config has 2"):
        fnmodels.forward(PARAMS | {"layers": PARAMS["layers"][:1]}, inputs, masks, freqs_cis, config=CONFIG)


def test_a_table_with_a_gradient_keeps_it_in_every_call() -> None:
    inputs, masks, freqs_cis = fnmodels.prepare(CONFIG, TOKENS)
    table = freqs_cis["full"].clone().requires_grad_()
    grads = []
    for _ in range(2):
        logits = fnmodels.forward(PARAMS, inputs, masks, {"full": table}, config=CONFIG)
        grads.append(torch.autograd.grad(logits.square().sum(), table)[0])
    assert torch.equal(*grads) and grads[0].abs().max() > 0


def test_a_table_that_begins_to_need_a_gradient_has_it() -> None:
    inputs, masks, tables = fnmodels.prepare(CONFIG, TOKENS)
    _forward((inputs, masks, tables))
    tables["full"].requires_grad_()
    fnmodels.forward(PARAMS, inputs, masks, tables, config=CONFIG).square().sum().backward()
    assert tables["full"].grad is not None


@pytest.mark.parametrize("how", ["fx", "jit"])
def test_tracers_read_the_tables_that_they_are_given(how: str) -> None:
    inputs, masks, tables = fnmodels.prepare(CONFIG, TOKENS)
    _forward((inputs, masks, tables))
    table = tables["full"]

    def call(table: torch.Tensor) -> torch.Tensor:
        given = dict.fromkeys(tables, table) if how == "jit" else {"full": table}
        return fnmodels.forward(PARAMS, inputs, masks, given, config=CONFIG)

    made: Any = make_fx(call)(table) if how == "fx" else torch.jit.trace(call, (table,), check_trace=False)
    other = 30 * table.flip(1)
    assert torch.allclose(made(other), _forward((inputs, masks, {"full": other})), atol=1e-5)
    assert not torch.allclose(made(other), made(table), atol=1e-3)


def test_a_call_in_inference_mode_leaves_nothing_that_a_gradient_would_meet() -> None:
    prepared = fnmodels.prepare(CONFIG, TOKENS)
    with torch.inference_mode():
        fnmodels.forward(PARAMS, *prepared, config=CONFIG)
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), PARAMS)
    fnmodels.forward(params, *prepared, config=CONFIG).sum().backward()
    assert params["norm"].grad is not None


def test_transforms_and_other_options_have_results_of_their_own() -> None:
    prepared = fnmodels.prepare(CONFIG, TOKENS)
    logits = _forward(prepared)

    def total(params: Any, *batch: Any) -> torch.Tensor:
        value: torch.Tensor = fnmodels.forward(params, *batch, config=CONFIG).square().sum()
        return value

    noted, fresh = (
        torch.func.grad(total)(PARAMS, *prepared),
        torch.func.grad(total)(PARAMS, *tree.map(torch.clone, prepared)),
    )
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(noted), tree.leaves(fresh), strict=True))
    assert torch.allclose(_forward(prepared, kernel="math"), logits, atol=1e-5)
    stacked = tree.map(lambda leaf: torch.stack((leaf, leaf * 2)), PARAMS)
    of_members = torch.func.vmap(lambda p: fnmodels.forward(p, *prepared, config=CONFIG))(stacked)
    assert torch.allclose(of_members[0], logits, atol=1e-5)


def test_copies_of_a_mask_have_no_note() -> None:
    prepared = fnmodels.prepare(CONFIG, TOKENS)
    logits = _forward(prepared)
    for copied in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert set(vars(copied[1]["full"])) == set(vars(tree.map(torch.clone, prepared[1]["full"])))
        assert torch.equal(_forward(copied), logits)
