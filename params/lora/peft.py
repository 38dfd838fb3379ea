"""Adapters as files and names of PEFT, both ways."""

import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.errors import ConfigError, MismatchError, UnsupportedError, memory_for
from fnmodels.files import write_new
from fnmodels.models.common.config_json import shown
from fnmodels.models.common.family import DecoderConfig
from fnmodels.models.common.registry import family_of, hf_names
from fnmodels.models.common.spec import Leaf
from fnmodels.models.common.storage import Stack, Stored
from fnmodels.tree import Tree
from params.checkpoint.shard_index import as_lines
from params.checkpoint.transaction import ADAPTERS, saving
from params.io.files import plain_file, read_json
from params.io.safetensors_file import (
    LazyTensor,
    check_floating,
    map_file,
    mapped_tensor,
    open_tensors,
    write_tensors,
)
from params.sharding import sharding_of

from .adapt import adapters
from .leaves import adapter_leaves, initial_magnitude, map_leaves, nodes_of, on_same_mesh, takes_adapter
from .nodes import Lora

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAGNITUDE = "magnitude_vector.weight"
_HIGHEST = 1 << 24  # of ranks and scales: far above all that exist, and exact in every float
_PREFIX = "base_model.model."
_ENDINGS = {"a": "A.weight", "b": "B.weight", "magnitude": MAGNITUDE}


