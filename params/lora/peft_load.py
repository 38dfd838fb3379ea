"""Reading of a folder of adapters in PEFT's format."""

import os
import re
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.errors import MismatchError, UnsupportedError, memory_for
from fnmodels.models.common.family import DecoderConfig
from fnmodels.models.common.storage import disk_shape, extract
from fnmodels.tree import Tree
from params.checkpoint.shard_index import as_lines
from params.checkpoint.tensor_map import is_leftover
from params.io.files import plain_file
from params.io.safetensors_file import check_floating, map_file, mapped_tensor, open_tensors
from params.sharding import is_stage_share, sharding_of

from .adapter_config import CONFIG, AdapterConfig, read_config
from .leaves import adapter_leaves, initial_magnitude, map_leaves, on_same_mesh, params_by_path
from .nodes import Lora, Replaced, TwoUses, base_of, with_base
from .peft_agree import Contents, disagreements
from .peft_modules import INNER, PREFIX, Factors, Layout, Place, cut, layout_of, whole

WEIGHTS = "adapter_model.safetensors"
# What the names of a module's tensors end in, and what they are.
_ENDINGS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_embedding_A": "table_a",
    "lora_embedding_B": "table_b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",  # of older releases of PEFT
    "token_adapter.trainable_tokens_delta": "token_rows",
}
_TEXT_IN_WRAPPER = r"^(model\.language_model|language_model\.model)\."
_NAMES = {part: ending for ending, part in reversed(_ENDINGS.items())}
_NAMES["magnitude"] = "lora_magnitude_vector.weight"


def load_adapters(
    path: str | os.PathLike[str], config: DecoderConfig, params: Tree, *, ignore_fields: Collection[str] = ()
) -> Tree:
    """Loads the adapters of a folder in PEFT's format into a tree.

    LoRA, rsLoRA and DoRA of linear weights, embeddings, heads, fused weights and experts (a module each, or stacked as
    PEFT's target_parameters), with ranks and alphas per module; PiSSA and OLoRA become adapters of the unchanged base
    model, of twice the rank. What is trained in full (modules_to_save, biases, rows of tokens, resized embeddings)
    becomes `Replaced`. Names may be those of files or of transformers' modules.

    Args:
        path: The folder with adapter_config.json and adapter_model.safetensors.
        config: The base model's config.
        params: The base model's parameters; a model whose vocabulary the adapters extend is resized first
            (`params.resize_vocab`). A pipeline stage's share receives the adapters of its layers and ends.
        ignore_fields: Fields of adapter_config.json that change nothing, where this audit does not know them.

    Returns:
        The tree with `Lora`, `Replaced` and `TwoUses` nodes at their parameters' paths.

    Raises:
        ConfigError: A field of adapter_config.json has a wrong value or is unknown.
        UnsupportedError: A field changes what the adapters compute in a way that is not supported.
        MismatchError: Names every tensor that is missing, unexpected or mis-shaped.
    """
    folder = Path(path)
    settings = read_config(folder / CONFIG, ignore_fields)
    with memory_for(folder), ExitStack() as stack:
        file = open_tensors(plain_file(folder, WEIGHTS), stack)
        check_floating(file)
        mapping = map_file(file)
        tensors = {name: mapped_tensor(mapping, entry).clone() for name, entry in file.entries.items()}
    weights = {path: base_of(leaf) for path, leaf in params_by_path(params).items()}
    reader = _Reader(config, settings, layout_of(config), weights, is_stage_share(params))
    reader.read(tensors)
    if reader.faults:
        raise MismatchError(
            f"{folder / WEIGHTS}: {len(reader.faults)} adapters do not fit the model:{as_lines(reader.faults)}"
        )
    nodes = reader.nodes()
    return map_leaves(lambda where, leaf: with_base(nodes.get(where), base_of(leaf)), params)


