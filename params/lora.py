"""Low-rank adapters (LoRA, arXiv 2106.09685) as a rewrite of the parameter tree; models need no change.

    params = P.lora.add(config, params, rank=8, targets=("q_proj", "v_proj"), seed=0)
    optimizer = train.adamw(1e-4, spec=P.lora.spec(config, params))     # trains the adapters only
    P.lora.save_adapters("adapters", config, params)                    # in PEFT's format
    params = P.lora.merge(params)                                       # plain weights again

A target becomes a node `Lora` of three leaves, at path.weight, path.a and path.b. Passed to `F.linear` as the weight,
it computes x W^T + scale (x A^T) B^T, so that the gradient of the full weight is never computed.

Where the weight is a DTensor, so is its adapter: b is sharded like the weight's rows and a like its columns, so that
the shards of both make up the shard of the weight, and nothing here communicates.
"""

import fnmatch
import json
import math
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels import tree
from fnmodels.errors import ConfigError, MismatchError, UnsupportedError
from fnmodels.models.common.registry import DecoderConfig, family_of, hf_names
from fnmodels.models.common.spec import Constant, Leaf, Normal
from fnmodels.models.common.storage import Stored
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree, pytree, static
from params.checkpoint.shard_index import as_lines
from params.io.files import plain_file, read_json, sync
from params.io.safetensors_file import Box, LazyTensor, map_file, mapped_tensor, open_tensors, write_tensors
from params.io.staging import describe_os_error, removed_on_failure, reserved_staging_path
from params.sharding import sharding_of

from .initialize import draw

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


@pytree
@dataclass(frozen=True, eq=False)
class Lora:
    """A weight [out, in] with an adapter: weight + scale b a, where a is [rank, in] and b [out, rank]."""

    weight: Any
    a: Any
    b: Any
    scale: float = static(default=1.0)
    invariant: ClassVar[bool] = True  # its products are those of fnmodels.ops.linear

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """F.linear(x, self, bias); torch raises for every other function of a Lora, naming it."""
        if func is not F.linear or isinstance(args[0], cls):
            return NotImplemented
        return args[1].linear(args[0], *args[2:], **(kwargs or {}))

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        low = linear(linear(x, self.a.to(x.dtype)), self.b.to(x.dtype))
        return linear(x, self.weight, bias) + self.scale * low

    def merged(self) -> Tensor:
        """The weight with the adapter added, in the weight's dtype; the sum is taken in fp32 or wider."""
        sharding = sharding_of(self.weight)
        if sharding is not None:
            with torch.no_grad():  # with gradients enabled, to_local would return views
                weight, a, b = (leaf.to_local() for leaf in (self.weight, self.a, self.b))
            return sharding.distribute(Lora(weight, a, b, self.scale).merged())
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        low: Tensor = self.b.to(wide) @ self.a.to(wide)
        return (self.weight.to(wide) + self.scale * low).to(self.weight.dtype)


