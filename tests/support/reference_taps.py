"""Where models of transformers have the values of our taps: hooks of modules, and their eager attention function.

`sites_of(model, case)` finds them by the names of modules and parameters; `Site.edited(change)` is a scope in which the
model goes on with change(value).
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from torch import Tensor, nn

import fnmodels
from fnmodels.models.common.family import field_of, stored_layers
from params.checkpoint.module_names import module_names
from params.compare.activations import BETAS, sublayers_of
from params.compare.reference import layers_of
from tests.support.cases import Case, sparse_layers, tap_names

Change = Callable[[Tensor], Tensor]
EAGER = "eager_attention_forward"  # a function of each modeling file: (module, q, k, v, mask, **how) -> (z, pattern)
ATTENTION = ("attention.q", "attention.k", "attention.v", "attention.scores", "attention.pattern", "attention.z")
MIXERS = ("self_attn", "attn", "attention", "self_attention", "mixer")
LAST_OF_MIXER = ("o_proj", "dense", "out_proj", "c_proj", "Wo")
MLPS = ("mlp", "mlp_block", "feed_forward", "ffn", "intermediate", "output", "mixer", "shared_mlp")
SPARSE = (*MLPS, "block_sparse_moe", "moe")
SHARED = ("shared_expert", "shared_experts", "shared_mlp")
ROUTERS = ("gate", "gate.wg", "router", "router.gate", "router.layer", "router.proj")
LAST_OF_MLP = ("down_proj", "dense_4h_to_h", "fc2", "fc_out", "c_proj", "Wo", "w2", "lin2", "output_linear")
IN_LAYER = {"activation_fn": "mlp.pre", "fc2": "mlp.neurons"}  # OPT's MLP is no module of its own


@dataclass(frozen=True)
class Site:
    """A value in a model of transformers: an output or input of a module, or one that it computes inside."""

    module: Any
    which: str  # "output", "input", "weights" (the third input of experts), "product" (of F.linear), one of ATTENTION
    factor: float = 1.0  # what the model multiplies the value by right after
    call: int | None = None  # which call of the module in a forward, from 0, where there are several

    @contextlib.contextmanager
    def edited(self, change: Change) -> Iterator[None]:
        if self.which in ATTENTION or self.which == "product":
            with self._attention_edited(change) if self.which in ATTENTION else self._product_edited(change):
                yield
            return

        calls = itertools.count()

        def after(_: Any, args: Any, output: Any) -> Any:
            if self.call not in (None, next(calls)):
                return None
            first = output[0] if isinstance(output, tuple) else output
            first = change(first * self.factor) / self.factor
            return (first, *output[1:]) if isinstance(output, tuple) else first

        def before(_: Any, args: Any, kwargs: Any) -> Any:
            if self.call not in (None, next(calls)):
                return None
            if self.which == "weights":
                return (*args[:2], change(args[2])), kwargs
            if args:
                return (change(args[0]), *args[1:]), kwargs
            return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}

        if self.which == "output":
            handle = self.module.register_forward_hook(after)
        else:
            handle = self.module.register_forward_pre_hook(before, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    @contextlib.contextmanager
    def _product_edited(self, change: Change) -> Iterator[None]:
        """The first product with the module's weight."""
        inner, linear, calls = self.module.forward, nn.functional.linear, itertools.count()

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.call not in (None, next(calls)):
                return inner(*args, **kwargs)

            def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
                found = linear(x, weight, bias)
                own = weight.data_ptr() == self.module.weight.data_ptr()
                return change(found * self.factor) / self.factor if own else found

            with mock.patch.object(nn.functional, "linear", product):
                return inner(*args, **kwargs)

        with mock.patch.object(self.module, "forward", forward):
            yield

    @contextlib.contextmanager
    def _attention_edited(self, change: Change) -> Iterator[None]:
        """Heads are in dimension 2, as in our taps."""
        code = sys.modules[type(self.module).__module__]
        eager, calls = getattr(code, EAGER), itertools.count()

        def attention(module: Any, *given: Any, **how: Any) -> tuple[Tensor, Any]:
            if module is not self.module or self.call not in (None, next(calls)):
                return eager(module, *given, **how)
            *qkv, mask = given if len(given) == 4 else (*given, how.pop("attention_mask"))
            if self.which in ATTENTION[:3]:
                at = ATTENTION.index(self.which)
                qkv[at] = change(qkv[at].transpose(1, 2)).transpose(1, 2)
            with self._weights_edited(change):
                z, pattern = eager(module, *qkv, mask, **how)
            return change(z) if self.which == "attention.z" else z, pattern

        with mock.patch.object(code, EAGER, attention):
            yield

    def _weights_edited(self, change: Change) -> Any:
        """Scores are what the softmax reads, here after the mask; the pattern is what dropout reads."""
        if self.which not in ("attention.scores", "attention.pattern"):
            return contextlib.nullcontext()
        name = "softmax" if self.which == "attention.scores" else "dropout"
        function = getattr(nn.functional, name)

        def changed(x: Tensor, *args: Any, **more: Any) -> Tensor:
            with mock.patch.object(nn.functional, name, function):
                return function(change(x), *args, **more)

        return mock.patch.object(nn.functional, name, changed)


