"""Writing of adapters in PEFT's format and under its names."""

import functools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.errors import UnsupportedError
from fnmodels.files import write_new
from fnmodels.models.common.family import DecoderConfig, field_of, traits_of
from fnmodels.models.common.registry import family_of, stack_configs
from fnmodels.tree import Tree
from params.checkpoint.transaction import ADAPTERS, saving
from params.io.safetensors_file import LazyTensor, write_tensors
from params.sharding import sharding_of

from .adapt import adapters
from .adapter_config import CONFIG
from .leaves import is_embedding, nodes_of
from .nodes import Lora, TwoUses
from .peft_load import WEIGHTS
from .peft_modules import INNER, PREFIX, Factors, Layout, Place, joined, layout_of, whole

_TASKS_OF_LABELS = {"classification": "SEQ_CLS", "tokens": "TOKEN_CLS"}
# PEFT takes modules of these names for experts, which it stacks, where a model has any: it must adapt their parameter.
_EXPERTS = (".gate_proj", ".up_proj", ".down_proj", ".w1", ".w2", ".w3")
_Uses = dict[str, dict[str, str]]  # {path of a parameter, or of a tied head: {what: path of a tensor in the tree}}


@dataclass(frozen=True)
class _Adapted:
    """A module with an adapter. parameter: its name in the module, where PEFT adapts a parameter; "": the weight.

    name: as PEFT's config names it. key: as its file begins the names of tensors.
    """

    name: str
    key: str
    parameter: str
    places: list[Place]
    adapted: list[Place]


