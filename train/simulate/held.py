"""Bytes of all that one rank of the pipeline holds at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

from train.head import CHUNK
from train.parallel.order import Action, peak

from .facts import WIDE
from .place import Place


def held(place: Place, actions: Sequence[Action]) -> dict[str, int]:
    """{one of HELD: bytes}; actions: what the rank does, in order."""
    model, pieces = place.model, place.pieces
    layers, work = model.pipe.layers, model.work
    learning = [piece for piece in pieces if piece.leaf.trainable]
    saved = {stage: _saved(place, stage) for stage in place.stages}
    used = {stage: _weights(place, stage) for stage in place.stages}
    recomputed = max(model.layers[i].saved for stage in place.stages for i in range(*layers[stage]))
    largest = max(sum(piece.used for piece in group) for name, group in place.groups.items() if name)
    full = work.remat == "full"
    return {
        "parameters": sum(piece.local * piece.leaf.dtype.itemsize for piece in pieces),
        "gradients": sum(piece.local for piece in learning) * WIDE,
        "optimizer": 2 * sum(piece.local for piece in learning) * WIDE,
        "gathered weights": peak(actions, used) + (largest if full else 0),
        "activations": peak(actions, saved) + (recomputed if full else 0),
        "buffers": work.microbatches
        * model.stream
        * sum((stage > 0) + (stage < len(layers) - 1) for stage in place.stages),
        "working": _working(place),
    }


def _saved(place: Place, stage: int) -> int:
    """Bytes that autograd keeps of one microbatch."""
    model = place.model
    lo, hi = model.pipe.layers[stage]
    kept = [model.stream if model.work.remat == "full" else layer.saved for layer in model.layers[lo:hi]]
    return sum(kept) + (model.head if hi == len(model.layers) else 0)


def _weights(place: Place, stage: int) -> int:
    """Bytes of gathered or cast weights that stay until a microbatch's backward pass."""
    lo, hi = place.model.pipe.layers[stage]
    kept = 0
    if place.model.work.remat == "none":
        kept += sum(piece.used for i in range(lo, hi) for piece in place.groups[f"layers.{i}"])
    if hi == len(place.model.layers):
        kept += sum(piece.used for piece in place.groups.get("", []))
    return kept


def _working(place: Place) -> int:
    """The larger of a layer's gradient before it is reduced, and of the logits of a chunk with their gradient."""
    model, item = place.model, place.model.work.dtype.itemsize
    of_layers = [sum(p.whole * (item + WIDE) for p in group if p.used) for name, group in place.groups.items() if name]
    tokens = min(CHUNK, math.prod(model.shape))
    logits = tokens * model.config.vocab_size // model.mesh.tp * (item + 2 * WIDE) if place.last else 0
    return max(*of_layers, logits, 0)
