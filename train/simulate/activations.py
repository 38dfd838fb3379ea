"""Bytes that autograd saves and FLOPs of each kind of layer, embedding and head: each run once on meta."""

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.inputs.mask import Mask
from fnmodels.inputs.rules import Rule
from fnmodels.models.common.family import DecoderConfig
from fnmodels.models.common.spec import Leaf
from fnmodels.ops.moe.experts import grouped_experts
from fnmodels.options import Block
from fnmodels.tree import Tree
from params.axes import KV_HEADS
from params.sharding import Sharding
from train.losses.cross_entropy import Terms, cross_entropy_sum
from train.losses.lm_head import head_logits, head_loss, head_name, is_plain
from train.losses.token_chunks import CHUNK, automatic_chunk
from train.parallel.mesh import Mesh
from train.parallel.pipeline.tree_split import ends
from train.parallel.placement import rules_of

from .facts import Work
from .fake_ops import Flash, Products, check_grouped, exchanged
from .local_leaves import gathered_shape
from .operations import Counter, Operations


@dataclass(frozen=True)
class Layer:
    """One layer, on one rank, for one microbatch: bytes that autograd saves, and bytes that are communicated."""

    saved: int  # without its inputs
    keeps_input: bool
    leaves: frozenset[str]  # paths of the parameters that it saves too
    keys: int  # keys and values
    states: tuple[int, ...]  # what each recurrent op or convolution says of its piece to the other ranks of cp
    chosen: int  # rows that go to experts; 0 in a dense layer
    scores: int  # their weights
    forward: Operations


@dataclass(frozen=True)
class Ends:
    """Bytes that autograd saves of a microbatch for embedding and head, and the parameters that these save.

    cross_entropy: those of the head that gradients of weights do not need. head_operations: with those of its
    gradients, as where they are computed at once.
    """

    embedding: int
    head: int
    cross_entropy: int
    leaves: frozenset[str]
    head_operations: Operations


def saved_bytes(run: Callable[[], Any], given: Sequence[Tensor] = ()) -> int:
    """Bytes of the tensors that autograd saves while `run` runs, each storage once and without those of `given`."""
    return _kept(run, given)[0]


def _kept(run: Callable[[], Any], given: Sequence[Tensor]) -> tuple[int, list[bool]]:
    """`saved_bytes`, and which of `given` it saves too; `run` may append to `given`."""
    holders = weakref.WeakSet[_Holder]()

    def pack(tensor: Tensor) -> _Holder:
        holder = _Holder(tensor.detach())
        holders.add(holder)
        return holder

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        out = run()
    # Only what is still saved: intermediate tensors of a loss's chunks are freed.
    storages = [holder.tensor.untyped_storage() for holder in holders]
    kept = {id(storage): storage.nbytes() for storage in storages}
    del out
    known = [id(tensor.untyped_storage()) for tensor in given]
    return sum(size for key, size in kept.items() if key not in known), [key in kept for key in known]


@dataclass(eq=False)
class _Holder:
    """Holds a saved tensor; it lives as long as autograd saves it."""

    tensor: Tensor


@dataclass(frozen=True)
class Microbatch:
    """A microbatch of a rank. mesh: the dimensions that shard what it computes: pp (2 for more), ep, cp and tp.

    shape: rows and positions on the rank. length: of the whole rows.
    """

    config: DecoderConfig
    mesh: Mesh
    shape: tuple[int, int]
    length: int
    dtype: torch.dtype

    def parts(self) -> tuple[Tree, Tree]:
        """The leaves of the model, and how the mesh shards them."""
        spec = fnmodels.family_of(self.config).spec(self.config)
        return spec, P.plan(spec, rules_of(self.mesh, self.config), self.mesh.sizes)