def add(
    config: DecoderConfig,
    params: Tree,
    *,
    rank: int,
    alpha: float | None = None,
    targets: Iterable[str] = ("q_proj", "v_proj"),
    seed: int = 0,
) -> Tree:
    """`params` with an adapter at every target; weights are not copied, and the model's outputs do not change.

    targets: last components of paths ("q_proj": every linear weight of that name, except experts, which take no
    adapter), or shell patterns over full paths ("layers.1?.mlp.*"). ValueError: a target matches nothing, or matches
    a leaf that is no linear weight. alpha: the adapter is scaled by alpha / rank; None: rank. a is drawn by
    (seed, path), uniform in +-1/sqrt(in) as in PEFT, in the weight's dtype; b starts at 0.
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}; it must be at least 1.")
    chosen = _targets(config, params, tuple(targets))
    scale = (rank if alpha is None else alpha) / rank

    def adapted(path: str, weight: Any) -> Any:
        if path not in chosen:
            return weight
        a, b = _adapter_leaves(chosen[path], rank)

        def uniform(box: Box | None) -> Tensor:
            # the distribution function of a normal variable is uniform at its draws
            return torch.special.erf(draw(a, seed, f"{path}.a", box) / math.sqrt(2)) / math.sqrt(a.shape[1])

        return Lora(weight, *_on_same_mesh(weight, (a, b), uniform, lambda box: draw(b, seed, f"{path}.b", box)), scale)

    return map_leaves(adapted, params)


def merge(params: Tree) -> Tree:
    """`params` with every adapter merged into its weight: plain tensors again."""
    return map_leaves(lambda _, leaf: leaf.merged() if isinstance(leaf, Lora) else leaf, params)


def adapters(params: Tree) -> Tree:
    """The adapters of `params` alone: the same tree with None for every weight, e.g. to save what was trained."""
    return map_leaves(lambda _, leaf: replace(leaf, weight=None) if isinstance(leaf, Lora) else None, params)


def weights(params: Tree) -> Tree:
    """`params` without adapters: each `Lora` is replaced by its weight, unchanged."""
    return map_leaves(lambda _, leaf: leaf.weight if isinstance(leaf, Lora) else leaf, params)


def attach(params: Tree, trained: Tree) -> Tree:
    """`params` with the adapters of `trained` (a tree from `adapters`), replacing any that `params` has."""
    nodes = _adapters(trained)

    def attached(path: str, leaf: Any) -> Any:
        weight = leaf.weight if isinstance(leaf, Lora) else leaf
        return replace(nodes[path], weight=weight) if path in nodes else weight

    return map_leaves(attached, params)


def _on_same_mesh(weight: Tensor, leaves: tuple[Leaf, Leaf], *make: Callable[[Box | None], Tensor]) -> tuple[Any, Any]:
    """(a, b) on the weight's device, in its dtype and sharded to match; each of `make` returns a box (None: all)."""
    sharding = sharding_of(weight)
    if sharding is None:
        a, b = (values(None).to(weight) for values in make)
        return a, b
    distributed = []
    for leaf, values, shared_dim in zip(leaves, make, (1, 0), strict=True):
        dims = tuple(shared_dim if dim == shared_dim else None for dim in sharding.dims)
        own = replace(sharding, dims=dims, shape=leaf.shape)
        distributed.append(own.distribute(values(own.local_box()).to(weight.device, weight.dtype)))
    return distributed[0], distributed[1]


def spec(config: DecoderConfig, params: Tree) -> Tree:
    """The family's spec for `params` with adapters: only a and b are trainable, and weight decay applies to them."""
    leaves = tree.flatten(family_of(config).spec(config))

    def frozen(path: str, value: Any) -> Any:
        leaf = leaves[path]
        base = replace(leaf, trainable=False, decay=False)
        return Lora(base, *_adapter_leaves(leaf, len(value.a)), value.scale) if isinstance(value, Lora) else base

    return map_leaves(frozen, params)


