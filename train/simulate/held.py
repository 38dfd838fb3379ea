"""Bytes of all that one rank of the pipeline holds at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from train.head import CHUNK
from train.parallel.order import Action, peak

from .facts import WIDE
from .pieces import gathered_bytes
from .place import Place


def held(place: Place, actions: Sequence[Action]) -> dict[str, int]:
    """{one of HELD: bytes}; actions: what the rank does, in order."""
    model, pieces = place.model, place.pieces
    learning = [piece for piece in pieces if piece.leaf.trainable]
    # torch's stages keep one buffer for each microbatch and each neighbor.
    neighbors = sum((stage > 0) + (not place.is_last(stage)) for stage in place.stages)
    return {
        "parameters": sum(piece.local * piece.leaf.dtype.itemsize for piece in pieces),
        "gradients": sum(piece.local for piece in learning) * WIDE,
        "optimizer": 2 * sum(piece.local for piece in learning) * WIDE,
        "gathered weights": _gathered(place, actions),
        "activations": _activations(place, actions),
        "buffers": model.work.microbatches * model.stream * neighbors,
        "working": _working(place),
    }


def _activations(place: Place, actions: Sequence[Action]) -> int:
    """What autograd keeps of the microbatches that are under way, and their stages' outputs.

    What a stage is given lies in a buffer. Where a layer is computed again, the head of its microbatch is done with,
    and so are the layers behind it.
    """
    model = place.model
    kept, again = dict[int, int](), dict[int, int]()
    for stage in place.stages:
        lo, hi = model.pipe.layers[stage]
        layers, full = model.layers[lo:hi], model.work.remat == "full"
        inputs = [(full or layer.keeps_input) and (i or not stage) for i, layer in enumerate(layers)]
        ends = (model.ends.embedding if stage == 0 else 0) + (model.ends.head if place.is_last(stage) else model.stream)
        kept[stage] = model.stream * sum(map(bool, inputs)) + ends
        if full:
            after = [model.stream * (hi - 1 - i) for i in range(lo, hi)]
            most = max(layer.saved - freed for layer, freed in zip(layers, after, strict=True))
            again[stage] = most - (model.ends.head if place.is_last(stage) else 0)
        else:
            kept[stage] += sum(layer.saved for layer in layers)
    return peak(actions, kept, backward=again)


def _gathered(place: Place, actions: Sequence[Action]) -> int:
    """Gathered and cast weights: while a stage runs, those outside of layers, and of a layer where it is; then what is
    kept.

    Autograd keeps what it needs until the backward pass, of layers that are computed again nothing.
    """
    model = place.model
    kept, forward, again = dict[int, int](), dict[int, int](), dict[int, int]()
    for stage in place.stages:
        layers = range(*model.pipe.layers[stage])
        outside = place.outside[stage]
        whole = [gathered_bytes(place.layers[i]) for i in layers]
        used = [gathered_bytes(place.layers[i], model.layers[i].leaves) for i in layers]
        kept[stage] = gathered_bytes(outside, model.ends.leaves) if place.is_last(stage) else 0
        if model.work.remat == "full":
            again[stage] = max(whole) - kept[stage]
            used = [0] * len(whole)
        forward[stage] = gathered_bytes(outside) + max(sum(used[:i]) + size for i, size in enumerate(whole))
        kept[stage] += sum(used)
    return peak(actions, kept, forward, again)


def _working(place: Place) -> int:
    """The larger of a layer's gradient before it is reduced, and of the logits of a chunk with their gradient."""
    model, item = place.model, place.model.work.dtype.itemsize
    of_layers = [sum(piece.whole * (item + WIDE) for piece in group if piece.used) for group in place.layers.values()]
    tokens = min(CHUNK, math.prod(model.shape))
    logits = tokens * model.config.vocab_size // model.mesh.tp * (item + 2 * WIDE)
    return max(*of_layers, logits if any(map(place.is_last, place.stages)) else 0, 0)
