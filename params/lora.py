"""Low-rank adapters (LoRA, arXiv 2106.09685) as a rewrite of the parameter tree; models need no change.

    params = P.lora.add(config, params, rank=8, targets=("q_proj", "v_proj"), seed=0)
    optimizer = train.adamw(1e-4, spec=P.lora.spec(config, params))     # trains the adapters only
    P.lora.save_adapters("adapters", config, params)                    # in PEFT's format
    params = P.lora.merge(params)                                       # plain weights again

A target becomes a node `Lora` of three leaves, at path.weight, path.a and path.b. Passed to `F.linear` as the weight,
it computes x W^T + scale (x A^T) B^T, so that the gradient of the full weight is never computed. With DoRA (arXiv
2402.09353) a fourth, path.magnitude, replaces the norm of each row of W + scale B A. `per_row` gives each row of a
batch its own adapters.

Where the weight is a DTensor, so is its adapter: b is sharded like the weight's rows and a like its columns, so that
the shards of both make up the shard of the weight, and nothing here communicates.
"""

import fnmatch
import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from fnmodels.models.common.storage import Stack, Stored
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree, pytree, static
from params.checkpoint.shard_index import as_lines
from params.io.files import plain_file, read_json, sync
from params.io.safetensors_file import Box, LazyTensor, map_file, mapped_tensor, open_tensors, write_tensors
from params.io.staging import describe_os_error, removed_on_failure, reserved_staging_path
from params.sharding import sharding_of

from .initialize import draw

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAGNITUDE = "magnitude_vector.weight"
_PREFIX = "base_model.model."
_ENDINGS = {"a": "A.weight", "b": "B.weight", "magnitude": MAGNITUDE}


class _AppliedByLinear:
    """A weight that F.linear alone applies, by its method `linear`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """F.linear(x, self, bias); torch raises for every other function of a Lora, naming it."""
        if func is not F.linear or isinstance(args[0], cls):
            return NotImplemented
        return args[1].linear(args[0], *args[2:], **(kwargs or {}))


@pytree
@dataclass(frozen=True, eq=False)
class Lora(_AppliedByLinear):
    """A weight [out, in] with an adapter: weight + scale b a, where a is [rank, in] and b [out, rank].

    magnitude: [out], with which row i of that sum is multiplied by magnitude[i] / its norm (DoRA); the norm is taken as
    a constant by derivatives. Experts' weights [E, out, in] have a [E, rank, in] and b [E, out, rank]; layers with
    experts read `merged`.
    """

    weight: Any
    a: Any
    b: Any
    scale: float = static(default=1.0)
    magnitude: Any = None
    invariant: ClassVar[bool] = True  # its products are those of fnmodels.ops.linear

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        low = self.scale * linear(linear(x, self.a.to(x.dtype)), self.b.to(x.dtype))
        if self.magnitude is None:
            return linear(x, self.weight, bias) + low
        y = (linear(x, self.weight) + low) * (1 / self.row_norms()).to(x.dtype) * self.magnitude.to(x.dtype)
        return y if bias is None else y + bias

    def row_norms(self) -> Tensor:
        """[out], the norm of each row of weight + scale b a, detached; in fp32 or wider."""
        weight, a, b = (leaf.detach() for leaf in (self.weight, self.a, self.b))
        return _sum(weight, a, b, self.scale).norm(dim=-1)

    def merged(self) -> Tensor:
        """The weight with the adapter added, in the weight's dtype; the sum is taken in fp32 or wider."""
        sharding = sharding_of(self.weight)
        if sharding is not None:
            with torch.no_grad():  # with gradients enabled, to_local would return views
                weight, a, b = (leaf.to_local() for leaf in (self.weight, self.a, self.b))
            return sharding.distribute(Lora(weight, a, b, self.scale).merged())
        total = _sum(self.weight, self.a, self.b, self.scale)
        if self.magnitude is not None:
            total = total * (self.magnitude / self.row_norms())[:, None]
        return total.to(self.weight.dtype)


