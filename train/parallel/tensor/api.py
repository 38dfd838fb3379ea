"""Tensor parallelism: the ranks of a group have the same tokens and share heads, MLP widths and vocabulary.

    devices = Mesh(tp=4).device_mesh()
    placements = params.plan(family.spec(config), Rules(tensor_axes(config)), devices)
    tensor = tensor_parallel(config, placements)
    total, count = next_token_loss(tensor.outside(params), batch, config=config, layer_fn=tensor.layer_fn)

The family's own block runs unchanged on this rank's shards, as plain tensors: it reads the number of heads from their
shapes. Communication is in wrappers of the parameters (`leaf_wrappers`), whose roles `leaf_roles` derives from logical
axes. Every operation and kernel of every family therefore works, and nothing is dispatched through DTensor, which lacks
rules for some operations, silently gathers for others, and multiplies the time of small ones. One rule covers
gradients: a replicated parameter that is used inside the region gets a partial gradient on each rank, and
`Region.shared` sums these. A layer takes four reductions, two in each direction.

sequence=True (sequence parallelism, arXiv 2205.05198) also shards the residual stream along the sequence: `enter`
gathers and `leave` scatters, so that activations between the sublayers, and those that remat keeps, take 1 / size of
the memory; all parameters used there get partial gradients.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fnmodels import Cache, family_of, tree
from fnmodels.models.common import mtp
from fnmodels.models.common.carried import shares_rows
from fnmodels.models.common.family import DecoderConfig, field_of, stored_layers, traits_of
from fnmodels.models.common.spec import Leaf
from fnmodels.ops.dropout import Noise
from fnmodels.options import Block, ForwardOptions, LayerFn
from fnmodels.tree import Tree
from params import lora
from params.axes import EXPERT_MLP, HEADS, LINEAR_HEADS, MLP, NGRAM, SHIFTED, VOCAB, regions_of
from params.quantized.kept import KeptWeight
from params.sharding import Sharding
from train.comm import collectives
from train.comm.dtensor import is_dtensor
from train.comm.region import Region
from train.losses.indexers.teaching import TeachIndexers
from train.losses.vocab_parallel import Vocab
from train.parallel.ngram_tables import ShardedTable, TableRows

from . import taps
from .cache import CacheShards, cache_shards
from .head_choices import of_all_heads, of_own_heads
from .leaf_roles import SHARDED, Use, path_in_layer, sharded_dims, uses_of
from .leaf_wrappers import NODES, RegionEntry, width_sharded_experts

# The entries of a block's keywords and aux that are not of the residual stream: attention has all positions.
_WHOLE = ("cache", "choices", "chosen", "edit_tensors", "edited", "indexer_kl", "kv")
_STORED = ".parts."  # in the paths of the tensors of a weight that is kept as a file stores it


def tensor_axes(config: DecoderConfig, dim: str = "tp") -> dict[str, str]:
    """The axes for `params.Rules`: those of a family's parameters that tensor parallelism shards."""
    axes = {axis for leaf in tree.leaves(family_of(config).spec(config)) for axis in leaf.axes}
    return {axis: dim for axis in SHARDED if axis in axes}