@dataclass
class _Reader:
    """Collects what the tensors of a file are, and what does not fit.

    weights: the base model's parameters by path. share: they are those of a pipeline stage alone. found: {path:
    {expert, or None: (factors, scale)}}. values: {path: a parameter trained in full}. both: the paths in `values` that
    hold for both uses of a tied embedding. contents: what must agree with adapter_config.json.
    """

    config: DecoderConfig
    settings: AdapterConfig
    layout: Layout
    weights: Mapping[str, Any]
    share: bool = False
    faults: list[str] = field(default_factory=list)
    found: dict[str, dict[int | None, tuple[Factors, float]]] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    both: set[str] = field(default_factory=set)
    contents: Contents = field(default_factory=Contents)

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        modules: dict[str, dict[str, Tensor]] = {}
        names: dict[str, str] = {}  # {module: its name in the file}
        pattern, replacement = _renaming(self.layout, tensors)
        for name, value in tensors.items():
            if (plain := name.replace(".original_module.", ".")) != name and plain in tensors:
                continue  # with bias "all", PEFT saves that of a module which modules_to_save replaces, too
            written = name.removeprefix(PREFIX)
            module, part = _parsed(re.sub(pattern, replacement, written))
            if not name.startswith(PREFIX) or (part == "" and not self._full(module, value)):
                self._unexpected(name)
            elif part != "":
                modules.setdefault(module, {})[part] = value
                names[module] = _parsed(written)[0]
        square: list[tuple[str, str, dict[str, Tensor]]] = []
        for module, parts in modules.items():
            places = self.layout.memory.linear.get(module) or self.layout.files.linear.get(module)
            if "token_rows" in parts:
                self._token_rows(module, places, parts.pop("token_rows"))
            if parts and places is not None:
                self.contents.names[module] = names[module]
                self.contents.paths |= {place.path for place in places}
                self._linear(module, places, parts)
            elif parts and (parameter := self._parameter(module)) is not None:
                square.append((module, parameter, parts))
            elif parts:
                self._unexpected(*(f"{PREFIX}{module}.{_NAMES[part]}" for part in parts))
        self._stacked(square)
        self.missing_experts()
        if not self.faults:  # a tensor that does not fit explains more
            self.faults += disagreements(self.config, self.settings, self.layout, self.contents)

    def _unexpected(self, *names: str) -> None:
        self.faults += [f"{name!r}: unexpected, the model has no such weight that takes an adapter" for name in names]

    def _full(self, name: str, value: Tensor) -> bool:
        """Notes a parameter trained in full; whether there is one of this name."""
        plain = re.sub(r"\.(base_layer|modules_to_save(\.default)?)\.", ".", name)
        plain = self.layout.copies.get(plain, plain)
        places = self.layout.memory.tensors.get(plain) or self.layout.files.tensors.get(plain)
        if places is None:
            return is_leftover(self.config, plain)
        self.contents.full |= {place.path for place in places}
        for place in places:
            shape = disk_shape(place.stored, place.leaf.shape)
            if tuple(value.shape) != shape:
                resized = place.path.endswith(("embed_tokens", "lm_head")) and value.shape[1:] == shape[1:]
                hint = f"; params.resize_vocab(config, params, {len(value)}) resizes the base model" if resized else ""
                self.faults.append(f"{PREFIX}{name}: expected {list(shape)}, found {list(value.shape)}{hint}")
                continue
            if place.expert is not None:
                return False  # PEFT saves no expert by itself
            if self._is_elsewhere(place.path):
                continue
            weight, base = extract(place.stored, value).contiguous(), self._weight(place.path)
            copied = INNER in name and sharding_of(base) is None and torch.equal(weight.to(base), base)
            if not copied:
                self.values[place.path] = weight
        return True

    def _weight(self, path: str) -> Any:
        """The base model's parameter of a path, a tied head's too."""
        return self.weights[self._stored(path)]

    def _stored(self, path: str) -> str:
        tied = self.layout.tied
        return tied[0] if tied and path == tied[1] else path

    def _is_elsewhere(self, path: str) -> bool:
        """Whether another stage of a pipeline holds the parameter."""
        return self.share and self._stored(path) not in self.weights

    def _token_rows(self, module: str, places: list[Place] | None, rows: Tensor) -> None:
        """Rows of an embedding that are trained, in both of its uses."""
        self.contents.rows.add(module)
        if places is not None and self._is_elsewhere(places[0].path):
            return
        named = [ids for end, ids in self.settings.token_rows if f".{module}".endswith(f".{end}") or not end]
        base = None if places is None else self._weight(places[0].path)
        if base is None or len(named) != 1 or tuple(rows.shape) != (len(named[0]), base.shape[1]):
            self.faults.append(
                f"{PREFIX}{module}.{_NAMES['token_rows']}: {list(rows.shape)} does not fit trainable_token_indices"
            )
            return
        if max(named[0]) >= len(base):
            self.faults.append(
                f"{PREFIX}{module}: trainable_token_indices has {max(named[0])}, and the vocabulary {len(base)} tokens"
            )
            return
        if sharding_of(base) is not None:
            raise UnsupportedError(f"{module} is a DTensor, and rows of tokens are read into plain tensors.")
        path = places[0].path  # type: ignore[index]
        self.values[path] = base.index_copy(0, torch.tensor(named[0], device=base.device), rows.to(base))
        self.both.add(path)

    def _linear(self, module: str, places: list[Place], parts: dict[str, Tensor]) -> None:
        out_size, in_size = places[0].module_shape
        named = f".{module}.weight".endswith(tuple(f".{name}" for name in self.settings.parameters))
        if named:
            self.contents.parameters.add(f"{module}.weight")
        key = f"{module}.weight" if named else module  # as PEFT matches patterns
        rank = self.settings.rank_of(key)
        table = "table_a" in parts or "table_b" in parts
        # PEFT begins these with factors of the weight, which has no more of them than rows or columns.
        width = min(rank, out_size, in_size) if self.settings.mutated and not table else rank
        shapes: dict[str, tuple[int, ...]] = {"a": (width, in_size), "b": (out_size, width)}
        shapes = {"table_a": (rank, out_size), "table_b": (in_size, rank)} if table else shapes
        if self.settings.dora and table:
            raise UnsupportedError(f"{module} is an embedding with DoRA, which is not supported.")
        shapes |= {"magnitude": (out_size,)} if self.settings.dora else {}
        if not self._fits(module, parts, shapes) or all(self._is_elsewhere(place.path) for place in places):
            return
        a, b = (parts["table_b"].T, parts["table_a"].T) if table else (parts["a"], parts["b"])
        factors, scale = Factors(a, b, parts.get("magnitude")), self.settings.scale_of(key)
        if self.settings.mutated and not table:
            factors = self._of_unchanged_base(places, factors, rank, scale)
        for path, slice_factors in cut(places, factors, self.settings.rank).items():
            expert = places[0].expert
            self.found.setdefault(path, {})[expert] = slice_factors, scale

    def _fits(self, module: str, parts: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        names = {part: f"{PREFIX}{module}.{_NAMES[part]}" for part in (*parts, *shapes)}
        faults = [f"{names[part]}: missing" for part in shapes if part not in parts]
        for part, value in parts.items():
            if part not in shapes:
                self._unexpected(names[part])
                faults.append("")
            elif tuple(value.shape) != shapes[part]:
                faults.append(f"{names[part]}: expected {list(shapes[part])}, found {list(value.shape)}")
        self.faults += filter(None, faults)
        return not faults

    def _of_unchanged_base(self, places: list[Place], factors: Factors, rank: int, scale: float) -> Factors:
        """Factors that add to the published weight W: those of the file add to W - scale B0 A0, with which they began.

        PiSSA (arXiv 2404.02948): the largest singular values; OLoRA (arXiv 2406.01775): the first rows of R in W = Q R.
        """
        parts = {place.path: self._weight(place.path) for place in places}
        if scale <= 0 or any(sharding_of(part) is not None for part in parts.values()):
            raise UnsupportedError(
                f"{self.settings.file}: {self.settings.mutated} needs full weights and a positive alpha."
            )
        weight = whole(places, parts, stored=False).float()
        if self.settings.mutated == "pissa":
            u, s, v = torch.linalg.svd(weight, full_matrices=False)
            root = (s[:rank] / scale).sqrt()
            first_a, first_b = root[:, None] * v[:rank], u[:, :rank] * root
        else:
            if any(getattr(place.stored, "transposed", False) for place in places):
                raise UnsupportedError(f"{self.settings.file}: PEFT's OLoRA of transposed weights changes the model.")
            q, r = torch.linalg.qr(weight)
            first_a, first_b = r[:rank], q[:, :rank]
        a, b = torch.cat([factors.a.float(), first_a]), torch.cat([factors.b.float(), -first_b], 1)
        return replace(factors, a=a, b=b)

    def _parameter(self, module: str) -> str | None:
        """The parameter of the module `container` or `container.base_layer` that PEFT's target_parameters adapt."""
        container = re.sub(rf"(\{INNER})+$", "", module)
        stacked = self.layout.memory.stacked.get(container, {})
        ends = tuple(f".{name}" for name in self.settings.parameters)
        nested = [name for name in stacked if f".{container}.{name}".endswith(ends)]
        depth = len(nested) - 1 - module.count(INNER)
        return f"{container}.{nested[depth]}" if 0 <= depth < len(nested) else None

    def _stacked(self, modules: list[tuple[str, str, dict[str, Tensor]]]) -> None:
        """Adapters of parameters: matrices, or [E, ., .], which have one for every expert."""
        turned: dict[str, bool] = {}  # by container: whether A reads the size out, as the shapes of its parameters say
        for module, parameter, parts in modules:
            container, _, leaf = parameter.rpartition(".")
            places = self.layout.memory.stacked[container][leaf]
            self.contents.parameters.add(parameter)
            self.contents.paths |= {place.path for place in places}
            *experts, out_size, in_size = places[0].module_shape
            count = self.settings.rank_of(parameter) * (experts[0] if experts else 1)
            shapes = {"a": (count, in_size), "b": (out_size, count)}
            other = {"a": (count, out_size), "b": (in_size, count)}
            if out_size != in_size:
                turned[container] = all(part in parts and tuple(parts[part].shape) == other[part] for part in other)
            self._fits(module, parts, other if turned.get(container) and out_size != in_size else shapes)
        if self.faults:
            return
        for _, parameter, parts in modules:
            container, _, leaf = parameter.rpartition(".")
            places = self.layout.memory.stacked[container][leaf]
            reads_out = turned.get(container, self.layout.a_reads_out(places[0], self.settings.peft_version))
            scale = self.settings.scale_of(parameter)
            factors = _of_experts(parts["a"], parts["b"], places[0].module_shape, turned=reads_out)
            if self.settings.mutated:
                raise UnsupportedError(f"{self.settings.file}: {parameter} has {self.settings.mutated}: unsupported.")
            for path, slice_factors in cut(places, factors, self.settings.rank).items():
                self.found.setdefault(path, {})[None] = slice_factors, scale

    def nodes(self) -> dict[str, Any]:
        """{path: node without its weight} of everything that was read."""
        nodes: dict[str, Any] = {
            path: self._lora(path, experts) for path, experts in self.found.items() if not self._is_elsewhere(path)
        }
        for path, value in self.values.items():
            node = Replaced(None, _like(self._weight(path), value))
            nodes[path] = replace(nodes[path], weight=node) if path in nodes else node
        if self.layout.tied is None:
            return nodes
        table, head = self.layout.tied
        embed, other = nodes.pop(table, None), nodes.pop(head, None)
        if embed is not None and (table in self.both or _equal(embed, other)):
            return nodes | {table: embed}
        return nodes if embed is None and other is None else nodes | {table: TwoUses(None, embed, other)}

    def _lora(self, path: str, experts: Mapping[int | None, tuple[Factors, float]]) -> Lora:
        weight, leaf = self._weight(path), self.layout.leaves[path]
        count = leaf.shape[0] if len(leaf.shape) == 3 and None not in experts else 0
        each = [experts[expert] for expert in (range(count) if count else [None])]
        if len({scale for _, scale in each}) > 1 or len({factors.a.shape for factors, _ in each}) > 1:
            raise UnsupportedError(f"{self.settings.file}: the experts of {path} have several ranks or alphas.")
        factors, scale = each[0]
        if count:
            magnitudes = [expert.magnitude for expert, _ in each]
            magnitude = None if magnitudes[0] is None else torch.stack([x for x in magnitudes if x is not None])
            pairs = [(expert.a, expert.b) for expert, _ in each]
            factors = Factors(torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs]), magnitude)
        make = (lambda box, x=x: x.clone() if box is None else x[box].clone() for x in (factors.a, factors.b))
        a, b = on_same_mesh(weight, adapter_leaves(leaf, factors.a.shape[-2]), *make)
        node = Lora(None, a, b, scale)
        if factors.magnitude is None:
            return node
        initial_magnitude(path, replace(node, weight=weight))  # refuses what has none
        return replace(node, magnitude=factors.magnitude.to(weight).contiguous())

    def missing_experts(self) -> None:
        """Notes the experts without an adapter beside some that have one."""
        for module, places in self.layout.files.linear.items():
            for place in places:
                experts = self.found.get(place.path)
                if experts and None not in experts and place.expert not in experts:
                    self.faults.append(f"{PREFIX}{module}.{_NAMES['a']}: missing")


