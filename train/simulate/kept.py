"""What autograd keeps of each kind of layer and of the model's ends: each run once, on meta, in a rank's shapes."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import fnmodels
from fnmodels import tree
from fnmodels.front import Block
from fnmodels.leaf import Leaf
from fnmodels.ops.dispatch import combine
from fnmodels.ops.experts import grouped_experts, sorted_rows
from fnmodels.tree import Tree
from params.sharding import Sharding
from train.head import head_loss, head_name
from train.parallel import pipeline as pp
from train.parallel.mesh import Mesh

from .facts import Work
from .pieces import gathered_shape


@dataclass(frozen=True)
class Layer:
    """One layer, on one rank, for one microbatch: bytes that autograd keeps, and those of what travels."""

    saved: int  # without what it is given
    keeps_input: bool
    leaves: frozenset[str]  # paths of those that it keeps too
    keys: int  # keys and values
    chosen: int  # rows that go to experts; 0 in a dense layer
    scores: int  # their weights


@dataclass(frozen=True)
class Ends:
    """Bytes that autograd keeps of a microbatch in front of the layers and behind them, and leaves outside of them."""

    embedding: int
    head: int
    leaves: frozenset[str]


def saved_bytes(run: Callable[[], Any], given: Sequence[Tensor] = ()) -> int:
    """Bytes of the tensors that autograd keeps of what `run` does, each storage once and without those of `given`."""
    return _kept(run, given)[0]


def _kept(run: Callable[[], Any], given: Sequence[Tensor]) -> tuple[int, list[bool]]:
    """`saved_bytes`, and which of `given` it keeps besides; `run` may add to them."""
    holders = weakref.WeakSet[_Holder]()

    def pack(tensor: Tensor) -> _Holder:
        holder = _Holder(tensor.detach())
        holders.add(holder)
        return holder

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        out = run()
    # Those that are left: what a loss makes of each chunk on the way is gone.
    storages = [holder.tensor.untyped_storage() for holder in holders]
    kept = {storage._cdata: storage.nbytes() for storage in storages}
    del out
    known = [tensor.untyped_storage()._cdata for tensor in given]
    return sum(size for key, size in kept.items() if key not in known), [key in kept for key in known]


@dataclass(eq=False)
class _Holder:
    """As long as it is there, autograd keeps the tensor."""

    tensor: Tensor


def layer_kept(
    config: Any, spec: Tree, plan: Tree, index: int, shape: tuple[int, int], mesh: Mesh, work: Work
) -> Layer:
    """One layer run with the heads, columns and experts of one rank."""
    leaf = functools.partial(_in_layer, mesh=mesh, dtype=work.dtype)
    layer = tree.map(leaf, spec["layers"][index], plan["layers"][index])
    x, tokens = _stream(config, shape, work), torch.zeros(shape, dtype=torch.long, device="meta")
    inputs, masks, freqs = fnmodels.prepare(
        config, tokens, positions=tokens, segment_ids=torch.ones_like(tokens), length=work.length
    )
    keys: list[int] = []
    chosen: list[int] = [0, 0]

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> Tensor:
        keys.append((k.numel() + v.numel()) * k.element_size())
        if mesh.cp > 1:
            both = torch.cat((k, v), -1).repeat(1, mesh.cp, 1, 1)
            k, v = both.split((k.shape[-1], v.shape[-1]), -1)
        out: Tensor = _Flash.apply(q, k, v)[0]
        return out

    def experts(leaves: Tree, x: Tensor, weights: Tensor, indices: Tensor, valid: Tensor, **how: Any) -> Tensor:
        _check_grouped(leaves, mesh)
        chosen[:] = indices.numel() * x.shape[-1] * x.element_size(), weights.numel() * weights.element_size()
        with _Products():
            run = grouped_experts if mesh.ep == 1 else functools.partial(_exchanged, mesh.ep)
            return run(leaves, x, weights, indices, valid, **how)

    flat = tree.flatten(layer)
    given = [*flat.values(), *inputs.values(), *tree.leaves(masks), *tree.leaves(freqs)]

    def watched(block: Block) -> Block:
        def run(layer: Tree, x: Tensor, *args: Any, **more: Any) -> Any:
            given.append(x)  # here, for in front of the first layer padding is cleared
            return block(layer, x, *args, **more)

        return run

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
        layer_fn=watched,
        valid=inputs["valid"],
        experts=experts,
    )
    saved, kept = _kept(run, given)
    leaves = frozenset(path for path, is_kept in zip(flat, kept, strict=False) if is_kept)
    return Layer(saved, kept[-1], leaves, sum(keys), *chosen)


def ends_kept(config: Any, spec: Tree, plan: Tree, shape: tuple[int, int], mesh: Mesh, work: Work) -> Ends:
    """The embedding; and the head's loss, which keeps the final hidden states and its gradients, made at once."""
    outside = {name: leaf for name, leaf in spec.items() if name != "layers"}
    shards = {name: leaf for name, leaf in plan.items() if name != "layers"}
    params = tree.map(functools.partial(_on_meta, dtype=work.dtype), outside, shards)
    whole = torch.zeros(shape[0], shape[1] * mesh.cp, dtype=torch.long, device="meta")
    tokens, x = whole[:, : shape[1]], _stream(config, shape, work)  # columns, as cp cuts them: the loss copies labels
    inputs = {"tokens": tokens, "positions": tokens, "valid": tokens > 0}
    embed = functools.partial(fnmodels.family_of(config).embed, params, inputs, config=config)
    embedding = saved_bytes(embed, [*inputs.values(), *tree.leaves(params)])
    if mesh.tp > 1:  # ids counted from the rank's first row, and which of them are there
        embedding += tokens.numel() * (torch.long.itemsize + torch.bool.itemsize)
    last = {name: values for name, values in params.items() if mesh.pp == 1 or name in pp.ends(config)[1]}
    if mesh.tp > 1:  # the head is told of single leaves that are not divided, and of its own
        last = {
            name: values
            for name, values in last.items()
            if isinstance(values, Tensor) and (name != "embed_tokens" or name == head_name(config))
        }
    flat = tree.flatten(last)
    head, kept = _kept(lambda: head_loss(last, x, tokens, config=config)[0], [*flat.values(), tokens])
    return Ends(embedding, head, frozenset(path for path, is_kept in zip(flat, kept, strict=False) if is_kept))


