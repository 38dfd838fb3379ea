"""Messages of one rank of the pipeline in a step, by the rules of `train.parallel`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from train.head import CHUNK
from train.parallel import pipeline as pp

from .facts import WIDE, Message
from .pieces import Piece, ways
from .place import Place


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
    mesh, work = place.model.mesh, place.model.work
    for name, group in place.groups.items():
        for size, item, learns, copied, gathered in ways(group):
            gathers = work.microbatches * (2 if work.remat == "full" and name else 1)
            whole = size
            for dim in reversed(gathered):
                whole *= mesh.sizes[dim]
                yield _times("all_gather", dim, "weights", whole * item, gathers)
                if learns:
                    yield _times("reduce_scatter", dim, "gradients", whole * WIDE, work.microbatches)
            for dim in copied if learns else ():
                yield _times("all_reduce", dim, "gradients", size * WIDE, work.microbatches)


def _of_layers(place: Place) -> Iterable[Message]:
    """Keys and values over cp, and what goes to experts."""
    model = place.model
    mesh, parts, again = model.mesh, model.work.microbatches, model.work.remat == "full"
    for layer in (model.layers[i] for stage in place.stages for i in range(*model.pipe.layers[stage])):
        if mesh.cp > 1:
            yield _times("all_gather", "cp", "keys and values", layer.keys * mesh.cp, parts * (2 if again else 1))
            wide = layer.keys * mesh.cp * WIDE // model.work.dtype.itemsize
            yield _times("reduce_scatter", "cp", "their gradients", wide, parts)
        if mesh.ep > 1 and layer.chosen:
            yield _times("all_to_all", "ep", "tokens", layer.chosen, parts * (6 if again else 4))
        if mesh.tp > 1 and layer.chosen:
            yield _times("all_reduce", "tp", "activations", layer.scores, parts)


def _over_tp(place: Place) -> Iterable[Message]:
    """What enters and leaves sublayers, gradients of what all hold, and the loss over parts of the vocabulary."""
    model, parts = place.model, place.model.work.microbatches
    if model.mesh.tp == 1:
        return
    for group in place.groups.values():
        for what, size, times in _reductions(place, group):
            yield _times("all_reduce", "tp", what, size, parts * times)
    if place.last:
        tokens = math.prod(model.shape)
        chunks = -(-tokens // CHUNK)  # what a cross entropy over parts of the vocabulary needs of each token
        yield _times("all_gather", "tp", "cross entropy", 3 * tokens * model.mesh.tp * WIDE // chunks, parts * chunks)


def _reductions(place: Place, group: Sequence[Piece]) -> Iterable[tuple[str, int, int]]:
    """(of what, bytes, how often) in each microbatch: what enters and leaves, and gradients of what all hold."""
    model = place.model
    paths = [piece.path.split(".", 2)[-1] for piece in group]
    if not group[0].path.startswith("layers."):
        yield "activations", model.stream, place.first + place.last
        norms = [piece for piece in group if piece.leaf.axes == ("embed",)] if place.last else []
        for norm in norms:
            yield "shared leaves", norm.whole * model.work.dtype.itemsize, -(-math.prod(model.shape) // CHUNK)
        return
    sublayers = 2 + any(path.startswith("mlp.shared_expert.") for path in paths)
    # Computing again ends with what was kept last, which is before the last one leaves.
    yield "activations", model.stream, 2 * sublayers + (sublayers - 1 if model.work.remat == "full" else 0)
    shared = sum(piece.whole for piece in group if piece.shared)
    if shared:
        yield "shared leaves", shared * WIDE, 1


def _over_pp(place: Place) -> Iterable[Message]:
    """Between stages on different ranks, and between the two ends of a tied embedding."""
    pipe, config = place.model.pipe, place.model.config
    for stage in place.stages:
        for other, what in ((stage + 1, "hidden states"), (stage - 1, "their gradients")):
            if 0 <= other < len(pipe.layers) and pipe.ranks[other] != place.rank:
                yield _times("send", "pp", what, place.model.stream, place.model.work.microbatches)
    tied = frozenset.intersection(*pp.ends(config))
    if (place.first or place.last) and pipe.ranks[0] != pipe.ranks[-1]:
        for piece in place.groups.get("", []):
            if piece.path.partition(".")[0] in tied:
                yield _times("send", "pp", "tied gradients", piece.local * WIDE, 1)