def export_adapters(
    config: DecoderConfig, trained: Tree, fetch: Callable[[str], Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The adapters of a tree under PEFT's names, by transformers' modules.

    Fused weights and stacked experts have one adapter for all that they hold, of the sum of the ranks.

    Args:
        config: The model's config.
        trained: A tree of `adapters`. Tensors share memory with it where nothing is fused.
        fetch: Returns the full tensor of a path of tree.flatten(trained), as in `params.export`; None: the leaves.

    Returns:
        An iterator of (name in PEFT's file, tensor).

    Raises:
        UnsupportedError: At once, where PEFT has no such adapter.
    """
    flat: dict[str, Tensor] = tree.flatten(trained)
    layout = layout_of(config)
    uses = _uses(layout, flat)
    modules = _adapted(layout, uses)
    full = _full(layout, uses, modules)

    def value(path: str) -> Tensor:
        return (flat[path] if fetch is None else fetch(path)).detach()

    def named() -> Iterator[tuple[str, Tensor]]:
        for module in modules:
            yield from _tensors(layout, module, uses, value)
        for name, places in full.items():
            kind = "base" if INNER in name else "value"
            values = {place.path: value(uses[place.path].get(kind) or uses[place.path]["value"]) for place in places}
            yield PREFIX + name, whole(places, values)

    return named()


def _uses(layout: Layout, flat: Iterable[str]) -> _Uses:
    """The trained tensors of each parameter, by their paths in the tree of adapters."""
    uses: _Uses = {}
    for path in flat:
        owner, _, kind = path.rpartition(".")
        kind = "base" if path.endswith(".weight.value") else kind
        owner = owner.removesuffix(".weight") if kind == "base" else owner
        if owner in layout.leaves:
            owners = [owner] if layout.tied is None or owner != layout.tied[0] else [*layout.tied]
        else:  # one use of a tied embedding
            use = owner.rpartition(".")[2]
            owners = [] if layout.tied is None else [layout.tied[use == "head"]]
        for owner_path in owners:
            uses.setdefault(owner_path, {})[kind] = path
    return uses


def _adapted(layout: Layout, uses: _Uses) -> list[_Adapted]:
    """The modules with adapters, in the order of the model's parameters; UnsupportedError where PEFT has none."""
    have = {path for path, parts in uses.items() if "a" in parts}
    dora = {path for path in have if "magnitude" in uses[path]}
    taken = _EXPERTS if any(name.endswith("experts") for name in layout.memory.stacked) and not dora else ()
    modules = []
    for name, places in layout.memory.linear.items():
        is_router = places[0].path.endswith(".router") and not dora  # mostly no Linear in transformers
        if name.endswith(taken) or is_router:
            modules.append(_of_module(f"{name}.weight", places, have, key=name, parameter="weight"))
        else:
            modules.append(_of_module(name, places, have))
    for container, parameters in layout.memory.stacked.items():
        adapted = [name for name, places in parameters.items() if any(p.path in have - dora for p in places)]
        for depth, name in enumerate(reversed(adapted)):  # the first is the innermost module
            key = container + INNER * depth
            modules.append(_of_module(f"{container}.{name}", parameters[name], have - dora, key=key, parameter=name))
    # stacked weights have no DoRA in PEFT, so each expert is a module, as in files
    separate = [(name, places) for name, places in layout.files.linear.items() if places[0].expert is not None]
    modules += [_of_module(name, places, dora) for name, places in separate]
    chosen = [module for module in modules if module.adapted]
    named = {place.path for module in chosen for place in module.adapted}
    partial = [m for m in chosen if len(m.adapted) < len(m.places) and m.adapted[0].path in dora]
    missing = sorted(have - named) + [module.adapted[0].path for module in partial]
    if missing:
        raise UnsupportedError(f"{missing[0]} has an adapter that PEFT's format has no place for.")
    return chosen


def _of_module(name: str, places: list[Place], have: set[str], key: str = "", parameter: str = "") -> _Adapted:
    return _Adapted(name, key or name, parameter, places, [place for place in places if place.path in have])


def _tensors(
    layout: Layout, module: _Adapted, uses: _Uses, value: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one module's adapter."""
    parts = {}
    for place in module.adapted:
        tensors = {what: value(path) for what, path in uses[place.path].items() if what in ("a", "b", "magnitude")}
        parts[place.path] = Factors(**{n: t if place.expert is None else t[place.expert] for n, t in tensors.items()})
    factors = joined(module.places, parts)
    a, b, key = factors.a, factors.b, PREFIX + module.key
    if is_embedding(module.places[0].path):
        yield f"{key}.lora_embedding_A", b.T
        yield f"{key}.lora_embedding_B", a.T
        return
    if module.parameter and layout.a_reads_out(module.places[0]):
        a, b = b.mT, a.mT
    if a.ndim == 3:  # stacked experts
        a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1, 2)
    yield f"{key}.lora_A.weight", a
    yield f"{key}.lora_B.weight", b
    if factors.magnitude is not None:
        yield f"{key}.lora_magnitude_vector.weight", factors.magnitude


def _full(layout: Layout, uses: _Uses, modules: list[_Adapted]) -> dict[str, list[Place]]:
    """{name in PEFT's file: what it holds} of the parameters trained in full."""
    trained = {path for path, parts in uses.items() if "value" in parts or "base" in parts}
    adapted = {module.key for module in modules}
    modules_in_full: dict[str, list[Place]] = {}
    for name, places in layout.memory.tensors.items():
        trained_places = [place for place in places if place.path in trained]
        if trained_places and len(trained_places) < len(places):
            other = next(place.path for place in places if place.path not in trained)
            raise UnsupportedError(
                f"{trained_places[0].path} is trained in full, and PEFT saves {other} with it: unfreeze both."
            )
        module, _, last = name.rpartition(".")
        if trained_places:
            modules_in_full[f"{module}{INNER}.{last}" if module in adapted else name] = places
    if lost := trained - {place.path for places in modules_in_full.values() for place in places}:
        raise UnsupportedError(f"{min(lost)} is trained in full, and PEFT has no module of it alone.")
    return modules_in_full


def peft_config(config: DecoderConfig, params: Tree, *, base: str = "") -> dict[str, Any]:
    """The values of PEFT's adapter_config.json for a tree with adapters.

    Args:
        config: The model's config.
        params: The parameters with adapters, of all layers.
        base: PEFT's `base_model_name_or_path`.

    Returns:
        The fields by name.

    Raises:
        ValueError: There are no adapters, some of both forms, or several scales where PEFT has one adapter.
        UnsupportedError: PEFT has no such adapter.
    """
    nodes = nodes_of(params)
    if not nodes:
        raise ValueError("params hold no adapters; params.lora.add makes them.")
    layout = layout_of(config)
    uses = _uses(layout, tree.flatten(adapters(params)))
    modules = _adapted(layout, uses)
    saved = [name for name in _full(layout, uses, modules) if INNER not in name]
    forms = _loras(layout, nodes)
    usual = Counter((node.a.shape[-2], node.scale) for node in forms.values())
    rank, scale = usual.most_common(1)[0][0] if usual else (1, 1.0)
    if len(kinds := {node.magnitude is not None for node in forms.values()}) > 1:
        raise ValueError("Some adapters are DoRA and others are not; one file holds one form.")
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for module in modules:
        loras = [forms[place.path] for place in module.adapted]
        if len({node.scale for node in loras}) > 1:
            raise ValueError(f"The adapters in {module.name} have several scales, and PEFT has one adapter there.")
        name, total = f"^{re.escape(module.name)}", sum(node.a.shape[-2] for node in loras)
        ranks |= {name: total} if total != rank else {}
        alphas |= {name: _number(loras[0].scale * total)} if loras[0].scale * total != scale * rank else {}
    heads = {_whole_module(layout, name, saved) for name in saved if not _is_bias_alone(name, saved)}
    return {
        "peft_type": "LORA",
        "task_type": _task(config, heads),
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": _number(scale * rank),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "target_modules": sorted(module.name for module in modules if not module.parameter),
        "target_parameters": sorted(module.name for module in modules if module.parameter) or None,
        "modules_to_save": sorted(heads) or None,
        "use_dora": kinds == {True},
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _loras(layout: Layout, nodes: Mapping[str, Any]) -> dict[str, Lora]:
    """{path: `Lora`}, of a tied head by the path of one of its own."""
    loras: dict[str, Lora] = {}
    for path, node in nodes.items():
        both = layout.tied if layout.tied is not None and path == layout.tied[0] else (path,)
        pair = (node.embed, node.head) if isinstance(node, TwoUses) else (node,) * len(both)
        loras |= {use_path: lora for use_path, lora in zip(both, pair, strict=True) if isinstance(lora, Lora)}
    return loras


def _is_bias_alone(name: str, saved: list[str]) -> bool:
    """Whether a bias is trained without the weight of its module, which PEFT saves without the module."""
    return name.endswith(".bias") and f"{name.removesuffix('.bias')}.weight" not in saved


def _whole_module(layout: Layout, name: str, saved: list[str]) -> str:
    """The outermost module around a tensor of which all are saved: PEFT expects a head as one."""
    module = name.rpartition(".")[0]
    while parent := module.rpartition(".")[0]:
        if any(other.startswith(f"{parent}.") and other not in saved for other in layout.memory.tensors):
            break
        module = parent
    return module


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _task(config: DecoderConfig, heads: set[str]) -> str | None:
    """PEFT's task_type; of a model with labels only where its head is saved, which PEFT expects of that task."""
    family, kind = family_of(config), str(field_of(config, "head"))
    traits = traits_of(family)
    if "decoder" in stack_configs(config):
        return "SEQ_2_SEQ_LM"
    reads_images = hasattr(family, "with_images")
    if not reads_images and (hasattr(family, "towers") or traits.inputs != "tokens"):
        return None
    if kind in _TASKS_OF_LABELS:
        return _TASKS_OF_LABELS[kind] if heads else None
    return "CAUSAL_LM" if kind == "lm" and traits.causal else None


def save_adapters(path: str | os.PathLike[str], config: DecoderConfig, params: Tree, *, base: str = "") -> None:
    """Writes the adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

    Modules are named as transformers has them in memory. Fused weights (phi3's qkv_proj) and stacked experts
    (target_parameters) have one adapter for all that they hold. rsLoRA is saved as plain LoRA of the same scale, PiSSA
    and OLoRA as LoRA of twice the rank, and what `unfreeze` named as modules_to_save. All adapters or none are DoRA;
    with it, each expert is a module of its own.

    As with `save_pretrained`, a kill leaves the older adapters, the new ones, or a folder that cannot be loaded until
    `recover` or the next save finishes the renames; fnmodels_adapter_manifest.json has the checksums for `verify`.

    Args:
        path: The folder, made if needed.
        config: The model's config.
        params: The parameters with adapters.
        base: PEFT's `base_model_name_or_path`.

    Raises:
        ValueError: There are no adapters, DTensors, or adapters of both forms.
        UnsupportedError: PEFT has no such adapter.
    """
    trained = adapters(params)
    sharded = [path for path, leaf in tree.flatten(trained).items() if sharding_of(leaf) is not None]
    if sharded:
        where = sharded[0].rpartition(".")[0]
        raise ValueError(f"{where} is a DTensor; only plain tensors can be saved (`full_tensor` makes one).")
    values = peft_config(config, params, base=base)
    tensors = {
        name: LazyTensor(value.dtype, tuple(value.shape), functools.partial(_itself, value))
        for name, value in export_adapters(config, trained)
    }
    with saving(Path(path), ADAPTERS) as temporary:
        write_tensors(temporary / WEIGHTS, tensors)
        write_new(temporary / CONFIG, json.dumps(values, indent=2, sort_keys=True) + "\n")


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value
