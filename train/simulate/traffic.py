"""Messages of one rank of the pipeline in a step, by the rules of `train.parallel`."""

from __future__ import annotations

import math
from collections.abc import Iterable

from train.losses.lm_head import CHUNK
from train.parallel.pipeline import gradients as pp

from .facts import WIDE, Message
from .local_leaves import ways
from .rank import Place


def messages(place: Place) -> tuple[Message, ...]:
    """All of them; those of one kind are one."""
    found: dict[tuple[str, str, str], Message] = {}
    for way in (_of_weights, _of_layers, _over_tp, _over_pp):
        for one in way(place):
            key = (one.kind, one.dim, one.what)
            before = found.get(key, Message(*key, 0, 0))
            found[key] = Message(*key, before.count + one.count, before.bytes + one.bytes)
    return tuple(found.values())


def _times(kind: str, dim: str, what: str, size: int, times: int) -> Message:
    """So many, of `size` bytes each."""
    return Message(kind, dim, what, times, times * size)


def _of_weights(place: Place) -> Iterable[Message]:
    """Gathered where they run, and their gradients summed."""
    mesh, parts = place.model.mesh, place.model.work.microbatches
    groups = [(group, parts + place.repeats[i]) for i, group in place.layers.items()]
    groups += [(group, parts) for group in place.outside.values()]
    for group, times in groups:
        for way, size in ways(group):
            whole = size
            for dim in reversed(way.gathered):
                whole *= mesh.sizes[dim]
                yield _times("all_gather", dim, "weights", whole * way.dtype.itemsize, times)
                if way.learns:
                    yield _times("reduce_scatter", dim, "gradients", whole * WIDE, parts)
            for dim in way.copied if way.learns else ():
                yield _times("all_reduce", dim, "gradients", size * WIDE, parts)


def _of_layers(place: Place) -> Iterable[Message]:
    """Keys and values over cp, and what goes to experts."""
    model = place.model
    mesh, parts = model.mesh, model.work.microbatches
    for i, again in place.repeats.items():
        # The second half of a backward pass goes through one message of the first again, on its way to weights.
        layer, twice = model.layers[i], place.halved[i]
        if mesh.cp > 1:
            yield _times("all_gather", "cp", "keys and values", layer.keys * mesh.cp, parts + again)
            wide = layer.keys * mesh.cp * WIDE // model.work.dtype.itemsize
            yield _times("reduce_scatter", "cp", "their gradients", wide, parts + twice)
        if mesh.ep > 1 and layer.chosen:
            yield _times("all_to_all", "ep", "tokens", layer.chosen, 4 * parts + 2 * again + twice)
        if mesh.tp > 1 and layer.chosen:
            yield _times("all_reduce", "tp", "activations", layer.scores, parts + twice)


def _over_tp(place: Place) -> Iterable[Message]:
    """What enters and leaves sublayers, gradients of what all hold, and the loss over parts of the vocabulary."""
    model, parts = place.model, place.model.work.microbatches
    if model.mesh.tp == 1:
        return
    for i, group in place.layers.items():
        sublayers = 2 + any(piece.path.startswith("mlp.shared_expert.") for piece in group)
        # Computing again ends with what was kept last, which is before the last one leaves.
        # The second half of a backward pass goes through all that enters once more, for leaves are taken together.
        times = 2 * sublayers * parts + (sublayers - 1) * place.repeats[i] + sublayers * place.halved[i]
        yield _times("all_reduce", "tp", "activations", model.stream, times)
        shared = sum(piece.whole for piece in group if piece.shared)
        if shared:
            yield _times("all_reduce", "tp", "shared leaves", shared * WIDE, parts)
    for stage, group in place.outside.items():
        ends = (stage == 0) + place.is_last(stage)
        if ends:
            yield _times("all_reduce", "tp", "activations", model.stream, parts * ends)
        if place.is_last(stage):
            tokens = math.prod(model.shape)
            chunks = -(-tokens // CHUNK)
            for norm in (piece for piece in group if piece.leaf.axes == ("embed",)):
                size = norm.whole * model.work.dtype.itemsize
                yield _times("all_reduce", "tp", "shared leaves", size, parts)
            # what a cross entropy over parts of the vocabulary needs of each token
            yield _times(
                "all_gather", "tp", "cross entropy", 3 * tokens * model.mesh.tp * WIDE // chunks, parts * chunks
            )


def _over_pp(place: Place) -> Iterable[Message]:
    """Between stages on different ranks, and between the two ends of a tied embedding."""
    pipe, config = place.model.pipe, place.model.config
    for stage in place.stages:
        for other, what in ((stage + 1, "hidden states"), (stage - 1, "their gradients")):
            if 0 <= other < len(pipe.layers) and pipe.ranks[other] != place.rank:
                yield _times("send", "pp", what, place.model.stream, place.model.work.microbatches)
    tied = frozenset.intersection(*pp.ends(config))
    if place.rank in (pipe.ranks[0], pipe.ranks[-1]) and pipe.ranks[0] != pipe.ranks[-1]:
        for piece in (piece for group in place.outside.values() for piece in group):
            if piece.path.partition(".")[0] in tied:
                yield _times("send", "pp", "tied gradients", piece.local * WIDE, 1)