@dataclass(frozen=True)
class TensorParallel:
    """The `layer_fn` of a loss over `tp`, and its params outside of layers. Made by `tensor_parallel`."""

    region: Region
    uses: Mapping[type, Mapping[str, Mapping[str, Use]]]  # by class of a tower's config, kind of layer and path in it
    sharded: frozenset[str]  # logical axes
    shards: CacheShards
    tables: tuple[int, ...]  # the rows of each table of n-grams that the embedding reads
    partial: frozenset[str] = frozenset()  # leaves outside of layers that act within a region of heads
    shares_tables: bool = False  # whether what layers share are tables that attention reads, with all positions

    def layer_fn(self, block: Block, around: LayerFn | None = None) -> Block:
        """For `fnmodels.forward`: the block on this rank's shards. around: other wrappers (remat, compilation).

        `around` receives a partial with hashable arguments, so that equal blocks are compiled once. Under `sequence`
        every layer, the first too, receives this rank's positions.
        """
        if not isinstance(block, functools.partial) or block.args:
            raise TypeError("Tensor parallelism wraps the family's own block: apply other wrappers after it.")
        # The first kind with these uses, so that kinds which differ in data alone share a graph.
        kinds = self.uses[type(block.keywords["config"])]
        like = next(kind for kind, uses in kinds.items() if uses == kinds[block.keywords["kind"]])
        own: Block = functools.partial(self._run, block.func, tuple(block.keywords.items()), like)
        own = own if around is None else around(own)
        if not self.region.sequence:
            return own
        if "use" in block.keywords:  # which blocks have that extend a cache
            raise ValueError("sequence=True shards positions, and steps on a cache have too few: use sequence=False.")

        def run(layer: Tree, x: Tensor, mask: Any, freqs: Any, **more: Any) -> tuple[Tensor, dict[str, Tensor]]:
            x, more = self._positions(x, tree.leaves(freqs)[0].shape[1], more)
            return own(layer, x, mask, freqs, **more)

        return run

    def _run(
        self,
        block: Callable[..., tuple[Tensor, dict[str, Tensor]]],
        bound: tuple[tuple[str, Any], ...],
        like: str,
        layer: Tree,
        x: Tensor,
        mask: Any,
        freqs: Any,
        **more: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        how = dict(bound)
        uses = self.uses[type(how["config"])][like]
        here = self._layer(layer, uses)
        names = {*how.get("taps", ()), *(edit.tap for edit in how.get("edits", ()))}
        gathered = taps.inside(names, uses) if names else []
        if gathered:
            made = taps.context(self.region, how["config"], how["kind"], gathered)
            how["options"] = dataclasses.replace(how["options"], context=made)
        if "noise" in more:
            heads, neurons = (self.region.rank if part in self.sharded else 0 for part in (HEADS, MLP))
            more["noise"] = dataclasses.replace(more["noise"], head_shard=heads, mlp_shard=neurons)
        if "valid" in more and EXPERT_MLP in self.sharded:
            options: ForwardOptions = how["options"]
            inner = functools.partial(width_sharded_experts, self.region, experts=options.expert_path)
            inner.invariant = options.invariant  # type: ignore[attr-defined]
            how["options"] = dataclasses.replace(options, experts=inner)
        heads = field_of(how["config"], "choice_heads") if HEADS in self.sharded else 0
        teaching = how["options"].context
        if isinstance(teaching, TeachIndexers):
            how["options"] = dataclasses.replace(how["options"], context=teaching.over_heads(self.region, heads))
        if heads and more.get("choices") is not None:
            more["choices"] = of_own_heads(more["choices"], heads, self.region)
        x, aux = block(here, x, mask, self._of_heads(freqs), **how, **more)
        for name in ("chosen", "choices"):
            if heads and name in aux:
                aux[name] = of_all_heads(aux[name], heads, self.region)
        whole = (*_WHOLE, *gathered)
        return x, {name: value if name in whole else self._tap(value) for name, value in aux.items()}

    def _of_heads(self, freqs: Any) -> Any:
        """The tables with the slopes of this rank's heads (ALiBi, lightning attention)."""
        if not self.sharded & {HEADS, LINEAR_HEADS} or not isinstance(freqs, Mapping) or "slopes" not in freqs:
            return freqs
        return {**freqs, "slopes": freqs["slopes"].chunk(self.region.size, -1)[self.region.rank]}

    def key_heads(self, count: int) -> int:
        """The number of a layer's `count` key heads that this rank has: one at least, where query heads are sharded."""
        return max(count // self.region.size, 1) if HEADS in self.sharded else count

    def width(self, size: int, axis: str) -> int:
        """The entries that this rank has of an axis of `size` in its layers."""
        return size // self.region.size if axis in self.sharded else size

    def cache(self, cache: Cache) -> Cache:
        """This rank's heads and channels of a cache of `fnmodels.init_cache`; latents, which all heads share, are
        replicated.
        """
        layers = tuple(starmap(self.shards.own, enumerate(cache.layers)))
        slots = tree.map(Tensor.clone, cache.slots)  # steps write into them
        return dataclasses.replace(cache, layers=layers, slots=slots)

    def outside(self, params: Mapping[str, Tree]) -> dict[str, Tree]:
        """The params with those outside of layers as local tensors, and embedding and head as `Vocab`."""
        made: dict[str, Tree] = {}
        for name, leaf in params.items():
            if isinstance(leaf, Mapping) and "layers" in leaf:  # a stack or a tower
                made[name] = self.outside(leaf)
                continue
            leaf = leaf if name == "layers" else tree.map(local, leaf)
            if name in ("embed_tokens", "lm_head") and VOCAB in self.sharded:
                leaf = self._vocab(name, leaf)
            elif name == "ngrams" and NGRAM in self.sharded:
                tables = zip(leaf["tables"], self.tables, strict=True)
                leaf = leaf | {"tables": [TableRows(table, self.region, rows, of_all=True) for table, rows in tables]}
            elif name in self.partial:
                leaf = self.region.shared(leaf)
            elif (name.startswith(("norm", "score")) or name == "head") and self.region.sequence:
                leaf = tree.map(self.region.shared, leaf)
            elif name == "mtp":
                leaf = [{n: self._of_head(n, part) for n, part in head.items()} for head in leaf]
            made[name] = leaf
        return made

    def _of_head(self, name: str, leaf: Any) -> Any:
        """A part of an MTP head: its block is as layers are, and its output head as the model's."""
        if name == "lm_head" and VOCAB in self.sharded:
            return self._vocab("mtp.*.lm_head", leaf)
        whole = name == "block" or not self.region.sequence
        return leaf if whole else tree.map(self.region.shared, leaf)  # of a weight with its adapter too

    def _vocab(self, name: str, leaf: Any) -> Vocab:
        """A table of tokens as this rank's rows. ValueError if it has an adapter."""
        if isinstance(leaf, lora.Lora):
            raise ValueError(
                f"{name} has an adapter, and over 'tp' the vocabulary is sharded, where adapters are not known: leave "
                "it out of their targets, or vocab out of the rules."
            )
        return Vocab(leaf, self.region)

    def _layer(self, layer: Tree, uses: Mapping[str, Use]) -> Tree:
        """The layer's local tensors, wrapped according to their roles."""
        flat = tree.flatten(layer)
        plain = [path for path in flat if _STORED not in path]  # of a kept weight, parts have no gradient
        unknown = [path for path in flat if path.partition(_STORED)[0] not in uses]
        if unknown:
            raise ValueError(f"A layer has the leaf {unknown[0]!r}, which is not in the plan.")
        flat = {path: local(leaf) for path, leaf in flat.items()}
        shared = {path: flat[path] for path in plain if uses[path].shared}
        for path in [path for path, leaf in shared.items() if isinstance(leaf, ShardedTable)]:
            flat[path] = shared.pop(path).shared(self.region)
        for dtype in {leaf.dtype: None for leaf in shared.values()}:
            alike = {path: leaf for path, leaf in shared.items() if leaf.dtype == dtype}
            flat |= zip(alike, self.region.all_shared(list(alike.values())), strict=True)
        entry = RegionEntry(self.region)
        flat |= {path: uses[path].own(flat[path]) for path in plain}
        used = iter(flat.values())

        def standing(path: str, leaf: Any) -> Any:  # a tensor, or a weight with its adapter
            kind = uses[path].kind
            if kind == "table":
                return TableRows(leaf, self.region, uses[path].full)
            leaf = _kept_rows(uses[path], leaf)
            return leaf if kind == "plain" else NODES[kind](leaf, entry)

        return lora.map_leaves(standing, tree.map(lambda _: next(used), layer))

    def _positions(self, x: Tensor, length: int, more: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """This rank's positions of x, if x has all of them (before the first layer), and of the other arguments."""
        if length % self.region.size:
            raise ValueError(
                f"sequence=True shards rows of {length} tokens among {self.region.size} processes, which does not go; "
                "pad the rows to a multiple."
            )
        if x.shape[1] == length:
            x = self.region.cut(x)
        own = slice(self.region.rank * x.shape[1], (self.region.rank + 1) * x.shape[1])

        def mine(name: str, value: Any) -> Any:
            if value is None or name in _WHOLE or (name == "shared" and self.shares_tables):
                return value
            if name == "shared":  # of each token, see `Traits.reads_ids`
                return tree.map(lambda of_tokens: mine("", of_tokens), value)
            if isinstance(value, Noise):  # attention has all positions, and an MLP of which each rank has some neurons
                neurons = value.neurons if MLP in self.sharded else value.neurons[:, own]
                return dataclasses.replace(value, tokens=value.tokens[:, own], neurons=neurons)
            return self.region.cut(value) if value.is_floating_point() else value[:, own]

        return x, {name: mine(name, value) for name, value in more.items()}

    def _tap(self, value: Tensor) -> Tensor:
        """An entry of a block's aux for all positions; counts, which have no sequence dimension, are summed."""
        if value.ndim > 1 or not self.region.sequence:
            return self.region.join(value)
        return collectives.summed(value, self.region.group)


def tensor_parallel(config: DecoderConfig, placements: Tree, *, sequence: bool = False) -> TensorParallel:
    """The `TensorParallel` of a config and its placements; made once, on all ranks alike.

    placements: `params.plan` with `tensor_axes` on a DeviceMesh. sequence: shards the sequence dimension of the
    residual stream too; `fnmodels.hidden` then returns this rank's positions, which `region.join` gathers. ValueError,
    before any communication, for a plan or a family that cannot run so.
    """
    family = family_of(config)
    if sequence and shares_rows(family):
        raise ValueError(
            f"The layers of a {config.model_type} read tensors of full rows beside the residual stream, of which "
            "sequence=True has pieces: use sequence=False."
        )
    spec, plans = tree.flatten(family.spec(config)), _by_weight(lora.weights(placements))
    if spec.keys() != plans.keys():
        raise ValueError("The plan is of another model than the config: make it by params.plan(family.spec(config)).")
    dims, sharded = sharded_dims(spec, plans, sequence=sequence)
    if sequence and any(SHIFTED in leaf.axes for leaf in spec.values()):
        raise ValueError(
            f"The layers of a {config.model_type} read the token before each one, of which sequence=True has some on "
            "another process: use sequence=False."
        )
    mesh = next(iter(plans.values())).mesh
    if mesh is None:
        raise ValueError("The plan was made from sizes alone; make it with the DeviceMesh.")
    group = mesh.get_group("tp")
    region = Region(group, dist.get_rank(group), dist.get_world_size(group), sequence)
    uses = {
        type(own): uses_of(leaves, dims, sharded, region, kinds, _kinds_of_heads(own))
        for own, leaves, kinds in _towers(config, spec)
    }
    kinds = family.kinds(config)
    own, stored = uses.get(type(config), {}), stored_layers(config, kinds)
    shards = cache_shards(spec, dims, own, kinds, stored, sharded, region)
    # not those that are sharded by heads themselves, such as tables of relative biases
    partial = frozenset(
        p for p, leaf in spec.items() if "." not in p and dims[p] is None and regions_of(leaf.axes) & sharded
    )
    tables = tuple(leaf.shape[0] for path, leaf in spec.items() if NGRAM in leaf.axes and path_in_layer(path) is None)
    return TensorParallel(region, uses, sharded, shards, tables, partial, traits_of(family).shares_tables)


def _by_weight(placements: Tree) -> dict[str, Sharding]:
    """{path: sharding}, of a weight kept as a file stores it that of the weight."""
    found: dict[str, Sharding] = {}
    lora.map_leaves(lambda path, how: found.setdefault(path, getattr(how, "sharding", how)), placements)
    return found


def _kept_rows(use: Use, leaf: Any) -> Any:
    """The leaf, with the rows that this rank uses where its weight is kept as a file stores it."""
    if isinstance(leaf, lora.Lora):
        return dataclasses.replace(leaf, weight=_kept_rows(use, leaf.weight))
    return use.own(leaf) if isinstance(leaf, KeptWeight) else leaf


def _towers(
    config: DecoderConfig, spec: Mapping[str, Leaf]
) -> Iterator[tuple[Any, dict[str, Leaf], list[tuple[str, ...]]]]:
    """(config, leaves, kinds under which each layer runs) of each tower, which has heads of its own; of the model if it
    has none."""
    family: Any = family_of(config)
    towers = family.towers(config) if hasattr(family, "towers") else {"": config}
    for name, own in towers.items():
        prefix = f"{name}." if name else ""
        yield own, {path: leaf for path, leaf in spec.items() if path.startswith(prefix)}, _kinds_of_layers(own)


def _kinds_of_layers(config: DecoderConfig) -> list[tuple[str, ...]]:
    """The kinds under which each layer of the params runs: one, or those of its passes."""
    kinds = family_of(config).kinds(config)
    stored = stored_layers(config, kinds)
    pairs = list(dict.fromkeys(zip(stored, kinds, strict=True)))
    return [tuple(kind for at, kind in pairs if at == layer) for layer in range(max(stored) + 1)]


def _kinds_of_heads(config: DecoderConfig) -> tuple[str, ...]:
    """The kinds of the layers of an MTP head's block, of a config that has heads."""
    return mtp.kinds_of(config) if field_of(config, "num_nextn_predict_layers") else ()


def local(leaf: Any) -> Tensor:
    """This rank's shard of a DTensor over `tp` alone, differentiably; other tensors unchanged.

    ValueError for a DTensor that other mesh dimensions of more than one rank hold too.
    """
    if not is_dtensor(leaf):
        return leaf
    mesh = leaf.device_mesh
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    others = [name for name, size in sizes.items() if name != "tp" and size > 1]
    if others:
        raise ValueError(f"A leaf lies on the mesh dimension {others[0]!r} too: gather it over that one first.")
    part: Tensor = leaf.to_local(grad_placements=leaf.placements)
    return part
