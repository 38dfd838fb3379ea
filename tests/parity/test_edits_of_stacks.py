"""Taps and edits equal hooks of transformers in vision towers, T5 and Whisper; in float64, to 1e-6: see test_edits."""

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.models.common.context import Context
from tests.fnmodels.models import test_pairs, test_vision, test_whisper
from tests.parity.test_edits import Edit, by_values, near, same
from tests.support.doubles import KeepsDoubles, doubled
from tests.support.reference_taps import ATTENTION, Site

# Modules of a layer, by model type: attention, what is added after it, the activation, the last projection of the MLP,
# what is added after that, and cross attention.
_CLIP = ("self_attn", "self_attn", "mlp.activation_fn", "mlp.fc2", "mlp")
_DINO = ("attention", "layer_scale1", "mlp.activation_fn", "mlp.fc2", "layer_scale2")
LAYERS = {
    **dict.fromkeys(("clip_vision_model", "siglip_vision_model"), _CLIP),
    **dict.fromkeys(("dinov2", "dinov2_with_registers"), _DINO),
    "dinov3_vit": ("attention", "layer_scale1", "mlp.act_fn", "mlp.down_proj", "layer_scale2"),
    "vit": ("attention", "attention", *_CLIP[2:]),
    "pixtral": ("attention", "attention", "feed_forward.act_fn", "feed_forward.down_proj", "feed_forward"),
    "whisper": ("self_attn", "self_attn", "activation_fn", "fc2", "fc2", "encoder_attn"),
    "t5": (*("layer.0.SelfAttention",) * 2, *(f"layer.-1.DenseReluDense{end}" for end in (".act", ".wo", "")))
    + ("layer.1.EncDecAttention",),
}
CROSS = "cross_attention"


@dataclass(frozen=True)
class Stack:
    """Layers of a model of transformers, its run, and the same in fnmodels. names: {path of a parameter: on disk}."""

    kind: str
    model: Any
    layers: Any
    run: Callable[[], Tensor]
    config: Any
    params: Any
    prepared: Any
    names: dict[str, Any]


def vision(name: str) -> Stack:
    """A vision tower, for one image."""
    config, image = test_vision._config(name), test_vision._images()[1].double()
    model = doubled(copy.deepcopy(test_vision._reference(name)))
    layers = max((module for module in model.modules() if isinstance(module, torch.nn.ModuleList)), key=len)
    patches, positions, segment_ids = fnmodels.inputs.patch_rows([image], config)
    prepared = fnmodels.prepare(config, patches, positions=positions, segment_ids=segment_ids)
    params = tree.map(Tensor.double, test_vision._params(name))
    names = fnmodels.family_of(config).hf_names(config)

    def run() -> Tensor:
        return test_vision._theirs(name, image, model)[0][None]

    return Stack(config.model_type, model, layers, run, config, params, prepared, names)


def whole(kind: str) -> tuple[Any, Any, Any, Any]:
    """(Config, parameters, model, its base) of T5 or Whisper."""
    if kind == "t5":
        model = doubled(copy.deepcopy(test_pairs.reference("t5")))
        return test_pairs.config_of("t5"), test_pairs.params_of("t5"), model, model
    model = doubled(copy.deepcopy(test_whisper.reference()))
    return test_whisper.CONFIG, test_whisper.weights(), model, model.model


def stack(kind: str, part: str) -> Stack:
    """The encoder, or the decoder with states of ten tokens that are given."""
    config, params, model, base = whole(kind)
    own, module = getattr(config, part), getattr(base, part)
    tokens = torch.randint(61, (1, 7), generator=torch.Generator().manual_seed(0))
    mel = test_whisper.clips()[0].double()  # of ten tokens
    frames, positions, sources = (
        fnmodels.inputs.frame_rows([mel], config) if kind == "whisper" else (tokens, None, None)
    )
    if part == "encoder":
        prepared = fnmodels.prepare(own, frames, positions=positions, segment_ids=sources)
        given: dict[str, Any] = {"input_ids": tokens} if kind == "t5" else {"input_features": mel[None]}
    else:
        memory = torch.randn(1, 10, own.hidden_size, generator=torch.Generator().manual_seed(1)).double()
        source = torch.zeros(1, 10, dtype=torch.long) if kind == "t5" else frames
        inputs, masks, tables = fnmodels.prepare_pair(config, source, tokens)
        seen = {"memory": memory, "memory_mask": masks["cross"]}
        prepared = inputs["decoder"] | seen, masks["decoder"], tables["decoder"]
        given = {"input_ids": tokens, "encoder_hidden_states": memory, "use_cache": False}
    names = fnmodels.family_of(config).hf_names(config)
    return Stack(
        kind,
        model,
        module.block if kind == "t5" else module.layers,
        lambda: module(**given).last_hidden_state,
        own,
        tree.map(Tensor.double, fnmodels.stack_params(params, part)),
        prepared,
        {path.removeprefix(f"{part}."): name for path, name in names.items() if path.startswith(part)},
    )