def _sum(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """weight + scale b a in fp32 or wider."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(wide) + scale * (b.to(wide) @ a.to(wide))


@pytree
@dataclass(frozen=True, eq=False)
class RowLora(_AppliedByLinear):
    """A weight [out, in] with N adapters, of which row i of x [B, S, in] gets number rows[i]; see `per_row`.

    a [N, rank, in], b [N, out, rank] with the scale in it, rows [B] int64; factor [N, out] multiplies the outputs
    (DoRA), None for 1.
    """

    weight: Any
    a: Any
    b: Any
    rows: Any
    factor: Any = None
    invariant: ClassVar[bool] = False

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.ndim != 3 or x.shape[0] != len(self.rows):
            raise ValueError(
                f"Adapters per row are for {len(self.rows)} rows, inputs [{len(self.rows)}, S, in], and these are "
                f"{list(x.shape)}."
            )
        a, b = (leaf[self.rows].to(x.dtype) for leaf in (self.a, self.b))
        y = linear(x, self.weight) + (x @ a.mT) @ b.mT
        y = y if self.factor is None else y * self.factor[self.rows].to(x.dtype)[:, None]
        return y if bias is None else y + bias


def add(
    config: DecoderConfig,
    params: Tree,
    *,
    rank: int,
    alpha: float | None = None,
    targets: Iterable[str] = ("q_proj", "v_proj"),
    seed: int = 0,
    rslora: bool = False,
    dora: bool = False,
) -> Tree:
    """`params` with an adapter at every target; weights are not copied, and the model's outputs do not change.

    targets: last components of paths ("q_proj": every linear weight of that name, except experts'), or shell patterns
    over full paths ("layers.1?.mlp.*", "layers.*.experts.*_proj"). ValueError: a target matches nothing, or matches a
    leaf that is no linear weight. alpha: the adapter is scaled by alpha / rank; None: rank. a is drawn by (seed, path),
    uniform in +-1/sqrt(in) as in PEFT, in the weight's dtype; b starts at 0.
    rslora: scales by alpha / sqrt(rank) (arXiv 2312.03732). dora: adds a magnitude, which starts as the norms of the
    weight's rows; UnsupportedError for experts and DTensors.
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}; it must be at least 1.")
    chosen = _targets(config, params, tuple(targets))
    scale = (rank if alpha is None else alpha) / (math.sqrt(rank) if rslora else rank)

    def adapted(path: str, weight: Any) -> Any:
        if path not in chosen:
            return weight
        a, b = _adapter_leaves(chosen[path], rank)

        def uniform(box: Box | None) -> Tensor:
            # the distribution function of a normal variable is uniform at its draws
            return torch.special.erf(draw(a, seed, f"{path}.a", box) / math.sqrt(2)) / math.sqrt(a.shape[-1])

        pair = _on_same_mesh(weight, (a, b), uniform, lambda box: draw(b, seed, f"{path}.b", box))
        node = Lora(weight, *pair, scale)
        return replace(node, magnitude=_initial_magnitude(path, node)) if dora else node

    return map_leaves(adapted, params)


def merge(params: Tree) -> Tree:
    """`params` with every adapter merged into its weight: plain tensors again."""
    return map_leaves(lambda _, leaf: leaf.merged() if isinstance(leaf, Lora) else leaf, params)


def adapters(params: Tree) -> Tree:
    """The adapters of `params` alone, at their paths: what is trained and saved, and what torch.func differentiates."""
    return _present(map_leaves(lambda _, leaf: replace(leaf, weight=None) if isinstance(leaf, Lora) else None, params))


def _present(node: Tree) -> Tree:
    """The tree without the entries of dicts that are None, which torch.func refuses as leaves."""
    if isinstance(node, dict):
        return {key: _present(value) for key, value in node.items() if value is not None}
    return [_present(value) for value in node] if isinstance(node, list) else node


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


def per_row(params: Tree, adapters: Sequence[Tree], rows: Tensor) -> Tree:
    """`params` with adapters of which row i of a batch gets number rows[i]: several fine-tuned models in one batch.

    params: without adapters. adapters: trees with adapters, of any rank and targets; one without any is the model
    itself. rows: int64 [B]. Each row's output is that of `attach(params, adapters[rows[i]])`. Every target must read
    [B, S, in]: losses that flatten tokens take none of lm_head. ValueError for rows outside of the adapters, and
    UnsupportedError for experts.
    """
    if rows.ndim != 1 or (len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(adapters)):
        raise ValueError(f"rows must be [B], each from 0 to {len(adapters) - 1}; it is {rows.tolist()}.")
    nodes = [_adapters(one) for one in adapters]
    if _adapters(params):
        raise ValueError("params hold adapters already; merge them, or take `weights`.")

    def stacked(path: str, weight: Any) -> Any:
        own = [found.get(path) for found in nodes]
        return weight if not any(own) else _stacked(path, weight, own, rows)

    return map_leaves(stacked, params)


def _stacked(path: str, weight: Tensor, own: Sequence[Lora | None], rows: Tensor) -> RowLora:
    if weight.ndim != 2:
        raise UnsupportedError(
            f"{path} {list(weight.shape)} is a weight of experts; adapters per row have no form of it."
        )
    first = next(node for node in own if node is not None)
    rank = max(len(node.a) for node in own if node is not None)
    none = Lora(weight, first.a[:0], first.b[:, :0])
    given = [none if node is None else replace(node, weight=weight) for node in own]
    a = torch.stack([F.pad(node.a, (0, 0, 0, rank - len(node.a))) for node in given])
    b = torch.stack([F.pad(node.scale * node.b, (0, rank - len(node.a))) for node in given])
    if all(node.magnitude is None for node in given):
        return RowLora(weight, a, b, rows)
    ones = torch.ones_like(weight[:, 0])
    factors = [ones if node.magnitude is None else node.magnitude / node.row_norms() for node in given]
    return RowLora(weight, a, b, rows, torch.stack(factors))


def _initial_magnitude(path: str, node: Lora) -> Tensor:
    if node.weight.ndim != 2 or sharding_of(node.weight) is not None:
        what = "a DTensor" if node.weight.ndim == 2 else "a weight of experts"
        raise UnsupportedError(f"{path} is {what}, for which DoRA is not supported: take plain LoRA.")
    return node.row_norms().to(node.weight.dtype)


def _on_same_mesh(weight: Tensor, leaves: tuple[Leaf, Leaf], *make: Callable[[Box | None], Tensor]) -> tuple[Any, Any]:
    """(a, b) on the weight's device, in its dtype and sharded to match; each of `make` returns a box (None: all)."""
    sharding = sharding_of(weight)
    if sharding is None:
        a, b = (values(None).to(weight) for values in make)
        return a, b
    distributed = []
    last = weight.ndim - 1
    for leaf, values, rank_dim in zip(leaves, make, (last - 1, last), strict=True):
        dims = tuple(None if dim == rank_dim else dim for dim in sharding.dims)
        own = replace(sharding, dims=dims, shape=leaf.shape)
        distributed.append(own.distribute(values(own.local_box()).to(weight.device, weight.dtype)))
    return distributed[0], distributed[1]


def spec(config: DecoderConfig, params: Tree) -> Tree:
    """The family's spec for `params` with adapters: only a and b are trainable, and weight decay applies to them."""
    leaves = tree.flatten(family_of(config).spec(config))

    def frozen(path: str, value: Any) -> Any:
        leaf = leaves[path]
        base = replace(leaf, trainable=False, decay=False)
        if not isinstance(value, Lora):
            return base
        magnitude = (
            None
            if value.magnitude is None
            else Leaf(leaf.shape[:1], leaf.dtype, leaf.axes[:1], Constant(1.0), unit=leaf.unit)
        )
        return Lora(base, *_adapter_leaves(leaf, value.a.shape[-2]), value.scale, magnitude)

    return map_leaves(frozen, params)


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
            for module, one in zip(modules[where], value if value.ndim == 3 else [value], strict=True):
                yield f"{_PREFIX}{module}.lora_{_ENDINGS[part]}", one

    return named()


def peft_config(config: DecoderConfig, params: Tree, *, base: str = "") -> dict[str, Any]:
    """The values of PEFT's adapter_config.json for the adapters in `params`, of all layers. Errors: `save_adapters`."""
    adapters = _adapters(params)
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
    """
    sharded = next((path for path, node in _adapters(params).items() if sharding_of(node.a) is not None), None)
    if sharded is not None:
        raise ValueError(f"{sharded} is a DTensor; only plain tensors can be saved (`full_tensor` makes one).")
    values = peft_config(config, params, base=base)
    tensors = {
        name: LazyTensor(value.dtype, tuple(value.shape), functools.partial(_itself, value))
        for name, value in export_adapters(config, adapters(params))
    }
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
    """`params` with the adapters of a folder in PEFT's format: LoRA, rsLoRA or DoRA on linear weights of this model.

    Experts have an adapter each, as `save_adapters` writes them. ConfigError or UnsupportedError for a config of
    another form; MismatchError names every tensor that is
    missing, unexpected or mis-shaped.
    """
    folder = Path(path)
    rank, scale, dora = _read_config(plain_file(folder, CONFIG))
    with ExitStack() as stack:
        file = open_tensors(plain_file(folder, WEIGHTS), stack)
        mapping = map_file(file)
        found = {name: mapped_tensor(mapping, entry).clone() for name, entry in file.entries.items()}
    leaves = {p: leaf for p, leaf in tree.flatten(family_of(config).spec(config)).items() if _takes_adapter(p, leaf)}
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
        a, b = (
            own[0][end] if weight.ndim == 2 else torch.stack([x[end] for x in own]) for end in ("A.weight", "B.weight")
        )
        make = (lambda box, x=x: x if box is None else x[box].clone() for x in (a, b))
        node = Lora(weight, *_on_same_mesh(weight, _adapter_leaves(leaves[where], rank), *make), scale)
        if not dora:
            return node
        _initial_magnitude(where, node)  # refuses what has none
        return replace(node, magnitude=own[0][MAGNITUDE].to(weight))

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
    values = read_json(file)
    if not isinstance(values, dict) or values.get("peft_type") != "LORA":
        raise UnsupportedError(f"{file}: it must be a JSON object with the peft_type LORA.")
    rank, alpha = values.get("r"), values.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise ConfigError(f"{file}: r is {rank!r} and lora_alpha {alpha!r}; they must be a whole number and a number.")
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
    wrong = sorted(path for path in chosen if not _takes_adapter(path, leaves[path]))
    if wrong:
        raise ValueError(f"{wrong[0]} {list(leaves[wrong[0]].shape)} is no weight of a linear map; adapters need one.")
    return {path: leaves[path] for path in chosen}


def targets(config: DecoderConfig) -> list[str]:
    """The paths of all weights that can have an adapter: linear ones, and those of experts."""
    return [path for path, leaf in tree.flatten(family_of(config).spec(config)).items() if _takes_adapter(path, leaf)]


def is_linear(path: str, leaf: Leaf | Tensor) -> bool:
    """Whether F.linear applies a leaf, by the families' naming; embeddings, routers and gates have other names."""
    return len(leaf.shape) == 2 and path.endswith(("_proj", "lm_head"))


def _takes_adapter(path: str, leaf: Leaf) -> bool:
    """Whether a leaf is a linear weight or that of experts [E, out, in]."""
    return is_linear(path, leaf) or (len(leaf.shape) == 3 and ".experts." in path and path.endswith("_proj"))


def _adapter_leaves(leaf: Leaf, rank: int) -> tuple[Leaf, Leaf]:
    """The leaves (a, b) of an adapter of the weight `leaf`."""
    (*count, out_size, in_size), (*axis, out_axis, in_axis) = leaf.shape, leaf.axes
    a = Leaf((*count, rank, in_size), leaf.dtype, (*axis, "rank", in_axis), Normal(1.0), unit=leaf.unit)
    b = Leaf((*count, out_size, rank), leaf.dtype, (*axis, out_axis, "rank"), Constant(0.0), unit=leaf.unit)
    return a, b


def _adapters(params: Tree) -> dict[str, Lora]:
    found: dict[str, Lora] = {}

    def note(path: str, leaf: Any) -> None:
        if isinstance(leaf, Lora):
            found[path] = leaf

    map_leaves(note, params)
    return found


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


def map_leaves(function: Callable[[str, Any], Any], node: Tree, path: str = "") -> Tree:
    """A tree map that calls function(path, leaf) and treats a `Lora` or `RowLora` as one leaf."""
    if isinstance(node, dict):
        return {key: map_leaves(function, value, f"{path}.{key}" if path else key) for key, value in node.items()}
    if isinstance(node, list):
        return [map_leaves(function, value, f"{path}.{i}") for i, value in enumerate(node)]
    return function(path, node)
