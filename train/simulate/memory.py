"""Bytes of all that one rank of the pipeline holds at once."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping

from train.losses.lm_head import CHUNK
from train.parallel.pipeline.timeline import peak

from .facts import WIDE
from .local_leaves import gathered_bytes
from .rank import Place


def held(place: Place) -> dict[str, int]:
    """{one of HELD: bytes}."""
    model, pieces = place.model, place.pieces
    learning = [piece for piece in pieces if piece.leaf.trainable]
    # torch's stages keep one buffer for each microbatch and each neighbor.
    neighbors = sum((stage > 0) + (not place.is_last(stage)) for stage in place.stages)
    return {
        "parameters": sum(piece.local * piece.leaf.dtype.itemsize for piece in pieces),
        "gradients": sum(piece.local for piece in learning) * WIDE,
        "optimizer": 2 * sum(piece.local for piece in learning) * WIDE,
        "gathered weights": _gathered(place),
        "activations": _activations(place),
        "buffers": model.work.microbatches * model.stream * neighbors,
        "working": _working(place),
    }


def _activations(place: Place) -> int:
    """What autograd keeps of the microbatches that are under way, and their stages' outputs.

    What a stage is given lies in a buffer.
    """
    model = place.model
    kept, backward = dict[int, int](), dict[tuple[str, int], int]()
    for stage in place.stages:
        lo, _ = model.pipe.layers[stage]
        again, held = model.again(stage), dict[int, int]()
        for i, repeated in again.items():
            given = model.stream if repeated or model.layers[i].keeps_input else 0
            held[i] = (given if i > lo or stage == 0 else 0) + (0 if repeated else model.layers[i].saved)
        head = model.ends.head if place.is_last(stage) else 0
        sent = 0 if place.is_last(stage) else model.stream
        kept[stage] = (model.ends.embedding if stage == 0 else 0) + sum(held.values()) + head + sent
        backward |= _anew(stage, {i: model.layers[i].saved for i in again if again[i]}, held, head)
    return peak(place.actions, kept, backward=backward)


def _gathered(place: Place) -> int:
    """Gathered and cast weights: while a stage runs, those outside of layers, and of a layer where it is; then what is
    kept.

    Autograd keeps what it needs until the backward pass, of layers that are computed again nothing.
    """
    model = place.model
    kept, forward, backward = dict[int, int](), dict[int, int](), dict[tuple[str, int], int]()
    for stage in place.stages:
        again, outside = model.again(stage), place.outside[stage]
        whole = {i: gathered_bytes(place.layers[i]) for i in again}
        used = {i: 0 if again[i] else gathered_bytes(place.layers[i], model.layers[i].leaves) for i in again}
        ends = gathered_bytes(outside, model.ends.leaves) if place.is_last(stage) else 0
        kept[stage] = ends + sum(used.values())
        before = (sum(size for j, size in used.items() if j < i) for i in whole)
        forward[stage] = gathered_bytes(outside) + max(map(operator.add, before, whole.values()))
        backward |= _anew(stage, {i: whole[i] for i in again if again[i]}, used, ends)
    return peak(place.actions, kept, forward, backward)


def _anew(stage: int, made: Mapping[int, int], kept: Mapping[int, int], head: int) -> dict[tuple[str, int], int]:
    """What layers that are computed again add at most, for `peak`. made: of each; kept: of each, whether it is or not.

    A backward pass is by then done with the head and the layers behind. Its halves keep them, for each other; of the
    first stage the second half is all there is.
    """
    whole = max((size - sum(kept[j] for j in kept if j > i) for i, size in made.items()), default=0) - head
    half = max(made.values(), default=0)
    return {("B", stage): whole, ("I", stage): half if stage else 0, ("W", stage): half if stage else whole}


def _working(place: Place) -> int:
    """The larger of a layer's gradient before it is reduced, and of the logits of a chunk with their gradient."""
    model, item = place.model, place.model.work.dtype.itemsize
    of_layers = [sum(piece.whole * (item + WIDE) for piece in group if piece.used) for group in place.layers.values()]
    tokens = min(CHUNK, math.prod(model.shape))
    logits = tokens * model.config.vocab_size // model.mesh.tp * (item + 2 * WIDE)
    return max(*of_layers, logits if any(map(place.is_last, place.stages)) else 0, 0)