def sites_of(model: Any, case: Case) -> dict[str, Site]:
    """{tap: site} of the first layer of each kind and of the model's ends, in the order of `fnmodels.tap_names`."""
    names, family = tap_names(case.config), fnmodels.family_of(case.config)
    kinds = family.kinds(case.config)
    stored = stored_layers(case.config, kinds)
    layers = layers_of(model)
    loops = bool(field_of(case.config, "passes")) and len(layers) < len(kinds)  # else each pass is a module there
    layers = [layers[i] for i in stored] if loops else layers
    own_embed = bool(field_of(case.config, "passes") or field_of(case.config, "residual_streams"))
    streams = bool(field_of(case.config, "residual_streams"))
    found = {"embed": Site(model.get_input_embeddings(), "output") if own_embed else Site(layers[0], "input")}
    here = [i for i in range(len(kinds)) if kinds[i] not in kinds[:i]]  # others have the same code
    for i in here:
        if hasattr(layers[0], "mlps"):
            inner = _of_half(layers[i // 2], i % 2)
        else:
            inner = _of_layer(model, layers[i], i in sparse_layers(case.config))
        if loops:
            inner = {tap: replace(site, call=stored[:i].count(stored[i])) for tap, site in inner.items()}
        if streams:  # their mean is the taps "input" and "output"
            inner["streams"] = inner["output"]
        found |= {f"layers.{i}.{tap}": site for tap, site in inner.items()}
    modules, stored_names = dict(model.named_modules()), module_names(case.config)
    for tap in names:
        number = int(tap.split(".")[1]) if tap.startswith("layers.") else -1
        again = number >= 0 and stored[number] in stored[:number]  # a later use, by another module there
        path = "norm" if tap == "final.norm" else tap.replace(f"layers.{number}.", f"layers.{stored[number]}.", 1)
        name = None if again else stored_names.get(path)
        if isinstance(name, str) and "norm" in tap and (tap == "final.norm" or number in here):
            owner = name.rpartition(".")[0]
            rest = owner.partition(".")[2]  # where files name the base otherwise
            owners = [m for name, m in modules.items() if name == owner or name.partition(".")[2] == rest != ""]
            if owners:
                found[tap] = Site(owners[0], "output", call=0 if loops else None)  # of the first pass
    if "final.norm" in found:
        found["hidden"] = Site(found["final.norm"].module, "input")
    else:
        found["hidden"] = Site(layers[-1], "output")
    return {tap: found[tap] for tap in names if tap in found}


def _of_half(layer: Any, half: int) -> dict[str, Site]:
    """Of LongCat-Flash, whose layers are two of ours each."""
    attention, mlp = layer.self_attn[half], layer.mlps[half]
    found = {tap: Site(attention, tap) for tap in ATTENTION} | {"attention": Site(attention, "output")}
    found["mlp"] = Site(mlp, "output")
    if half:
        inside = {"mlp.pre": Site(mlp.act_fn, "input"), "mlp.neurons": Site(mlp.down_proj, "input")}
        return found | inside | {"output": Site(layer, "output")}
    found |= {"experts": Site(layer.mlp, "output"), "expert_weights": Site(layer.mlp.experts, "weights")}
    return found | {"input": Site(layer, "input")}


def _of_layer(model: Any, layer: Any, sparse: bool) -> dict[str, Site]:
    found = {"input": Site(layer, "input"), "output": Site(layer, "output")}
    found |= {tap: Site(module, "output", _factor(layer, tap)) for tap, module in sublayers_of(layer)}
    if hasattr(layer, "shared_mlp"):  # the MLP of a dense layer, and in a sparse one a summand of it
        found.pop("mlp", None)
        found["shared_expert" if sparse else "mlp"] = Site(
            layer.shared_mlp, "output", 1.0 if sparse else layer.residual_multiplier
        )
    norms = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "pre_ff_layernorm"}
    found |= {tap: Site(getattr(layer, name), "output") for tap, name in norms.items() if hasattr(layer, name)}
    if hasattr(layer, "post_per_layer_input_norm"):
        found["per_layer"] = Site(layer.post_per_layer_input_norm, "output")
    for path, module in layer.named_modules():
        first, _, last = path.partition(".")
        if _attends(module):
            found |= {tap: Site(module, tap) for tap in ATTENTION}
        elif first in MIXERS and last in LAST_OF_MIXER:
            found.setdefault("attention.z", Site(module, "input"))
        elif path in IN_LAYER:
            found[IN_LAYER[path]] = Site(module, "input")
        elif first in MLPS and (not sparse or hasattr(layer, "experts")) and "." not in last:
            if type(module).__module__ in ("transformers.activations", "torch.nn.modules.activation"):
                found["mlp.pre"] = Site(module, "input")
            elif last == "w1":  # whose activation is a function, not a module
                found["mlp.pre"] = Site(module, "output")
            elif last in LAST_OF_MLP or path == "output.dense":
                found["mlp.neurons"] = Site(module, "input")
        elif sparse and first in SPARSE and last in SHARED and not hasattr(getattr(layer, first), "shared_expert_gate"):
            found["shared_expert"] = Site(module, "output")
        elif sparse and last == "fc2_latent_proj":
            found["experts"] = Site(module, "output")
        elif sparse and path.rpartition(".")[2] == "experts":
            found["expert_weights"] = Site(module, "weights")
            found.setdefault("experts", Site(module, "output"))
        elif sparse and (last in ROUTERS or path in ROUTERS) and hasattr(module, "weight"):
            found["router_logits"] = Site(module, "product", getattr(module, "output_multiplier", 1.0))
    return found


def _factor(layer: Any, tap: str) -> float:
    """What the layer multiplies the output of a sublayer by before it is added."""
    named = {"attention": "attn_out_multiplier", "mamba": "ssm_out_multiplier"}.get(tap, "")
    if tap in BETAS and hasattr(layer, BETAS[tap]):
        return float(getattr(layer, BETAS[tap]))
    return float(getattr(layer, named, getattr(layer, "residual_multiplier", getattr(layer, "residual_scale", 1.0))))


def _attends(module: Any) -> bool:
    """Whether the module calls the attention function of its file."""
    forward = inspect.unwrap(type(module).forward)  # transformers wraps it for names of arguments that it renamed
    return EAGER in forward.__code__.co_names and hasattr(sys.modules[type(module).__module__], EAGER)