def _stream(config: Any, shape: tuple[int, int], work: Work) -> Tensor:
    return torch.empty(*shape, config.hidden_size, dtype=work.dtype, device="meta", requires_grad=True)


def _on_meta(leaf: Leaf, sharding: Sharding, *, dtype: torch.dtype) -> Tensor:
    """What a rank computes with, without values."""
    made = torch.empty(gathered_shape(sharding), dtype=dtype if leaf.trainable else leaf.dtype, device="meta")
    return made.requires_grad_(leaf.trainable)


def _in_layer(leaf: Leaf, sharding: Sharding, *, mesh: Mesh, dtype: torch.dtype) -> Tensor:
    """Of KV heads that all ranks of tp hold, since they are fewer, each computes its own."""
    made = _on_meta(leaf, sharding, dtype=dtype)
    if (
        mesh.tp == 1
        or "kv_heads" not in leaf.axes
        or dict(zip(mesh.sizes, sharding.dims, strict=True))["tp"] is not None
    ):
        return made
    return made[: max(1, leaf.shape[0] // leaf.unit // mesh.tp) * leaf.unit]


def _check_grouped(leaves: Mapping[str, Tensor], mesh: Mesh) -> None:
    """ValueError for experts that a step would compute one after the other."""
    for name in ("gate_proj", "up_proj", "down_proj"):
        width, item = leaves[name].shape[-1], leaves[name].element_size()
        if width * item % 16:
            raise ValueError(
                f"Rows of the experts' {name} are {width} numbers wide (tp = {mesh.tp}), {width * item} bytes, and "
                "grouped products, which are simulated, take multiples of 16 bytes: divide them by another tp."
            )


class _Flash(torch.autograd.Function):
    """Shapes of a fused attention, and what it keeps: its arguments, its result, a number per query and head."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, *output)


class _Products(TorchFunctionMode):
    """Stands in for F.grouped_mm, which meta has in one dtype only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.grouped_mm, torch._grouped_mm):  # the first calls the second
            return _Product.apply(*args[:2], kwargs["offs"])
        return func(*args, **(kwargs or {}))


class _Product(torch.autograd.Function):
    """Shapes of rows [N, D] times each its expert's [E, D, F], and what it keeps: its arguments."""

    @staticmethod
    def forward(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return rows.new_empty(len(rows), weight.shape[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)


class _Sent(torch.autograd.Function):
    """What is sent comes as something new, of the same size where all experts get equally many."""

    @staticmethod
    def forward(rows: Tensor) -> Tensor:
        return torch.empty_like(rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass


def _exchanged(
    ranks: int,
    leaves: Mapping[str, Tensor],
    x: Tensor,
    weights: Tensor,
    indices: Tensor,
    valid: Tensor,
    *,
    act: Any,
    input_weighted: bool = False,
) -> Tensor:
    """`train.parallel.expert.expert_parallel` without messages."""
    here = leaves["gate_proj"].shape[0]
    rows, dispatched, weights = sorted_rows(x, weights, indices, valid, ranks * here, input_weighted)
    got: Tensor = _Sent.apply(rows)
    expert = indices.new_empty(len(got), 1)
    ones, real = got.new_ones(len(got), 1), torch.ones(len(got), dtype=torch.bool, device=got.device)
    return combine(_Sent.apply(grouped_experts(leaves, got, ones, expert, real, act=act)), dispatched, weights)
