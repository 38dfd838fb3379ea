"""Taps and edits equal hooks of transformers in vision towers, T5 and Whisper; in float64, to 1e-6: see test_edits."""

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
from fnmodels import tree
from tests.fnmodels.models import test_t5, test_vision, test_whisper
from tests.parity.test_edits import Edit, by_values, doubled, near, same
from tests.support.reference_taps import ATTENTION, KeepsDoubles, Site

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


def sites_of(layers: Any, model: Any, config: Any, names: dict[str, Any]) -> dict[str, Site]:
    """{tap: site} of a stack's layers and ends. names: {path of a parameter in the stack: its name on disk}."""
    found: dict[str, Site] = {"embed": Site(layers[0], "input"), "hidden": Site(layers[-1], "output")}
    for index, layer in enumerate(layers):
        paths = [path.replace("-1", str(len(layer.layer) - 1)) if "-1" in path else path for path in LAYERS[config]]
        attention, added, activation, down, mlp = (layer.get_submodule(path) for path in paths[:5])
        here = {tap: Site(attention, tap) for tap in ATTENTION} | {"input": Site(layer, "input")}
        here |= {"attention": Site(added, "output"), "mlp.pre": Site(activation, "input")}
        here |= {"mlp.neurons": Site(down, "input"), "mlp": Site(mlp, "output"), "output": Site(layer, "output")}
        if len(paths) > 5 and any(path == paths[5] for path, _ in layer.named_modules()):
            cross = layer.get_submodule(paths[5])
            here |= {f"{CROSS}.{tap[-1]}": Site(cross, tap) for tap in ATTENTION if len(tap) == len("attention.q")}
            here[CROSS] = Site(cross, "output")
        found |= {f"layers.{index}.{tap}": site for tap, site in here.items()}
    for path, stored in names.items():
        if not isinstance(stored, str) or not path.endswith("norm"):
            continue
        _, _, own = path.partition("layers.")
        index, _, _ = own.partition(".")
        local = stored.rpartition(".")[0].partition(f".{index}.")[2] if own else stored.rpartition(".")[0]
        places = [name for name, _ in (layers[int(index)] if own else model).named_modules() if name]
        owners = [name for name in places if local.endswith(name)]
        if owners:
            place = (layers[int(index)] if own else model).get_submodule(max(owners, key=len))
            found["final.norm" if path == "norm" else path] = Site(place, "output")
    return found


@functools.cache
def vision(name: str) -> tuple[Any, ...]:
    """(model type, model, its run, layers, config, parameters, prepared inputs, names) for one image."""
    config, image = test_vision._config(name), test_vision._images()[1].double()
    model = doubled(copy.deepcopy(test_vision._reference(name)))
    layers = max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)
    patches, positions, segment_ids = fnmodels.patch_rows([image], config)
    prepared = fnmodels.prepare(config, patches, positions=positions, segment_ids=segment_ids)
    names = fnmodels.family_of(config).hf_names(config)
    wide = tree.map(Tensor.double, test_vision._params(name))
    return (
        config.model_type,
        model,
        lambda: test_vision._theirs(name, image, model)[0][None],
        layers,
        config,
        wide,
        prepared,
        names,
    )


def stack(kind: str, part: str) -> tuple[Any, ...]:
    """The same of the encoder, or of the decoder on states that are given."""
    module: Any = {"t5": test_t5, "whisper": test_whisper}[kind]
    given = ("t5",) if kind == "t5" else ()
    whole = module.config_of("t5") if kind == "t5" else module.CONFIG
    config = getattr(whole, part)
    model = doubled(copy.deepcopy(module.reference(*given)))
    params = module.params_of("t5") if kind == "t5" else module.weights()
    params = tree.map(Tensor.double, fnmodels.stack_params(params, part))
    names = {
        path.removeprefix(f"{part}."): name
        for path, name in fnmodels.family_of(whole).hf_names(whole).items()
        if path.startswith(part)
    }
    base = getattr(model if kind == "t5" else model.model, part)
    tokens = torch.randint(61, (1, 7), generator=torch.Generator().manual_seed(0))
    memory = torch.randn(1, 10, config.hidden_size, generator=torch.Generator().manual_seed(1)).double()
    if part == "encoder" and kind == "whisper":
        mel = test_whisper.clips()[0].double()
        frames, positions, sources = fnmodels.frame_rows([mel], whole)
        prepared = fnmodels.prepare(config, frames, positions=positions, segment_ids=sources)
        return kind, model, lambda: base(mel[None]).last_hidden_state, base.layers, config, params, prepared, names
    if part == "encoder":
        prepared = fnmodels.prepare(config, tokens)
        return (
            kind,
            model,
            lambda: base(input_ids=tokens).last_hidden_state,
            base.block,
            config,
            params,
            prepared,
            names,
        )
    source = tokens if kind == "t5" else fnmodels.frame_rows([test_whisper.clips()[0].double()], whole)[0]
    sources = torch.zeros(1, 10, dtype=torch.long) if kind == "t5" else source
    pair = [part_["decoder"] for part_ in fnmodels.prepare_pair(whole, sources, tokens)]
    cross = fnmodels.prepare_pair(whole, sources, tokens)[1]["cross"]
    inputs = {**pair[0], "memory": memory, "memory_mask": cross}

    def run() -> Tensor:
        out: Tensor = base(input_ids=tokens, encoder_hidden_states=memory, use_cache=False).last_hidden_state
        return out

    return kind, model, run, base.block if kind == "t5" else base.layers, config, params, (inputs, *pair[1:]), names


CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
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
    kind, model, run, layers, config, params, prepared, names = CASES[name]()
    listed = fnmodels.tap_names(config)
    found = sites_of(layers, model, kind, names)
    others = ("attention.q",) if kind == "whisper" else ()  # scaled there, and in the attention function here
    sites = {tap: found[tap] for tap in listed if tap in found and not tap.endswith(others)}
    missing = {tap.split(".", 2)[-1] for tap in listed if tap not in found and not tap.endswith(".scale")}
    assert missing == {"middle"}, "a sum that no module of transformers has"
    ours = {tap: Edit() for tap in sites}
    how: dict[str, Any] = {"config": config, "kernel": "math", "edits": dict(ours)}
    if "memory" in prepared[0]:  # a decoder's base ends with its norm
        out = fnmodels.forward(params, *prepared, **how, taps=("final.norm",))[1]["final.norm"]
    else:
        out = fnmodels.forward(params, *prepared, **how)
    theirs = {tap: Edit() for tap in sites}
    with contextlib.ExitStack() as scope:
        for tap, site in sites.items():
            scope.enter_context(site.edited(theirs[tap]))
        scope.enter_context(KeepsDoubles())
        wanted = run()
    assert near(out, wanted), float((out - wanted).abs().max())
    got = by_values(out, ours)
    for tap, (value, gradient) in by_values(wanted, theirs).items():
        assert same(tap, got[tap][0], value, sites[tap]), (tap, "value")
        assert same(tap, got[tap][1], gradient, sites[tap]), (tap, "gradient")
