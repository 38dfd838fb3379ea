"""Taps and edits equal forward hooks of transformers (E1), wherever a module of theirs has the value of a tap."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
from params.compare import _layers, _sublayers
from tests.support.cases import (
    Case,
    off,
    positions_of,
    richest,
    seed_of,
    segments,
    short,
    sparse_layers,
    tap_names,
    tokens_of,
)
from tests.support.oracle import model_of, params_of

BOUND = 1e-6
ROWS = segments((9,), (9,))


def modules_of(model: Any, case: Case) -> dict[str, tuple[Any, str]]:
    """{tap: (module of the reference, "output" or "input": which of its values the tap is)}."""
    found: dict[str, tuple[Any, str]] = {}
    names = tap_names(case.config)
    multiplied = getattr(model.config, "residual_multiplier", 1.0) != 1.0 or hasattr(model.config, "ssm_out_multiplier")
    sparse, kinds = sparse_layers(case.config), fnmodels.family_of(case.config).kinds(case.config)
    for i, layer in enumerate(_layers(model)):
        if kinds[i] in kinds[:i]:
            continue  # the same code
        if not hasattr(layer, "mixer") and not hasattr(layer, "residual_multiplier"):
            for tap, module in _sublayers(layer):
                if not multiplied and not (tap == "mlp" and i in sparse):
                    found[f"layers.{i}.{tap}"] = module, "output"
        found[f"layers.{i}.output"] = layer, "output"
        inner = dict(layer.named_modules())
        for where in ("self_attn", "attn", "attention", "self_attention"):
            for out in ("o_proj", "dense", "out_proj", "c_proj", "Wo"):
                if f"{where}.{out}" in inner and case.family != "qwen3_next":
                    found[f"layers.{i}.attention.z"] = inner[f"{where}.{out}"], "input"
        for where in ("mlp", "feed_forward"):
            for out in ("down_proj", "dense_4h_to_h", "fc2", "c_proj", "Wo"):
                if f"{where}.{out}" in inner and i not in sparse:
                    found[f"layers.{i}.mlp.neurons"] = inner[f"{where}.{out}"], "input"
        if "input_layernorm" in inner:
            found[f"layers.{i}.input_layernorm"] = inner["input_layernorm"], "output"
    base = getattr(model, "model", None) or model.base_model
    for name in ("norm", "final_layernorm", "ln_f", "final_layer_norm", "norm_f", "embedding_norm", "final_norm"):
        if hasattr(base, name):
            found["final.norm"] = getattr(base, name), "output"
    return {tap: at for tap, at in found.items() if tap in names}


def hooked(module: Any, which: str, change: Any) -> Any:
    """Applies `change` to the module's value; returns the handle."""

    def after(_: Any, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    def before(_: Any, args: Any) -> Any:
        return (change(args[0]), *args[1:])

    return module.register_forward_hook(after) if which == "output" else module.register_forward_pre_hook(before)


@pytest.mark.parametrize("case", [short(c) for c in richest() if c.values is not None], ids=str)
def test_an_edit_equals_a_hook(case: Case) -> None:
    """For each tap: the value, the logits after it is changed, and the gradient with respect to the change."""
    values = case.values
    if case.config.num_hidden_layers != fnmodels.family_of(case.config).Config.from_hf(values).num_hidden_layers:
        case = Case(case.family, case.name, values, fnmodels.family_of(case.config).Config.from_hf(values))
    model = model_of(values)
    params = params_of(model, case.config)
    tokens = tokens_of(case.config, *ROWS.shape, seed=seed_of(case))
    prepared = fnmodels.prepare(case.config, tokens)
    run = functools.partial(fnmodels.forward, params, *prepared, config=case.config, kernel="math")
    modules = modules_of(model, case)
    assert {"final.norm", "layers.0.output"} & set(tap_names(case.config)) <= modules.keys()
    _, tapped = run(taps=tuple(modules))
    for tap, (module, which) in modules.items():
        seen: list[Tensor] = []
        strength = torch.tensor(0.75, requires_grad=True)

        def change(value: Tensor, seen: list[Tensor] = seen, strength: Tensor = strength) -> Tensor:
            seen.append(value.detach().clone())
            return value * strength

        handle = hooked(module, which, change)
        theirs = model(input_ids=tokens, position_ids=positions_of(ROWS), use_cache=False).logits
        handle.remove()
        ours = run(edits={tap: lambda value, name, strength=strength: value * strength})
        assert len(seen) == 1 and near(tapped[tap].reshape(seen[0].shape), seen[0]), tap
        assert near(ours, theirs), (tap, float((ours - theirs).abs().max()))
        (one,), (two,) = (torch.autograd.grad(out.square().mean(), strength) for out in (ours, theirs))
        assert near(one, two, 1e-5), tap


def near(ours: Tensor, theirs: Tensor, bound: float = BOUND) -> bool:
    """Whether the values differ by at most `bound` of their size, with some room for the order of sums."""
    return off(ours.detach(), theirs.detach()) < 5 * bound
