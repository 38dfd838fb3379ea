"""`Context`, a block's extension point: a new capability reaches every tap of every family without changes to them."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
from fnmodels.models.common.context import ATTENTION_TAPS, Context
from fnmodels.models.common.registry import may_have
from fnmodels.ops.moe.layer import MOE_TAPS
from tests.support.cases import (
    Case,
    attending,
    attending_layers,
    batch_of,
    beside,
    cases,
    generic_params,
    off,
    richest,
    segments,
    short,
    sublayers,
    taps_of,
    trainable,
)

ROWS = segments((5, 3), (-1, 6, 1))

every_case = pytest.mark.parametrize("case", cases(), ids=str)
every_family = pytest.mark.parametrize("case", tuple(map(short, richest())), ids=str)


class Edited(Context):
    """A toy capability: each tap that the call names in `edits` is multiplied by the tensor given there."""

    def tap(self, name: str, value: Tensor) -> Tensor:
        edits = self.tensors.get("edits") or {}
        return super().tap(name, value * edits[name] if name in edits else value)


def with_edits(edits: dict[str, Tensor]) -> Any:
    """A layer_fn that passes `edits` to each call, as a tensor of the batch is passed."""
    return lambda block: functools.partial(block, edits=edits)


def names_of(case: Case) -> tuple[str, ...]:
    """The taps of numbers that a block passes to its context: the family's and those of attention, if it has any."""
    own = taps_of(case.config)
    return (
        *(name for name in own if name not in (*MOE_TAPS, "choices")),
        *(ATTENTION_TAPS if attending((case,)) else ()),
    )


@every_family
def test_an_edit_of_every_tap_without_a_line_in_a_family(case: Case) -> None:
    """An edit changes the logits and the recorded tap; a factor of 1 changes no bit."""
    params, batch = generic_params(case.config), batch_of(case.config, ROWS)
    first = {name: i for i, parts in reversed(list(enumerate(sublayers(case.config)))) for name in parts}
    first |= dict.fromkeys(ATTENTION_TAPS, (attending_layers(case.config) or [0])[0])
    for name in names_of(case):
        tap = f"layers.{first.get(name, 0)}.{name}"
        run = functools.partial(batch.forward, params, taps=(tap,), context=Edited)
        plain, tapped = batch.forward(params, taps=(tap,))
        still, _ = run(layer_fn=with_edits({name: torch.ones(())}))
        assert torch.equal(still, plain), name
        logits, found = run(layer_fn=with_edits({name: torch.full((), 1.5)}))
        assert torch.equal(found[tap], tapped[tap] * 1.5), name
        assert (logits - plain)[batch.valid].abs().max() > 1e-4, name


@every_family
def test_an_edit_goes_through_transforms(case: Case) -> None:
    """vmap and grad over an edit's strength, and rematerialised layers."""
    params, batch = generic_params(case.config), batch_of(case.config, ROWS)
    sublayer = "mlp" if "mlp" in names_of(case) else "attention"

    def loss(strength: Tensor, layer_fn: Any = lambda block: block) -> Tensor:
        wrap = lambda block: with_edits({sublayer: strength, "z": strength})(layer_fn(block))  # noqa: E731
        logits = batch.forward(params, context=Edited, layer_fn=wrap)
        return logits[batch.valid].square().mean()

    strengths = torch.tensor([1.0, 1.25, 0.5])
    both = torch.func.vmap(torch.func.grad_and_value(loss))(strengths)
    for index, strength in enumerate(strengths):
        gradient, value = torch.func.grad_and_value(loss)(strength)
        assert off(both[1][index], value) < 1e-5 and off(both[0][index], gradient) < 1e-4

    def recomputed(block: Any) -> Any:
        return lambda *args, **more: torch.utils.checkpoint.checkpoint(block, *args, use_reentrant=False, **more)

    leaf = trainable({"strength": torch.tensor(1.25)})["strength"]
    (want,) = torch.autograd.grad(loss(leaf), leaf)
    (got,) = torch.autograd.grad(loss(leaf, recomputed), leaf)
    assert torch.equal(got, want) and got != 0


def test_edits_compile_once_for_all_layers_and_strengths() -> None:
    """An edit is a tensor of the call: other layers and other values are the same graph."""
    case = next(case for case in cases() if case.name == "llama")
    params, batch = generic_params(case.config), batch_of(case.config, ROWS)
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    made: dict[Any, Any] = {}

    def compiled(block: Any) -> Any:
        key = (block.func, tuple(block.keywords.items()))
        if key not in made:
            made[key] = torch.compile(block, fullgraph=True, backend=count)
        return made[key]

    torch.compiler.reset()
    try:
        for strength in (1.5, 0.75):
            edits = {"mlp": torch.full((), strength), "q": torch.full((), strength)}
            run = functools.partial(batch.forward, params, context=Edited)
            got = run(layer_fn=lambda block, edits=edits: functools.partial(compiled(block), edits=edits))
            assert off(got, run(layer_fn=with_edits(edits))) < 1e-5
    finally:
        torch.compiler.reset()
    assert len(made) == len(set(fnmodels.family_of(case.config).kinds(case.config))) == len(graphs)


@every_case
def test_what_sublayers_add_is_what_the_taps_hold(case: Case) -> None:
    """input + attention + mlp == output, after every norm and multiplier; middle stands between them.

    A layer has the taps of the sublayers that its parameters are of, both or one. Gemma 4 multiplies the output.
    """
    batch, names, params = batch_of(case.config, ROWS), names_of(case), generic_params(case.config)
    there = tuple(name for name in ("mamba", "attention", "middle", "mlp", "per_layer") if name in names)
    taps = ("input", "output", *there)
    _, found = batch.forward(params, taps=tuple(f"layers.*.{name}" for name in taps))
    for index, added in enumerate(sublayers(case.config)):
        tap = {name: found[f"layers.{index}.{name}"] for name in taps if f"layers.{index}.{name}" in found}
        more = {"middle", "per_layer"} & set(names)
        assert added and tap.keys() == {"input", "output", *added, *more}
        tap = {name: value[batch.valid] for name, value in tap.items()}
        whole = tap["input"] + sum(tap[name] for name in added) + tap.get("per_layer", 0)
        assert off(whole * params["layers"][index].get("layer_scalar", 1), tap["output"]) < 1e-6
        if "middle" in tap:
            assert off(whole - tap["mlp"] - tap.get("per_layer", 0), tap["middle"]) < 1e-6


@every_case
def test_a_block_called_alone(case: Case) -> None:
    """`family.block(layer, x, mask, freqs, config=, kind=)` is a pure function that returns (x, aux)."""
    family, params, batch = fnmodels.family_of(case.config), generic_params(case.config), batch_of(case.config, ROWS)
    inputs, masks, freqs_cis = batch.prepared()
    kinds = family.kinds(case.config)
    _, tapped = batch.forward(params, kernel="auto", taps=("layers.*.input", "layers.*.output"))
    lent: dict[str, Any] = {}
    for index, kind in enumerate(kinds):
        sparse = may_have(family, "ROUTED") and kind.endswith("_moe")
        more = beside(case.config, params, inputs, index, lent)
        x, layer = tapped[f"layers.{index}.input"], params["layers"][index]
        got, aux = family.block(layer, x, masks[kind], freqs_cis[kind], config=case.config, kind=kind, **more)
        assert off(got[batch.valid], tapped[f"layers.{index}.output"][batch.valid]) < 1e-5
        lent[kind] = aux.pop("kv", None)
        assert aux.keys() == ({"counts", "router_logits"} if sparse else set())