def microbatch(config: DecoderConfig, mesh: Mesh, work: Work) -> Microbatch:
    """The microbatches of this mesh and work, equal for all meshes that differ in dp and fsdp alone."""
    shape = (work.rows // (mesh.rows * work.microbatches), work.length // mesh.cp)
    computing = Mesh(pp=min(mesh.pp, 2), ep=mesh.ep, cp=mesh.cp, tp=mesh.tp)
    return Microbatch(config, computing, shape, work.length, work.dtype)


@functools.lru_cache(256)  # a search asks for the same ones again and again
def layer_kept(part: Microbatch, index: int) -> Layer:
    """One layer run with the heads, positions and experts of one rank."""
    config, mesh, shape, length = part.config, part.mesh, part.shape, part.length
    spec, plan = part.parts()
    leaf = functools.partial(_in_layer, mesh=mesh, dtype=part.dtype)
    layer = tree.map(leaf, spec["layers"][index], plan["layers"][index])
    x, tokens = _stream(part), torch.zeros(shape, dtype=torch.long, device="meta")
    inputs, masks, freqs = fnmodels.prepare(
        config, tokens, positions=tokens, segment_ids=torch.ones_like(tokens), length=length
    )
    keys: list[int] = []
    states: list[int] = []
    chosen: list[int] = [0, 0]
    counter = Counter()
    flat = tree.flatten(layer)
    given = [*flat.values(), *inputs.values(), *tree.leaves(masks), *tree.leaves(freqs)]

    def watched(block: Block) -> Block:
        def run(layer: Tree, x: Tensor, *args: Any, **more: Any) -> Any:
            given.append(x)  # here, because padding is cleared before the first layer
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
        kernel=_counting_kernel(mesh, length, keys, states, counter),
        layer_fn=watched,
        valid=inputs["valid"],
        experts=_counting_experts(mesh, chosen, counter),
    )
    with counter.counting():
        saved, kept = _kept(run, given)
    leaves = frozenset(path for path, is_kept in zip(flat, kept[: len(flat)], strict=True) if is_kept)
    return Layer(saved, kept[-1], leaves, sum(keys), tuple(states), chosen[0], chosen[1], counter.total)


def _counting_kernel(
    mesh: Mesh, length: int, keys: list[int], states: list[int], counter: Counter
) -> Callable[..., Tensor]:
    """Attention that keeps what flash attention keeps, and notes the bytes of its keys and values, and its FLOPs.

    keys: one entry per call. states: one per recurrent layer over cp, as `_Pieces` notes them.
    """

    def kernel(q: Tensor, k: Tensor, v: Tensor, mask: Mask, **_: Any) -> Tensor:
        keys.append((k.numel() + v.numel()) * k.element_size())
        pairs = q.shape[0] * q.shape[1] * q.shape[2] * seen(mask.rule, length)
        counter.add(attention=2.0 * pairs * (q.shape[-1] + v.shape[-1]))
        if mesh.cp > 1:
            both = torch.cat((k, v), -1).repeat(1, mesh.cp, 1, 1)
            k, v = both.split((k.shape[-1], v.shape[-1]), -1)
        out: Tensor = Flash.apply(q, k, v)[0]
        return out

    if mesh.cp > 1:
        kernel.before = _Pieces(states)  # type: ignore[attr-defined]
    return kernel


def _counting_experts(mesh: Mesh, chosen: list[int], counter: Counter) -> Callable[..., Any]:
    """Experts of one rank whose products are counted; `chosen` becomes the bytes of their rows and of their weights."""

    def experts(leaves: Tree, x: Tensor, weights: Tensor, indices: Tensor, valid: Tensor, **how: Any) -> Tensor:
        check_grouped(leaves, mesh)
        chosen[:] = indices.numel() * x.shape[-1] * x.element_size(), weights.numel() * weights.element_size()
        with Products(counter):
            run = grouped_experts if mesh.ep == 1 else functools.partial(exchanged, mesh.ep)
            return run(leaves, x, weights, indices, valid, **how)

    return experts