def sites_of(case: Stack) -> dict[str, Site]:
    """{tap: site} of a stack's layers and ends."""
    layers = case.layers
    found: dict[str, Site] = {"embed": Site(layers[0], "input"), "hidden": Site(layers[-1], "output")}
    for index, layer in enumerate(layers):
        paths = [path.replace("-1", str(len(layer.layer) - 1)) if "-1" in path else path for path in LAYERS[case.kind]]
        attention, added, activation, down, mlp = (layer.get_submodule(path) for path in paths[:5])
        here = {tap: Site(attention, tap) for tap in ATTENTION} | {"input": Site(layer, "input")}
        here |= {"attention": Site(added, "output"), "mlp.pre": Site(activation, "input")}
        here |= {"mlp.neurons": Site(down, "input"), "mlp": Site(mlp, "output"), "output": Site(layer, "output")}
        if len(paths) > 5 and any(path == paths[5] for path, _ in layer.named_modules()):
            cross = layer.get_submodule(paths[5])
            here |= {f"{CROSS}.{tap[-1]}": Site(cross, tap) for tap in ATTENTION if len(tap) == len("attention.q")}
            here[CROSS] = Site(cross, "output")
        found |= {f"layers.{index}.{tap}": site for tap, site in here.items()}
    for path, stored in case.names.items():
        if isinstance(stored, str) and path.endswith("norm"):
            index = path.split(".")[1] if path.startswith("layers.") else ""
            owner = layers[int(index)] if index else case.model
            name = stored.partition(f".{index}.")[2] if index else stored
            inner = [place for place, _ in owner.named_modules() if place and name.rpartition(".")[0].endswith(place)]
            if inner:
                found["final.norm" if path == "norm" else path] = Site(
                    owner.get_submodule(max(inner, key=len)), "output"
                )
    return found


CASES: dict[str, Callable[[], Stack]] = {
    name: functools.partial(vision, name)
    for kind, name in test_vision.FIRST.items()
    if kind != "siglip2_vision_model"  # has SigLIP's layers, and resizes its table in float32
}
CASES |= {
    f"{kind}-{part}": functools.partial(stack, kind, part)
    for kind in ("t5", "whisper")
    for part in ("encoder", "decoder")
}


@pytest.mark.parametrize("name", CASES)
def test_edits_equal_hooks(name: str) -> None:
    check_edits(CASES[name]())


@pytest.mark.parametrize("name", [CROSS, f"{CROSS}_layernorm", *(f"{CROSS}.{end}" for end in "qkvz")])
def test_a_wrong_tap_of_cross_attention_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edits get another value than the one which the model goes on with."""
    inner = Context.tap

    def tap(ctx: Context, tapped: str, value: Tensor) -> Tensor:
        return inner(ctx, tapped, 1.01 * value) / 1.01 if tapped == name else inner(ctx, tapped, value)

    monkeypatch.setattr(Context, "tap", tap)
    with pytest.raises(AssertionError, match=f"{name}', 'value'"):
        check_edits(CASES["t5-decoder"]())


def check_edits(case: Stack) -> None:
    """All taps are edited at once. Equal are each value, the result, and the gradients by each value."""
    listed, found = fnmodels.tap_names(case.config), sites_of(case)
    others = ("attention.q",) if case.kind == "whisper" else ()  # scaled there, and in the attention function here
    sites = {tap: found[tap] for tap in listed if tap in found and not tap.endswith(others)}
    missing = {tap.split(".", 2)[-1] for tap in listed if tap not in found and not tap.endswith(".scale")}
    assert missing == {"middle"}, "a sum that no module of transformers has"
    ours = {tap: Edit() for tap in sites}
    how: dict[str, Any] = {"config": case.config, "kernel": "math", "edits": dict(ours)}
    if "memory" in case.prepared[0]:  # a decoder's base ends with its norm
        out = fnmodels.forward(case.params, *case.prepared, **how, taps=("final.norm",))[1]["final.norm"]
    else:
        out = fnmodels.forward(case.params, *case.prepared, **how)
    theirs = {tap: Edit() for tap in sites}
    with contextlib.ExitStack() as scope:
        for tap, site in sites.items():
            scope.enter_context(site.edited(theirs[tap]))
        scope.enter_context(KeepsDoubles())
        wanted = case.run()
    assert near(out, wanted), float((out - wanted).abs().max())
    got = by_values(out, ours)
    for tap, (value, gradient) in by_values(wanted, theirs).items():
        assert same(tap, got[tap][0], value, sites[tap]), (tap, "value")
        assert same(tap, got[tap][1], gradient, sites[tap]), (tap, "gradient")