def _of_experts(a: Tensor, b: Tensor, shape: tuple[int, ...], *, turned: bool) -> Factors:
    """a [E, rank, in] and b [E, out, rank] from PEFT's [rank E, in] and [out, rank E], or those of the transpose."""
    if len(shape) == 3:
        a, b = a.unflatten(0, (shape[0], -1)), b.unflatten(1, (-1, shape[0])).permute(2, 0, 1)
    return Factors(b.mT, a.mT) if turned else Factors(a, b)


def _like(weight: Any, value: Tensor) -> Tensor:
    """The value on the weight's device, in its dtype and sharded to match."""
    sharding = sharding_of(weight)
    if sharding is None:
        return value.to(weight)
    return sharding.distribute(value[sharding.local_box()].clone().to(weight.device, weight.dtype))


def _equal(node: Any, other: Any) -> bool:
    """Whether two nodes compute the same."""
    if type(node) is not type(other) or getattr(node, "scale", None) != getattr(other, "scale", None):
        return False
    ours, theirs = tree.flatten({"x": node}), tree.flatten({"x": other})
    return ours.keys() == theirs.keys() and all(torch.equal(ours[path], theirs[path]) for path in ours)


def _parsed(name: str) -> tuple[str, str]:
    """(module, what the tensor is) by its name; (name, "") of a parameter trained in full."""
    for ending, part in _ENDINGS.items():
        default = re.sub(r"(lora_(?:embedding_)?[A-Za-z]+)", r"\1.default", ending)  # with PEFT's name of an adapter
        for form in (ending, default):
            if name.endswith(f".{form}"):
                return name.removesuffix(f".{form}"), part
    return name, ""


def _renaming(layout: Layout, names: Collection[str]) -> tuple[str, str]:
    """(pattern, replacement) that make a file's names the model's, which may be of a bare ...Model or of a wrapper.

    The first lack the first part of all names, which it adds; those of the text in a wrapper begin with its name there.
    """
    known = {module for modules in (layout.memory, layout.files) for module in (*modules.linear, *modules.stacked)}
    modules = {re.sub(rf"(\{INNER})+$", "", _parsed(name.removeprefix(PREFIX))[0]) for name in names}
    changes = [("^", ""), (_TEXT_IN_WRAPPER, "model.")]
    changes += [("^", prefix) for prefix in sorted({module.partition(".")[0] + "." for module in known})]
    fits = (change for change in changes if any(re.sub(*change, module) in known for module in modules))
    return next(fits, changes[0])
