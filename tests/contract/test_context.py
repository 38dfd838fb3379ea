"""`Context`, a block's extension point: taps, and edits of them (E1), in every family; a block called alone."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
import train
import train.loss
import train.remat
from fnmodels.models.common import encoder
from fnmodels.models.common.context import STATE_TAP
from fnmodels.models.common.family import LayerKind, field_of, traits_of
from fnmodels.models.encoder import longformer
from fnmodels.ops import layer_norm, rms_norm
from fnmodels.ops.streams.hyper import mean
from tests.support.cases import (
    Case,
    batch_of,
    beside,
    block_of,
    block_structures,
    cases,
    generic_params,
    is_inner,
    keep,
    layers_run,
    off,
    representatives,
    segments,
    sublayers,
    tap_names,
    taps_of,
    trainable,
)

ROWS = segments((5, 3), (-1, 6, 1))

every_block = pytest.mark.parametrize("case", block_structures(), ids=str)
every_part = pytest.mark.parametrize("case", representatives(), ids=str)


def scale(value: Tensor, name: str, *, by: Tensor) -> Tensor:
    """An edit that multiplies."""
    return value * by


def grown(value: Tensor) -> Tensor:
    """Values times factors that differ along the last dimension: norms undo one factor, and a shift."""
    return value * torch.linspace(1.3, 1.7, value.shape[-1], dtype=value.dtype)


def scaled(strength: Tensor, *names: str) -> dict[str, Any]:
    """Edits that multiply the taps of all layers."""
    return {f"layers.*.{name}": functools.partial(scale, by=strength) for name in names}


def names_of(case: Case) -> tuple[str, ...]:
    """The taps of numbers within a layer, except the state that a recurrent layer leaves, which no logits depend on."""
    without = ("choices", "counts", "expert_indices", STATE_TAP, "input", "output")
    return tuple(name for name in taps_of(case.config) if name not in without)


_LOOSE: dict[Any, dict[str, float]] = {torch.equal: {}, torch.allclose: {"rtol": 1e-5, "atol": 1e-5}}


@functools.cache
def edited(case: Case) -> tuple[str, ...]:
    """Those that no case before has, and a quarter of the others in turn: an edit acts where a tap is passed."""
    parts = [*representatives()]
    at = next(i for i, part in enumerate(parts) if part.name == case.name)
    seen = {name for part in parts[:at] for name in names_of(part)}
    return tuple(name for i, name in enumerate(names_of(case)) if name not in seen or (i + at) % 4 == 0)


@every_part
def test_an_edit_of_every_tap(case: Case) -> None:
    """An edit changes the logits and the recorded tap, knows its layer, and equals the tensor put there; 1 is exact."""
    params, batch = generic_params(case.config), batch_of(case.config, ROWS)
    first = {name.split(".", 2)[-1]: name for name in reversed(tap_names(case.config))}
    taps = {name: first[name] for name in (*edited(case), "input", "output", "embed", "hidden")}
    plain, tapped = batch.forward(params, taps=tuple(taps.values()))
    by_one = functools.partial(scale, by=torch.ones(()))
    # the mean of streams that are moved by a difference has other last bits
    same = torch.allclose if field_of(case.config, "residual_streams") else torch.equal
    assert torch.equal(batch.forward(params, edits=dict.fromkeys(taps.values(), by_one)), plain)
    for name, tap in taps.items():
        run = functools.partial(batch.forward, params, taps=(tap,))
        seen: list[str] = []

        def grow(value: Tensor, where: str, seen: list[str] = seen) -> Tensor:
            seen.append(where)
            return grown(value)

        logits, found = run(edits={tap: grow})
        assert seen == [tap] and same(found[tap], grown(tapped[tap]), **_LOOSE[same]), name
        assert (logits - plain)[batch.valid].abs().max() > 1e-4, name
        put, found = run(edits={tap: grown(tapped[tap])})
        assert torch.equal(put, logits) and same(found[tap], grown(tapped[tap]), **_LOOSE[same]), name


@pytest.mark.parametrize("case", representatives()[::2], ids=str)
def test_an_edit_goes_through_transforms(case: Case) -> None:
    """vmap and grad over an edit's strength, and rematerialised layers."""
    params, batch = generic_params(case.config), batch_of(case.config, ROWS)
    sublayer = "mlp" if "mlp" in names_of(case) else "attention"

    def loss(strength: Tensor, layer_fn: Any = None) -> Tensor:
        logits = batch.forward(params, edits=scaled(strength, sublayer), layer_fn=layer_fn)
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