def seen(rule: Rule, length: int) -> float:
    """The mean number of keys that a query of a row of one document sees, by the rule's bounds at 64 positions."""
    places = [(2 * i + 1) * length // 128 for i in range(64)]
    bounds = [rule.visible((place, place)) for place in places]
    return sum(min(high, length - 1) - max(low, 0) + 1 for low, high in bounds) / len(bounds)


@dataclass(frozen=True)
class _Pieces:
    """`fnmodels.ops.recurrent.before.Before` that notes the bytes of each message of one rank."""

    sent: list[int]
    kernel: str = "auto"

    def segment(self, segment_ids: Tensor) -> Tensor:
        return torch.zeros_like(segment_ids[:, 0])

    def state(self, transition: Tensor, own: Tensor) -> Tensor:
        self.sent.append((transition.numel() + own.numel()) * own.element_size())
        return torch.zeros_like(own)


@functools.lru_cache(256)
def ends_kept(part: Microbatch) -> Ends:
    """The embedding; and the head's loss, which saves the final hidden states and its gradients, computed at once."""
    config, mesh, shape = part.config, part.mesh, part.shape
    spec, plan = part.parts()
    outside = {name: leaf for name, leaf in spec.items() if name != "layers"}
    shards = {name: leaf for name, leaf in plan.items() if name != "layers"}
    params = tree.map(functools.partial(_on_meta, dtype=part.dtype), outside, shards)
    whole = torch.zeros(shape[0], shape[1] * mesh.cp, dtype=torch.long, device="meta")
    tokens, x = whole[:, : shape[1]], _stream(part)  # sliced as by cp: the loss copies labels
    inputs = {"tokens": tokens, "positions": tokens, "valid": tokens > 0}
    embed = functools.partial(fnmodels.family_of(config).embed, params, inputs, config=config)
    embedding = saved_bytes(embed, [*inputs.values(), *tree.leaves(params)])
    if mesh.tp > 1:  # ids relative to the rank's first row, and which of them are local
        embedding += tokens.numel() * (torch.long.itemsize + torch.bool.itemsize)
    last = {name: values for name, values in params.items() if mesh.pp == 1 or name in ends(config)[1]}
    if mesh.tp > 1:  # the head gets single replicated leaves, and its own
        last = {
            name: values
            for name, values in last.items()
            if isinstance(values, Tensor) and (name != "embed_tokens" or name == head_name(config))
        }
    flat = tree.flatten(last)
    # A head over tp computes its gradients at once, as one of several chunks does.
    chunk = tokens.numel() - 1 if mesh.tp > 1 else automatic_chunk(config.vocab_size, x.device, x.dtype)
    run = functools.partial(head_loss, last, x, tokens, config=config, chunk=chunk)
    head, kept = _kept(lambda: run()[0], [*flat.values(), tokens])
    cross_entropy = 0
    if is_plain(tokens.numel(), chunk, config, None):
        logits = head_logits(last, x, config)
        cross_entropy = saved_bytes(lambda: cross_entropy_sum(logits, tokens, None, Terms()), [logits, tokens])
    leaves = frozenset(path for path, is_kept in zip(flat, kept[: len(flat)], strict=True) if is_kept)
    counter, some = Counter(), min(shape[1], CHUNK)  # counted for one chunk, as they are slow to count
    with counter.counting():
        head_loss(last, x[:1, :some], tokens[:1, :some], config=config)
    return Ends(embedding, head, cross_entropy, leaves, counter.total.times(tokens.numel() / some))


def _stream(part: Microbatch) -> Tensor:
    return torch.empty(*part.shape, part.config.hidden_size, dtype=part.dtype, device="meta", requires_grad=True)


def _on_meta(leaf: Leaf, sharding: Sharding, *, dtype: torch.dtype) -> Tensor:
    """The tensor that a rank computes with, on meta."""
    made = torch.empty(gathered_shape(sharding), dtype=dtype if leaf.trainable else leaf.dtype, device="meta")
    return made.requires_grad_(leaf.trainable)


def _in_layer(leaf: Leaf, sharding: Sharding, *, mesh: Mesh, dtype: torch.dtype) -> Tensor:
    """As `_on_meta`; if there are fewer KV heads than tp ranks, each holds all and computes with its own."""
    made = _on_meta(leaf, sharding, dtype=dtype)
    if mesh.tp == 1 or KV_HEADS not in leaf.axes or dict(zip(mesh.sizes, sharding.dims, strict=True))["tp"] is not None:
        return made
    return made[: max(1, leaf.shape[0] // leaf.unit // mesh.tp) * leaf.unit]
