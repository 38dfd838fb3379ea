"""Modules over a params tree, for FSDP2 (`fully_shard`) and other code that expects hooks on an nn.Module.

    model = Model(params, spec)                                   # a module per dict of the tree
    shard(model, mesh.device_mesh(), dtype=torch.bfloat16)        # torch's fully_shard, of each layer and of the rest
    total, count = model(functools.partial(next_token_loss, config=config), rows)
    (total / global_count).backward()                             # gradients are sums over all ranks
    torch.optim.AdamW(model.parameters()).step()

A module holds parameters and computes nothing itself: its forward passes their tree to the function that it is given.
Hooks that gather parameters therefore run around each layer, and the block inside sees plain tensors.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fnmodels import tree
from fnmodels.options import Block, LayerFn
from fnmodels.run_params import RunParams
from fnmodels.tree import Tree
from train.run_options import Blocks, RunOptions

from .mesh import mesh_of


class Branch(nn.Module):
    """A dict or list of parameters, named as in the tree: "attention.q_proj". Parameters share the tree's memory.

    trains: a tree of bools, whether each parameter has a gradient.
    """

    def __init__(self, values: Tree, trains: Tree) -> None:
        super().__init__()
        self.kind = type(values)
        for name, value in _items(values):
            learns = trains[name] if isinstance(values, Mapping) else trains[int(name)]
            if isinstance(value, Tensor):
                self.register_parameter(name, nn.Parameter(value, requires_grad=learns))
            else:
                self.add_module(name, Branch(value, learns))

    def tree(self) -> Tree:
        """The current parameters: shards, or full tensors inside FSDP's hooks."""
        branches = {name: child.tree() for name, child in self._modules.items() if isinstance(child, Branch)}
        values: dict[str, Any] = {**self._parameters, **branches}
        return values if self.kind is dict else [values[name] for name in sorted(values, key=int)]

    def forward(self, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
        """Calls function(tree, ...) with the current parameters."""
        return function(self.tree(), *args, **more)


class Model(Branch):
    """A full params tree with its "layers".

    spec: the family's, which decides what has a gradient, and what must keep its dtype: `kept`, parameters that are not
    trainable, and `wide`, paths of trainable ones.
    """

    def __init__(self, params: Tree, spec: Tree) -> None:
        super().__init__(params, tree.map(lambda leaf: leaf.trainable, spec))
        leaves = tree.flatten(spec)
        keeps = {path: parameter for path, parameter in self.named_parameters() if leaves[path].keep_dtype}
        self.kept = {parameter for path, parameter in keeps.items() if not leaves[path].trainable}
        self.wide = [path for path in keeps if leaves[path].trainable]

    def forward(self, function: Callable[..., Any], *args: Any, layer_fn: LayerFn | None = None, **more: Any) -> Any:
        """function(params, ...) with each layer as its module, which fnmodels calls around the block.

        layer_fn: one more wrapper around the block, on the layer's tensors: remat inside FSDP's hooks, as FSDP2
        requires.
        """

        def through_modules(block: Block) -> Block:
            inner = block if layer_fn is None else layer_fn(block)
            return lambda layer, *args, **more: layer(inner, *args, **more)

        branches = {n: c.tree() for n, c in self._modules.items() if isinstance(c, Branch) and n != "layers"}
        given = {**self._parameters, **branches, "layers": layers_of(self)}
        return function(RunParams(given, RunOptions(Blocks(outer=through_modules))), *args, **more)


def layers_of(model: Model) -> list[nn.Module]:
    """The modules of the layers, in order."""
    return list(model.get_submodule("layers").children())


def shard(model: Model, devices: DeviceMesh, *, dtype: torch.dtype | None = None) -> None:
    """torch's `fully_shard` of each layer and of the rest over `fsdp`, replicated over `dp` (HSDP) if dp > 1.

    Parameters are gathered in `dtype` (None: their own), gradients are reduced in fp32 at least, and inputs of a layer,
    such as rotary tables in fp32, are not cast. Gradients are summed and not averaged, since losses are sums.
    Untrainable parameters that keep their dtype (`selection_bias`) are left out
    and stay replicated. ValueError for a `dtype` if a trainable parameter keeps its own (ERNIE 4.5's router), which
    fully_shard would cast, and for a mesh with further dimensions, over which gradients would not be summed.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    more = {name: n for name, n in mesh_of(devices).sizes.items() if n > 1 and name not in ("dp", "fsdp")}
    if more:
        name, size = next(iter(more.items()))
        raise ValueError(
            f"{name} is {size}, but fully_shard is over dp and fsdp alone, and adds up gradients over these: take "
            "train.make_step(..., mesh=mesh), which knows all dimensions, or a mesh of dp and fsdp."
        )
    mesh = devices["dp", "fsdp"] if devices["dp"].size() > 1 else devices["fsdp"]
    if dtype is not None and model.wide:
        raise ValueError(
            f"{model.wide[0]} stays in fp32 in any model, and fully_shard would gather it in {dtype} with its layer: "
            "leave dtype out, or take train.make_step(..., mesh=mesh)."
        )
    dtypes = {parameter.dtype for parameter in model.parameters()} if dtype is None else {dtype}
    reduce_dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for parameter in model.kept:
        parameter.data = parameter.data.to(devices.device_type)  # as fully_shard does with the others
    for module in (*layers_of(model), model):
        fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=model.kept)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo lacks the reduction that applies a factor
            part.set_gradient_divide_factor(1.0)


def _items(values: Tree) -> list[tuple[str, Any]]:
    return list(values.items()) if isinstance(values, Mapping) else [(str(i), v) for i, v in enumerate(values)]