LLAMA = next(case for case in cases() if case.name == "llama")


def test_edits_compile_once_for_all_strengths() -> None:
    """Tensors of an edit are arguments, so that layers and values share a graph; a function may read its layer."""
    params, batch = generic_params(LLAMA.config), batch_of(LLAMA.config, ROWS)
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

    def by_layer(value: Tensor, name: str) -> Tensor:
        return value * (2.0 if name == "layers.0.mlp" else 0.5)

    layers = len(fnmodels.family_of(LLAMA.config).kinds(LLAMA.config))
    _, tapped = batch.forward(params, taps=("layers.*.mlp",))
    forms: tuple[tuple[Any, int], ...] = (
        (lambda strength: scaled(torch.tensor(strength), "mlp", "attention.q"), 1),
        (lambda strength: {name: value * strength for name, value in tapped.items()}, 1),
        (lambda strength: {"layers.*.mlp": by_layer}, layers),
    )
    for edits_of, wanted in forms:
        torch.compiler.reset()
        graphs.clear()
        try:
            for strength in (1.5, 0.75):
                edits = edits_of(strength)
                got = batch.forward(params, edits=edits, layer_fn=compiled)
                assert off(got, batch.forward(params, edits=edits)) < 1e-5
        finally:
            torch.compiler.reset()
        assert len(graphs) == wanted


def test_edits_are_captured_in_one_graph() -> None:
    """A compiled forward pass takes the tensors of its edits as arguments."""
    params, batch = generic_params(LLAMA.config), batch_of(LLAMA.config, ROWS)
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def run(strength: Tensor) -> Tensor:
        edits = scaled(strength, "mlp", "attention.pattern") | {"embed": functools.partial(scale, by=strength)}
        return batch.forward(params, kernel="math", edits=edits)

    torch.compiler.reset()
    try:
        compiled = torch.compile(run, fullgraph=True, backend=count)
        for strength in (torch.tensor(1.5), torch.tensor(0.75)):
            assert off(compiled(strength), run(strength)) < 1e-5
    finally:
        torch.compiler.reset()
    assert len(graphs) == 1


def test_edits_reach_every_function_that_runs_layers() -> None:
    """hidden, run_layers, losses (with remat) and a cache take the edits of forward; a loss' gradient goes through."""
    config, params, batch = LLAMA.config, generic_params(LLAMA.config), batch_of(LLAMA.config, ROWS)
    prepared, layers = batch.prepared(), len(fnmodels.family_of(config).kinds(config))
    strength = torch.tensor(1.5, requires_grad=True)
    edits = {
        "embed": functools.partial(scale, by=torch.tensor(0.5)),
        **scaled(strength, "mlp", "attention.v", "output"),
    }
    end = {"hidden": functools.partial(scale, by=torch.tensor(2.0))}
    want = batch.forward(params, edits=edits, kernel="math")
    states = fnmodels.hidden(params, *prepared, config=config, edits=edits, kernel="math")
    twice = fnmodels.hidden(params, *prepared, config=config, edits=edits | end, kernel="math")
    assert torch.equal(twice, 2 * states)
    x = fnmodels.family_of(config).embed(params, prepared[0], config=config) * 0.5
    inner = {name: edit for name, edit in edits.items() if name != "embed"}
    x = fnmodels.run_layers(params, x, *prepared[1:], 0, 1, config=config, edits=inner, kernel="math")
    x = fnmodels.run_layers(params, x, *prepared[1:], 1, layers, config=config, edits=inner, kernel="math")
    assert torch.equal(x, states)

    labels = batch.tokens.where(batch.valid, -100)
    data = {"tokens": batch.tokens, "positions": batch.positions, "segment_ids": batch.segment_ids, "labels": labels}
    run = functools.partial(train.next_token_loss, config=config, length=batch.length, kernel="math", edits=edits)
    (gradient,) = torch.autograd.grad(run(params, data)[0], strength)
    ours = torch.nn.functional.cross_entropy(want.flatten(0, 1), labels.flatten(), reduction="sum")
    (wanted,) = torch.autograd.grad(ours, strength)
    assert off(run(params, data)[0], ours) < 1e-5 and off(gradient, wanted) < 1e-4 and gradient != 0
    loss = train.loss.ModelLoss(run).with_options(blocks={"outer": train.remat.layer_fn("full", "none")})
    (again,) = torch.autograd.grad(loss(params, data)[0], strength)
    assert off(again, gradient) < 1e-6

    tokens = batch.tokens[:, :4]
    cache = fnmodels.init_cache(config, batch=len(tokens), capacity=8, dtype=torch.float32)
    logits, cache = fnmodels.prefill(
        params, *fnmodels.prepare_step(config, tokens[:, :3], cache), cache, config=config, edits=edits, at="all"
    )
    last, _ = fnmodels.decode(
        params, *fnmodels.prepare_step(config, tokens[:, 3:], cache), cache, config=config, edits=edits
    )
    whole = fnmodels.forward(params, *fnmodels.prepare(config, tokens), config=config, edits=edits)
    assert off(torch.cat((logits, last), 1), whole) < 1e-5