def export_adapters(
    config: DecoderConfig, trained: Tree, fetch: Callable[[str], Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(name in PEFT's file, tensor) of the adapters in `trained`, a tree from `adapters`; each expert has its own.

    Tensors share memory with `trained`. fetch: as in `params.export`, by the paths of tree.flatten(trained).
    UnsupportedError, at once, where a weight is a slice of a fused tensor on disk, for which PEFT has no adapter.
    """
    flat: dict[str, Tensor] = tree.flatten(trained)
    modules = _modules(config, dict.fromkeys(path.rpartition(".")[0] for path in flat))

    def named() -> Iterator[tuple[str, Tensor]]:
        for path, leaf in flat.items():
            where, _, part = path.rpartition(".")
            value = (leaf if fetch is None else fetch(path)).detach()
            stacked = flat[f"{where}.a"].ndim == 3  # of experts
            for module, one in zip(modules[where], value if stacked else [value], strict=True):
                yield f"{_PREFIX}{module}.lora_{_ENDINGS[part]}", one

    return named()


def peft_config(config: DecoderConfig, params: Tree, *, base: str = "") -> dict[str, Any]:
    """The values of PEFT's adapter_config.json for the adapters in `params`, of all layers. Errors: `save_adapters`."""
    adapters = nodes_of(params)
    if not adapters:
        raise ValueError("params hold no adapters; params.lora.add makes them.")
    forms = {(node.a.shape[-2], node.scale, node.magnitude is not None) for node in adapters.values()}
    if len(forms) > 1:
        raise ValueError(f"The adapters have several (rank, scale, is DoRA), {sorted(forms)}; one file holds one.")
    rank, scale, dora = forms.pop()
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if (alpha := scale * rank) == int(alpha) else alpha,
        "target_modules": sorted(itertools.chain(*_modules(config, adapters).values())),
        "use_dora": dora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def save_adapters(path: str | os.PathLike[str], config: DecoderConfig, params: Tree, *, base: str = "") -> None:
    """Write the adapters into the folder `path` in PEFT's format: adapter_config.json, adapter_model.safetensors.

    base: PEFT's `base_model_name_or_path`. All adapters must share rank and scale, and all or none be DoRA, else
    ValueError. rsLoRA is saved as plain LoRA of the same scale. Each expert has an adapter of its own on disk.
    UnsupportedError where a weight is a slice of a fused tensor on disk, for which PEFT has no adapter.

    As with `save_pretrained`, a kill leaves the older adapters, the new ones, or a folder that cannot be loaded until
    `recover` or the next save finishes the renames; fnmodels_adapter_manifest.json has the checksums for `verify`.
    """
    sharded = next((path for path, node in nodes_of(params).items() if sharding_of(node.a) is not None), None)
    if sharded is not None:
        raise ValueError(f"{sharded} is a DTensor; only plain tensors can be saved (`full_tensor` makes one).")
    values = peft_config(config, params, base=base)
    tensors = {
        name: LazyTensor(value.dtype, tuple(value.shape), functools.partial(_itself, value))
        for name, value in export_adapters(config, adapters(params))
    }
    with saving(Path(path), ADAPTERS) as temporary:
        write_tensors(temporary / WEIGHTS, tensors)
        write_new(temporary / CONFIG, json.dumps(values, indent=2, sort_keys=True) + "\n")


def load_adapters(path: str | os.PathLike[str], config: DecoderConfig, params: Tree) -> Tree:
    """`params` with the adapters of a folder in PEFT's format: LoRA, rsLoRA or DoRA on linear weights of this model.

    Experts have an adapter each, as `save_adapters` writes them. ConfigError or UnsupportedError for a config of
    another form, and for tensors that are no floats; MismatchError names every tensor that is missing, unexpected or
    mis-shaped.
    """
    folder = Path(path)
    rank, scale, dora = _read_config(folder / CONFIG)
    with memory_for(folder), ExitStack() as stack:
        file = open_tensors(plain_file(folder, WEIGHTS), stack)
        check_floating(file)
        mapping = map_file(file)
        found = {name: mapped_tensor(mapping, entry).clone() for name, entry in file.entries.items()}
    leaves = {p: leaf for p, leaf in tree.flatten(family_of(config).spec(config)).items() if takes_adapter(p, leaf)}
    # Not strict: PEFT has no adapters for slices of fused tensors, so one in a file is reported as unexpected below.
    names = _modules(config, leaves, strict=False)
    paths = {module: where for where, modules in names.items() for module in modules}
    faults: list[str] = []
    parts: dict[str, dict[str, Tensor]] = {}  # by module: {ending: tensor}
    for name, value in found.items():
        module, _, ending = name.removeprefix(_PREFIX).rpartition(".lora_")
        ending = MAGNITUDE if ending == MAGNITUDE.removesuffix(".weight") else ending  # of older releases of PEFT
        where = paths.get(module)
        shapes = {} if where is None else _shapes(leaves[where], rank, dora)
        if not name.startswith(_PREFIX) or ending not in shapes:
            faults.append(f"{name!r}: unexpected, the model has no such linear weight")
            continue
        if tuple(value.shape) != shapes[ending]:
            faults.append(f"{name}: expected {list(shapes[ending])}, found {list(value.shape)}")
        parts.setdefault(module, {})[ending] = value
    for where in dict.fromkeys(paths[module] for module in parts):
        wanted = [(module, ending) for module in names[where] for ending in _shapes(leaves[where], rank, dora)]
        missing = [f"{_PREFIX}{module}.lora_{end}" for module, end in wanted if end not in parts.get(module, {})]
        faults += [f"{name}: missing" for name in missing]
    if faults:
        raise MismatchError(f"{folder / WEIGHTS}: {len(faults)} adapters do not fit the model:{as_lines(faults)}")

    def adapted(where: str, weight: Any) -> Any:
        if not names.get(where) or names[where][0] not in parts:
            return weight
        own = [parts[module] for module in names[where]]

        def whole(end: str) -> Tensor:
            return own[0][end] if weight.ndim == 2 else torch.stack([one[end] for one in own])

        a, b = whole("A.weight"), whole("B.weight")
        make = (lambda box, x=x: x if box is None else x[box].clone() for x in (a, b))
        node = Lora(weight, *on_same_mesh(weight, adapter_leaves(leaves[where], rank), *make), scale)
        if not dora:
            return node
        initial_magnitude(where, node)  # refuses what has none
        return replace(node, magnitude=whole(MAGNITUDE).to(weight))

    return map_leaves(adapted, params)


def _itself(value: Tensor) -> Tensor:
    return value


def _shapes(leaf: Leaf, rank: int, dora: bool) -> dict[str, tuple[int, ...]]:
    """{ending: shape} of one module's adapter of the weight `leaf`."""
    out_size, in_size = leaf.shape[-2:]
    magnitude: dict[str, tuple[int, ...]] = {MAGNITUDE: (out_size,)} if dora else {}
    return {"A.weight": (rank, in_size), "B.weight": (out_size, rank), **magnitude}


def _read_config(file: Path) -> tuple[int, float, bool]:
    """(rank, scale, is DoRA) of an adapter_config.json of LoRA, rsLoRA or DoRA; errors for anything else."""
    values: Any = read_json(file)
    if not isinstance(values, dict) or values.get("peft_type") != "LORA":
        raise UnsupportedError(f"{file}: it must be a JSON object with the peft_type LORA.")
    rank: Any = values.get("r")
    alpha: Any = values.get("lora_alpha")
    numbers = type(rank) is int and isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
    if not numbers or not 1 <= rank <= _HIGHEST or not -_HIGHEST <= alpha <= _HIGHEST:  # also NaN
        raise ConfigError(
            f"{file}: r is {shown(rank)} and lora_alpha {shown(alpha)}; they must be a whole number and a number."
        )
    rslora, dora = (values.get(name) or False for name in ("use_rslora", "use_dora"))
    if not isinstance(rslora, bool) or not isinstance(dora, bool):
        raise ConfigError(f"{file}: use_rslora is {rslora!r} and use_dora {dora!r}; they must be true or false.")
    plain = {"bias": "none", "fan_in_fan_out": False}
    for name, wanted in plain.items():
        if values.get(name, wanted) not in (wanted, None):
            raise UnsupportedError(f"{file}: {name} is {values[name]!r}; only {wanted!r} can be read.")
    for name in ("rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication", "target_parameters"):
        if values.get(name):
            raise UnsupportedError(f"{file}: {name} is {values[name]!r}; adapters with it cannot be read.")
    return rank, alpha / (math.sqrt(rank) if rslora else rank), dora


def _modules(config: DecoderConfig, paths: Iterable[str], *, strict: bool = True) -> dict[str, list[str]]:
    """{path: the modules whose weights it is, one or one per expert}, from the names on disk."""
    names: dict[str, Stored] = hf_names(config)
    found = {}
    for path in paths:
        stored = names[path]
        tensors = stored.tensors if isinstance(stored, Stack) else (stored,)
        modules = [one.removesuffix(".weight") for one in tensors if isinstance(one, str) and one.endswith(".weight")]
        if len(modules) == len(tensors):
            found[path] = modules
        elif strict:
            raise UnsupportedError(f"{path} is a slice of a larger tensor on disk, for which PEFT has no adapter.")
    return found
