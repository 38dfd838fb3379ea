"""What autograd keeps of a layer and of the head: both run once, on meta tensors of the shapes that a rank has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.leaf import Leaf
from fnmodels.tree import Tree
from params.sharding import Sharding
from train.head import head_loss
from train.parallel.mesh import Mesh

from .facts import Work
from .pieces import gathered_shape


@dataclass(frozen=True)
class Layer:
    """One layer, on one rank, for one microbatch: bytes that autograd keeps, and those of what travels."""

    saved: int
    keys: int  # keys and values
    chosen: int  # rows that go to experts; 0 in a dense layer
    scores: int  # their weights


def saved_bytes(run: Callable[[], Any], given: Sequence[Tensor] = ()) -> int:
    """Bytes of the tensors that autograd keeps of what `run` does, each storage once and without those of `given`."""
    known = {tensor.untyped_storage()._cdata for tensor in given}
    kept: dict[int, Any] = {}  # the storage itself too, so that its address is not used again

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    size = sum(storage.nbytes() for storage in kept.values())
    del out
    return size


def _on_meta(leaf: Leaf, sharding: Sharding, *, dtype: torch.dtype) -> Tensor:
    """What a rank computes with, without values."""
    made = torch.empty(gathered_shape(sharding), dtype=dtype if leaf.trainable else leaf.dtype, device="meta")
    return made.requires_grad_(leaf.trainable)


def layer_kept(
    config: Any, spec: Tree, plan: Tree, index: int, shape: tuple[int, int], mesh: Mesh, work: Work
) -> Layer:
    """One layer run on meta, with the heads, columns and experts of one rank."""
    layer = tree.map(functools.partial(_on_meta, dtype=work.dtype), spec["layers"][index], plan["layers"][index])
    x = torch.empty(*shape, config.hidden_size, dtype=work.dtype, device="meta", requires_grad=True)
    tokens = torch.zeros(shape, dtype=torch.long, device="meta")
    inputs, masks, freqs = fnmodels.prepare(
        config, tokens, positions=tokens, segment_ids=torch.ones_like(tokens), length=work.length
    )
    keys: list[int] = []
    chosen: list[int] = [0, 0]

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> Tensor:
        keys.append((k.numel() + v.numel()) * k.element_size())
        groups = q.shape[2] // k.shape[2] or 1
        if q.shape[2] % k.shape[2]:  # fewer KV heads than ranks: all are held, those of this rank's queries are used
            k, v = k[:, :, :groups], v[:, :, :groups]
        if mesh.cp > 1:
            k, v = k.repeat(1, mesh.cp, 1, 1), v.repeat(1, mesh.cp, 1, 1)
        out: Tensor = _Flash.apply(q, k, v)[0]
        return out

    def experts(leaves: Tree, x: Tensor, weights: Tensor, indices: Tensor, _: Tensor, **how: Any) -> Tensor:
        chosen[:] = indices.numel() * x.shape[-1] * x.element_size(), weights.numel() * weights.element_size()
        return _even_experts(leaves, x, weights, indices, **how)

    run = functools.partial(
        fnmodels.run_layers,
        {"layers": {index: layer}},
        x,
        masks,
        freqs,
        index,
        index + 1,
        config=config,
        kernel=kernel if work.kernel == "flash" else work.kernel,
        valid=inputs["valid"],
        experts=experts,
    )
    given = [*tree.leaves(layer), *inputs.values(), *tree.leaves(masks), *tree.leaves(freqs)]
    return Layer(saved_bytes(run, given), sum(keys), *chosen)


def head_kept(config: Any, spec: Tree, plan: Tree, shape: tuple[int, int], work: Work) -> int:
    """Bytes that the loss keeps: the final hidden states and its gradients, which it makes at once."""
    outside = {name: leaf for name, leaf in spec.items() if name != "layers"}
    shards = {name: leaf for name, leaf in plan.items() if name != "layers"}
    params = tree.map(functools.partial(_on_meta, dtype=work.dtype), outside, shards)
    x = torch.empty(*shape, config.hidden_size, dtype=work.dtype, device="meta", requires_grad=True)
    labels = torch.zeros(shape, dtype=torch.long, device="meta")
    given = [labels, *tree.leaves(params)]
    return saved_bytes(lambda: head_loss(params, x, labels, config=config)[0], given)


class _Flash(torch.autograd.Function):
    """Shapes of a fused attention, and what it keeps: its arguments, its result, a number per query and head."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, *output)


def _even_experts(
    leaves: Mapping[str, Tensor], x: Tensor, weights: Tensor, indices: Tensor, *, act: Any, input_weighted: bool = False
) -> Tensor:
    """Shapes of the experts that a rank holds where all get equally many tokens."""
    here, k = leaves["gate_proj"].shape[0], indices.shape[1]
    each = -(-indices.numel() // here)
    rows = x.repeat(-(-each * here // len(x)), 1)[: each * here].unflatten(0, (here, each))

    def linear(rows: Tensor, name: str) -> Tensor:
        y = rows @ leaves[f"{name}_proj"].mT
        return y + leaves[f"{name}_bias"][:, None] if f"{name}_bias" in leaves else y

    y = linear(act(linear(rows, "gate"), linear(rows, "up")), "down")
    y = y.flatten(0, 1)[: indices.numel()].unflatten(0, (len(x), k))
    return y.sum(1) if input_weighted else (y * weights.to(y.dtype)[..., None]).sum(1)
