"""Peak bytes that one pipeline rank holds, by what they are for."""

import math
import operator
from collections.abc import Mapping

import torch

from train.losses.token_chunks import automatic_chunk
from train.parallel.pipeline.timeline import peak

from .facts import WIDE
from .local_leaves import gathered_bytes
from .rank import PipelineRank


def held(rank: PipelineRank) -> dict[str, int]:
    """{one of HELD: bytes}."""
    model, leaves = rank.model, rank.leaves
    trained = [leaf for leaf in leaves if leaf.spec.trainable]
    # torch's stages keep one buffer per microbatch and neighbor.
    neighbors = sum((stage > 0) + (not rank.is_last(stage)) for stage in rank.stages)
    return {
        "parameters": sum(leaf.local * leaf.spec.dtype.itemsize for leaf in leaves),
        "gradients": sum(leaf.local if model.work.sync == "microbatch" else leaf.whole for leaf in trained) * WIDE,
        "optimizer": 2 * sum(leaf.local for leaf in trained) * WIDE,
        "gathered weights": _gathered(rank),
        "activations": _activations(rank),
        "buffers": model.work.microbatches * model.hidden_bytes * neighbors,
        "working": _working(rank),
    }


def _activations(rank: PipelineRank) -> int:
    """Bytes that autograd keeps of the microbatches that are under transfer, and their stages' outputs.

    What a stage is given lies in a buffer.
    """
    model = rank.model
    kept, backward, early = dict[int, int](), dict[tuple[str, int], int](), dict[int, int]()
    for stage in rank.stages:
        lo, _ = model.pipe.layers[stage]
        again, held = model.recomputes(stage), dict[int, int]()
        for i, repeated in again.items():
            given = model.hidden_bytes if repeated or model.layers[i].keeps_input else 0
            held[i] = (given if i > lo or stage == 0 else 0) + (0 if repeated else model.layers[i].saved)
        head = model.ends.head if rank.is_last(stage) else 0
        sent = 0 if rank.is_last(stage) else model.hidden_bytes
        kept[stage] = (model.ends.embedding if stage == 0 else 0) + sum(held.values()) + head + sent
        early[stage] = model.ends.cross_entropy if rank.is_last(stage) else 0
        backward |= _recomputed(stage, {i: model.layers[i].saved for i in again if again[i]}, held, head)
    return peak(rank.actions, kept, backward=backward, for_inputs=early)


def _gathered(rank: PipelineRank) -> int:
    """Gathered and cast weights: while a stage runs, those outside of layers and of the current layer; then what is
    saved.

    Autograd saves what it needs until the backward pass, except for layers that are recomputed.
    """
    model = rank.model
    if model.work.sync == "step":
        return gathered_bytes(rank.leaves)
    kept, forward, backward = dict[int, int](), dict[int, int](), dict[tuple[str, int], int]()
    for stage in rank.stages:
        again, outside = model.recomputes(stage), rank.outside[stage]
        whole = {i: gathered_bytes(rank.layers[i]) for i in again}
        used = {i: 0 if again[i] else gathered_bytes(rank.layers[i], model.layers[i].leaves) for i in again}
        ends = gathered_bytes(outside, model.ends.leaves) if rank.is_last(stage) else 0
        kept[stage] = ends + sum(used.values())
        before = (sum(size for j, size in used.items() if j < i) for i in whole)
        forward[stage] = gathered_bytes(outside) + max(map(operator.add, before, whole.values()))
        backward |= _recomputed(stage, {i: whole[i] for i in again if again[i]}, used, ends)
    return peak(rank.actions, kept, forward, backward)


def _recomputed(stage: int, made: Mapping[int, int], kept: Mapping[int, int], head: int) -> dict[tuple[str, int], int]:
    """The most that recomputed layers add, for `peak`. made: bytes of each recomputed layer; kept: of every layer.

    By then a full backward pass has freed the head and the later layers. Its two halves keep them for each other; the
    first stage has the second half alone.
    """
    whole = max((size - sum(kept[j] for j in kept if j > i) for i, size in made.items()), default=0) - head
    half = max(made.values(), default=0)
    return {("B", stage): whole, ("I", stage): half if stage else 0, ("W", stage): half if stage else whole}


def _working(rank: PipelineRank) -> int:
    """The larger of a layer's gradient before it is reduced, and a chunk's logits with their gradient."""
    model, item = rank.model, rank.model.work.dtype.itemsize
    layers = [sum(leaf.whole * (item + WIDE) for leaf in group if leaf.used) for group in rank.layers.values()]
    chunk = automatic_chunk(model.config.vocab_size, torch.device("cpu"), model.work.dtype)
    tokens = min(chunk, math.prod(model.shape))
    logits = tokens * model.config.vocab_size // model.mesh.tp * (item + 2 * WIDE)
    return max(*layers, logits if any(map(rank.is_last, rank.stages)) else 0, 0)
