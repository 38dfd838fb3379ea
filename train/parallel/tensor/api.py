"""Tensor parallelism: the processes of a group have the same tokens, and each has some heads and columns of each layer.

    devices = Mesh(tp=4).device_mesh()
    placements = params.plan(family.spec(config), Rules(tensor_axes(config)), devices)
    tensor = tensor_parallel(config, placements)
    total, count = tensor.run(next_token_loss)(params, batch, config=config)

which is `next_token_loss(tensor.outside(params), batch, config=config, layer_fn=tensor.layer_fn)`.

The family's own block runs unchanged on this process' part of the leaves, as plain tensors: it reads the number of
heads from their shapes. What it must not know stands in the leaves, as an adapter does (`params.lora`): in F.linear,
one that reads the residual stream enters the region first, and one that writes to it leaves (`region`, `nodes`); which
of the two a leaf does, its axes say (`uses`). So every operation and kernel of every family works, no operation is
dispatched through DTensor (which has no rule for some, gathers in silence for others, and takes many times a small
operation's time), and one rule holds for gradients: a leaf of which every process holds all, used inside, gets a
partial one in each, and `Region.shared` adds them up. A layer takes four reductions, two in each direction.

sequence=True (arXiv 2205.05198) divides the columns of the stream besides: `enter` gathers and `leave` scatters, so
that what lies between the sublayers, and what remat keeps, is 1 / size as long; all leaves used there get partial
gradients.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fnmodels import family_of, tree
from fnmodels.models.common.context import ATTENTION_TAPS
from fnmodels.options import Block, ForwardOptions, LayerFn
from fnmodels.run_params import RunParams
from fnmodels.tree import Tree
from params import lora
from train.dist import collectives
from train.dist.dtensor import is_dtensor
from train.dist.region import Region
from train.losses.model_loss import RunOptions
from train.losses.vocab_parallel import Vocab

from .leaf_roles import DIVIDED, Use, check_divided, divided_dims, uses_of
from .leaf_wrappers import NODES, Entry, columns_of_experts


def tensor_axes(config: Any, dim: str = "tp") -> dict[str, str]:
    """The axes for `params.Rules`: what of a family's leaves tensor parallelism divides."""
    axes = {axis for leaf in tree.leaves(family_of(config).spec(config)) for axis in leaf.axes}
    return {axis: dim for axis in DIVIDED if axis in axes}