def save_adapters(path: str | os.PathLike[str], config: DecoderConfig, params: Tree, *, base: str = "") -> None:
    """Write the adapters into the folder `path` in PEFT's format: adapter_config.json, adapter_model.safetensors.

    base: PEFT's `base_model_name_or_path`. All adapters must share rank and scale (ValueError).
    UnsupportedError where a weight is a slice of a fused tensor on disk, for which PEFT has no adapter.
    """
    adapters = _adapters(params)
    if not adapters:
        raise ValueError("params hold no adapters; params.lora.add makes them.")
    sharded = next((path for path, node in adapters.items() if sharding_of(node.a) is not None), None)
    if sharded is not None:
        raise ValueError(f"{sharded} is a DTensor; only plain tensors can be saved (`full_tensor` makes one).")
    forms = {(len(node.a), node.scale) for node in adapters.values()}
    if len(forms) > 1:
        raise ValueError(f"The adapters have several ranks and scales, {sorted(forms)}; one file holds one.")
    (rank, scale), names = forms.pop(), _modules(config, adapters)
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if (alpha := scale * rank) == int(alpha) else alpha,
        "target_modules": sorted(names.values()),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    tensors: dict[str, LazyTensor] = {}
    for where, node in adapters.items():
        for letter, value in (("A", node.a), ("B", node.b)):
            name = f"{_PREFIX}{names[where]}.lora_{letter}.weight"
            tensors[name] = LazyTensor(value.dtype, tuple(value.shape), lambda value=value: value.detach())  # type: ignore[misc]
    folder = Path(path)
    with reserved_staging_path(folder) as temporary:
        with (
            removed_on_failure(temporary),
            describe_os_error(folder, "The adapters were not saved", "older ones are as they were"),
        ):
            write_tensors(temporary / WEIGHTS, tensors)
            (temporary / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            sync(temporary / CONFIG)
            sync(temporary)
        with describe_os_error(
            folder, "The adapters could not be moved into place", f"they are complete in {temporary.name}"
        ):
            (folder / CONFIG).unlink(missing_ok=True)  # first away and last back: without it nothing loads the folder
            for file in (WEIGHTS, CONFIG):
                os.replace(temporary / file, folder / file)
            sync(folder)
        temporary.rmdir()


def load_adapters(path: str | os.PathLike[str], config: DecoderConfig, params: Tree) -> Tree:
    """`params` with the adapters of a folder in PEFT's format: plain LoRA on linear weights of this model.

    ConfigError or UnsupportedError for a config that is not plain LoRA; MismatchError names every tensor that is
    missing, unexpected or mis-shaped.
    """
    folder = Path(path)
    rank, alpha = _read_config(plain_file(folder, CONFIG))
    with ExitStack() as stack:
        file = open_tensors(plain_file(folder, WEIGHTS), stack)
        mapping = map_file(file)
        found = {name: mapped_tensor(mapping, entry).clone() for name, entry in file.entries.items()}
    leaves = {p: leaf for p, leaf in tree.flatten(family_of(config).spec(config)).items() if is_linear(p, leaf)}
    # Not strict: PEFT has no adapters for slices of fused tensors, so one in a file is reported as unexpected below.
    paths = {module: where for where, module in _modules(config, leaves, strict=False).items()}
    faults: list[str] = []
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, value in found.items():
        module, _, letter = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".lora_")
        where = paths.get(module)
        if not name.startswith(_PREFIX) or letter not in ("A", "B") or where is None:
            faults.append(f"{name!r}: unexpected, the model has no such linear weight")
            continue
        a, b = _adapter_leaves(leaves[where], rank)
        expected = a.shape if letter == "A" else b.shape
        if tuple(value.shape) != expected:
            faults.append(f"{name}: expected {list(expected)}, found {list(value.shape)}")
        pairs.setdefault(where, {})[letter] = value
    faults += [f"{where}: only lora_{next(iter(p))} is there" for where, p in pairs.items() if len(p) == 1]
    if faults:
        raise MismatchError(f"{folder / WEIGHTS}: {len(faults)} adapters do not fit the model:{as_lines(faults)}")

    def adapted(where: str, weight: Any) -> Any:
        if where not in pairs:
            return weight
        a, b = (lambda box, x=pairs[where][letter]: x if box is None else x[box].clone() for letter in "AB")
        return Lora(weight, *_on_same_mesh(weight, _adapter_leaves(leaves[where], rank), a, b), alpha / rank)

    return map_leaves(adapted, params)