def _steer(value: Tensor, name: str, vector: Tensor, by: float) -> Tensor:
    return value + by * vector


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        (
            {"layers.0.nothing": lambda value, name: value},
            "Nothing passes the edit 'layers.0.nothing'. There are embed",
        ),
        ({"layers.*.nothing": lambda value, name: value}, r"Nothing passes the edit 'layers\.\*\.nothing'"),
        ({"layers.9.mlp": lambda value, name: value}, "'layers.9.mlp' is of a layer that does not run here: these are"),
        ({"mlp": lambda value, name: value}, "'mlp' is of no tap: there are embed, hidden and layers.N.NAME"),
        ({"layers.0.mlp": torch.zeros(1), "layers.*.mlp": torch.zeros(1)}, "Two edits are of layer 0's 'mlp'"),
        ({"layers.0.mlp": torch.zeros(3)}, r"'mlp' gives float32 \[3\]; the value there is float32 \[2, 8, "),
        ({"layers.0.mlp": lambda value, name: value.double()}, "'layers.0.mlp' gives float64 .*, and must stay so"),
        ({"embed": lambda value, name: value[:1]}, "edit of 'embed' gives"),
        ({"layers.0.input": lambda value, name: None}, "edit of 'layers.0.input' returned a NoneType"),
        ({"layers.0.input": 3}, "edit of 'layers.0.input' is a int; an edit is a function"),
        ({"layers.*.mlp": lambda value: value}, r"'layers\.\*\.mlp' cannot be called as edit\(value, name\): too many"),
        ({"embed": lambda value: value}, r"'embed' cannot be called as edit.*, and this one takes \(value\)"),
        ({"layers.0.mlp": functools.partial(_steer, by=1.0)}, r"'layers\.0\.mlp' cannot be .* argument: 'vector'"),
        ([("layers.0.mlp", torch.zeros(1))], "edits is a list; it is a dict of the names of taps and their edits"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_edit_is_answered_by_a_sentence(edits: Any, words: str) -> None:
    batch = batch_of(LLAMA.config, ROWS)
    with pytest.raises((TypeError, ValueError), match=words):
        batch.forward(generic_params(LLAMA.config), edits=edits)


@every_block
def test_what_sublayers_add_is_what_the_taps_hold(case: Case) -> None:
    """input + attention + mlp == output, after every norm and multiplier; middle stands between them.

    A layer has the taps of the sublayers that its parameters are of, both or one. Gemma 4 multiplies the output.
    """
    if field_of(case.config, "residual_streams"):
        pytest.skip("Sublayers add to each stream by its own weight: tests/fnmodels/ops/test_hyper.py.")
    if case.family == "muse_spark":
        pytest.skip("A gate weighs the stream and what joins it: tests/fnmodels/models/test_muse_spark.py.")
    if case.family == "minimax":
        pytest.skip("Sublayers add to their normed input, by factors: tests/fnmodels/models/test_minimax.py.")
    if case.family in ("inkling2", "kimi_k3"):
        pytest.skip("Sublayers add to the state of a block, which begins anew: tests/fnmodels/models/ of the family.")
    batch, names, params = batch_of(case.config, ROWS), names_of(case), generic_params(case.config)
    beside = ("per_layer", "shortcut")  # of an embedding of the layer's own; of the layer before
    there = tuple(name for name in ("mamba", "attention", "middle", "mlp", *beside) if name in names)
    taps = ("input", "output", *there)
    _, found = batch.forward(params, taps=tuple(f"layers.*.{name}" for name in taps))
    for index, added in enumerate(sublayers(case.config)):
        tap = {name: found[f"layers.{index}.{name}"] for name in taps if f"layers.{index}.{name}" in found}
        joins = LayerKind.parse(fnmodels.family_of(case.config).kinds(case.config)[index]).joins
        more = ({"middle", "per_layer"} & set(names)) | ({"shortcut"} & set(names) if joins else set())
        layer = layers_run(case.config, params["layers"])[index]
        assert (added or is_inner(layer)) and tap.keys() == {"input", "output", *added, *more}
        tap = {name: value[batch.valid] for name, value in tap.items()}
        if block_of(case) in (encoder.__name__, longformer.__name__):  # BERT's relatives: a norm after each sum
            eps = case.config.layer_norm_eps
            for name, before, added_there, after in (
                ("post_attention_layernorm", "input", "attention", "middle"),
                ("post_feedforward_layernorm", "middle", "mlp", "output"),
            ):
                summed = tap[before] + tap[added_there]
                assert off(layer_norm(summed, layer[name], layer[f"{name}_bias"], eps=eps), tap[after]) < 1e-6
            continue
        last = tap.get("per_layer", 0) + tap.get("shortcut", 0)
        whole = tap["input"] + sum(tap[name] for name in added) + last
        after = whole * layer.get("layer_scalar", 1)
        if "final_norm" in layer:  # after each pass of Ouro's stack, of which the head may read several
            after = rms_norm(after, layer["final_norm"], eps=case.config.rms_norm_eps)
        if case.family != "ouro" or case.config.exit == "last" or index < case.config.num_hidden_layers - 1:
            assert off(after, tap["output"]) < 1e-6
        if "middle" in tap:
            assert off(whole - tap.get("mlp", 0) - last, tap["middle"]) < 1e-6


@every_block
def test_a_block_called_alone(case: Case) -> None:
    """`family.block(layer, x, mask, freqs, config=, kind=)` is a pure function that returns (x, aux)."""
    family, params, batch = fnmodels.family_of(case.config), generic_params(case.config), batch_of(case.config, ROWS)
    inputs, masks, freqs_cis = batch.prepared()
    kinds = family.kinds(case.config)
    streams = ("layers.*.streams",) if field_of(case.config, "residual_streams") else ()
    _, tapped = batch.forward(params, kernel="auto", taps=("layers.*.input", "layers.*.output", *streams))
    lent: dict[str, Any] = {}
    for index, kind in enumerate(kinds):
        sparse = traits_of(family).routed and LayerKind.parse(kind).routed
        more = beside(case.config, params, inputs, index, lent)
        x, layer = tapped[f"layers.{index}.input"], layers_run(case.config, params["layers"])[index]
        x = tapped.get(f"layers.{index - 1}.streams", x)
        got, aux = family.block(layer, x, masks[kind], freqs_cis[kind], config=case.config, kind=kind, **more)
        assert off(mean(got)[batch.valid], tapped[f"layers.{index}.output"][batch.valid]) < 1e-5
        keep(lent, kind, aux)
        assert aux.keys() == ({"counts", "router_logits"} if sparse else set())