@dataclass(frozen=True)
class TensorParallel:
    """What a loss function needs: `layer_fn`, and `outside` for the params, or `run`. Made by `tensor_parallel`."""

    region: Region
    uses: Mapping[str, Use]  # by path within a layer
    divided: frozenset[str]  # the axes
    dim: str  # of the mesh

    def run(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """function(params, ...) on this process' shards; the result takes a `layer_fn` (remat) too."""

        def run(params: Tree, *args: Any, layer_fn: LayerFn | None = None, **more: Any) -> Any:
            options = RunOptions(outer=layer_fn, tensor=self.layer_fn)
            return function(RunParams(self.outside(params), options), *args, **more)

        return run

    def layer_fn(self, block: Block, around: LayerFn | None = None) -> Block:
        """For `fnmodels.forward`: the block on this process' part. around: other wrappers (remat, compilation).

        These get a partial again, of what is hashable, so that equal ones are compiled once; and under `sequence` every
        layer as one of own columns, the first too.
        """
        if not isinstance(block, functools.partial) or block.args:
            raise TypeError("Tensor parallelism wraps the family's own block: apply other wrappers after it.")
        within = set(ATTENTION_TAPS) & set(block.keywords.get("taps", ()))
        if within and "heads" in self.divided:
            raise ValueError(
                f"The taps {', '.join(sorted(within))} are of single heads, of which each process has some; ask for "
                "them without tensor parallelism."
            )
        own: Block = functools.partial(self._run, block.func, tuple(block.keywords.items()))
        own = own if around is None else around(own)
        if not self.region.sequence:
            return own

        def run(layer: Tree, x: Tensor, mask: Any, freqs: Any, **more: Any) -> tuple[Tensor, dict[str, Tensor]]:
            x, more = self._columns(x, tree.leaves(freqs)[0].shape[1], more)
            return own(layer, x, mask, freqs, **more)

        return run

    def _run(
        self,
        block: Callable[..., tuple[Tensor, dict[str, Tensor]]],
        bound: tuple[tuple[str, Any], ...],
        layer: Tree,
        x: Tensor,
        mask: Any,
        freqs: Any,
        **more: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        here, how = self._layer(layer), dict(bound)
        if "valid" in more and "expert_mlp" in self.divided:
            options: ForwardOptions = how["options"]
            inner = functools.partial(columns_of_experts, self.region, experts=options.experts, kernel=options.kernel)
            how["options"] = dataclasses.replace(options, experts=inner)
        x, aux = block(here, x, mask, freqs, **how, **more)
        return x, {name: self._tap(value) for name, value in aux.items()}

    def outside(self, params: Mapping[str, Tree]) -> dict[str, Tree]:
        """The params with what is outside of layers as plain tensors of this process, embedding and head as `Vocab`."""
        made: dict[str, Tree] = {}
        for name, leaf in params.items():
            leaf = leaf if name == "layers" else tree.map(functools.partial(local, dim=self.dim), leaf)
            if name in ("embed_tokens", "lm_head") and "vocab" in self.divided:
                if isinstance(leaf, lora.Lora):
                    raise ValueError(
                        f"{name} has an adapter, and over {self.dim!r} the vocabulary is divided, where adapters are "
                        "not known: leave it out of their targets, or vocab out of the rules."
                    )
                leaf = Vocab(leaf, self.region)
            elif name.startswith("norm") and self.region.sequence:
                leaf = self.region.shared(leaf)
            elif name == "mtp" and self.region.sequence:
                leaf = [{n: x if n == "block" else self.region.shared(x) for n, x in head.items()} for head in leaf]
            made[name] = leaf
        return made

    def whole(self, x: Tensor) -> Tensor:
        """The stream with all its columns, as layers of another stage take it."""
        return self.region.join(x)

    def _layer(self, layer: Tree) -> Tree:
        """The layer as the block is to see it, with leaves that know where they stand."""
        flat = tree.flatten(layer)
        unknown = [path for path in flat if path not in self.uses]
        if unknown:
            raise ValueError(f"A layer has the leaf {unknown[0]!r}, which is not in the plan.")
        flat = {path: local(leaf, self.dim) for path, leaf in flat.items()}
        shared = {path: leaf for path, leaf in flat.items() if self.uses[path].shared}
        for dtype in {leaf.dtype: None for leaf in shared.values()}:
            alike = {path: leaf for path, leaf in shared.items() if leaf.dtype == dtype}
            flat |= zip(alike, self.region.all_shared(list(alike.values())), strict=True)
        entry = Entry(self.region)
        used = iter([self.uses[path].own(leaf) for path, leaf in flat.items()])

        def standing(path: str, leaf: Any) -> Any:  # a leaf, or a weight with its adapter
            kind = self.uses[path].kind
            return leaf if kind == "plain" else NODES[kind](leaf, entry)

        return lora.map_leaves(standing, tree.map(lambda _: next(used), layer))

    def _columns(self, x: Tensor, length: int, more: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """This process' columns: of the stream where it comes whole, before the first layer, and of the rest."""
        if length % self.region.size:
            raise ValueError(
                f"sequence=True divides rows of {length} tokens among {self.region.size} processes, which does not go; "
                "pad the rows to a multiple."
            )
        if x.shape[1] == length:
            x = self.region.cut(x)
        own = slice(self.region.rank * x.shape[1], (self.region.rank + 1) * x.shape[1])
        return x, {name: value if value is None else value[:, own] for name, value in more.items()}

    def _tap(self, value: Tensor) -> Tensor:
        """What a block returns beside x, of all columns; counts, which have none, add up."""
        if value.ndim > 1 or not self.region.sequence:
            return self.whole(value)
        return collectives.summed(value, self.region.group)


def tensor_parallel(config: Any, placements: Tree, *, dim: str = "tp", sequence: bool = False) -> TensorParallel:
    """Made once, by all processes alike. placements: `params.plan` with `tensor_axes` on a DeviceMesh.

    dim: the mesh dimension of the processes that share tokens. sequence: divide the stream's columns too; what
    `fnmodels.hidden` returns is then this process' part, as are the taps between layers, and `whole` joins it.
    ValueError in a sentence, before anything is sent, for a plan or a family that cannot run so.
    """
    family = family_of(config)
    spec, plans = tree.flatten(family.spec(config)), tree.flatten(lora.weights(placements))
    if spec.keys() != plans.keys():
        raise ValueError("The plan is of another model than the config: make it by params.plan(family.spec(config)).")
    where = divided_dims(plans, dim)
    divided = frozenset(leaf.axes[n] for path, leaf in spec.items() if (n := where[path]) is not None)
    sharding = next(iter(plans.values()))
    check_divided(spec, where, divided, dim, dict(sharding.sizes)[dim], sequence)
    if sharding.mesh is None:
        raise ValueError("The plan was made from sizes alone; make it with the DeviceMesh.")
    group = sharding.mesh.get_group(dim)
    region = Region(group, dist.get_rank(group), dist.get_world_size(group), sequence)
    return TensorParallel(region, uses_of(spec, where, divided, region), divided, dim)


def local(leaf: Any, dim: str = "tp") -> Tensor:
    """This process' part of a leaf that is a DTensor over `dim` alone, with the gradient of that part; others as is."""
    if not is_dtensor(leaf):
        return leaf
    mesh = leaf.device_mesh
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    others = [name for name, size in sizes.items() if name != dim and size > 1]
    if others:
        raise ValueError(f"A leaf lies on the mesh dimension {others[0]!r} too: gather it over that one first.")
    part: Tensor = leaf.to_local(grad_placements=leaf.placements)
    return part