def _read_config(file: Path) -> tuple[int, float]:
    """(rank, alpha) of an adapter_config.json that describes plain LoRA; errors for anything else."""
    values = read_json(file)
    if not isinstance(values, dict) or values.get("peft_type") != "LORA":
        raise UnsupportedError(f"{file}: it must be a JSON object with the peft_type LORA.")
    rank, alpha = values.get("r"), values.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise ConfigError(f"{file}: r is {rank!r} and lora_alpha {alpha!r}; they must be a whole number and a number.")
    plain = {"bias": "none", "use_rslora": False, "use_dora": False, "fan_in_fan_out": False}
    for name, wanted in plain.items():
        if values.get(name, wanted) not in (wanted, None):
            raise UnsupportedError(f"{file}: {name} is {values[name]!r}; only {wanted!r} can be read.")
    for name in ("rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication"):
        if values.get(name):
            raise UnsupportedError(f"{file}: {name} is {values[name]!r}; adapters with it cannot be read.")
    return rank, float(alpha)


def _targets(config: DecoderConfig, params: Tree, targets: tuple[str, ...]) -> dict[str, Leaf]:
    """{path: leaf} of the linear weights that match `targets`; ValueError as in `add`."""
    leaves = tree.flatten(family_of(config).spec(config))
    if _adapters(params):
        raise ValueError("params hold adapters already; merge them first.")
    chosen: set[str] = set()
    for target in targets:
        ends = {p for p in leaves if p.rpartition(".")[2] == target}
        named = {p for p in ends if is_linear(p, leaves[p])} or ends
        named |= {p for p in leaves if fnmatch.fnmatchcase(p, target)}
        if not named:
            last = sorted({p.rpartition(".")[2] for p, leaf in leaves.items() if is_linear(p, leaf)})
            raise ValueError(f"The target {target!r} names no parameter; linear weights end in {', '.join(last)}.")
        chosen |= named
    wrong = sorted(path for path in chosen if not is_linear(path, leaves[path]))
    if wrong:
        raise ValueError(f"{wrong[0]} {list(leaves[wrong[0]].shape)} is no weight of a linear map; adapters need one.")
    return {path: leaves[path] for path in chosen}


def is_linear(path: str, leaf: Leaf | Tensor) -> bool:
    """Whether F.linear applies a leaf, by the families' naming; embeddings, routers and gates have other names."""
    return len(leaf.shape) == 2 and path.endswith(("_proj", "lm_head"))


def _adapter_leaves(leaf: Leaf, rank: int) -> tuple[Leaf, Leaf]:
    """The leaves (a, b) of an adapter of the weight `leaf`."""
    (out_size, in_size), (out_axis, in_axis) = leaf.shape, leaf.axes
    a = Leaf((rank, in_size), leaf.dtype, ("rank", in_axis), Normal(1.0), unit=leaf.unit)
    return a, Leaf((out_size, rank), leaf.dtype, (out_axis, "rank"), Constant(0.0), unit=leaf.unit)


def _adapters(params: Tree) -> dict[str, Lora]:
    found: dict[str, Lora] = {}

    def note(path: str, leaf: Any) -> None:
        if isinstance(leaf, Lora):
            found[path] = leaf

    map_leaves(note, params)
    return found


def _modules(config: DecoderConfig, paths: Iterable[str], *, strict: bool = True) -> dict[str, str]:
    """{path: the module in transformers whose weight it is}, from the names on disk."""
    names: dict[str, Stored] = hf_names(config)
    found = {}
    for path in paths:
        stored = names[path]
        if isinstance(stored, str) and stored.endswith(".weight"):
            found[path] = stored.removesuffix(".weight")
        elif strict:
            raise UnsupportedError(f"{path} is a slice of a larger tensor on disk, for which PEFT has no adapter.")
    return found


def map_leaves(function: Callable[[str, Any], Any], node: Tree, path: str = "") -> Tree:
    """A tree map that calls function(path, leaf) and treats a `Lora` as one leaf."""
    if isinstance(node, dict):
        return {key: map_leaves(function, value, f"{path}.{key}" if path else key) for key, value in node.items()}
    if isinstance(node, list):
        return [map_leaves(function, value, f"{path}.{i}") for i, value in enumerate(node)]
    return function(path, node)
