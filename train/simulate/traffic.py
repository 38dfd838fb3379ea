"""Messages of one pipeline rank in a step, by the rules of `train.parallel`."""

import math
from collections.abc import Iterable

import torch

from params.axes import EMBED
from train.losses.token_chunks import automatic_chunk
from train.parallel.pipeline import tree_split

from .facts import WIDE, Message
from .local_leaves import transfers
from .rank import PipelineRank


def messages(rank: PipelineRank) -> tuple[Message, ...]:
    """All messages, added up by kind."""
    found: dict[tuple[str, str, str], Message] = {}
    for messages_of in (_of_weights, _of_layers, _over_tp, _over_pp):
        for one in messages_of(rank):
            key = (one.kind, one.dim, one.what)
            before = found.get(key, Message(*key, 0, 0))
            found[key] = Message(*key, before.count + one.count, before.bytes + one.bytes)
    return tuple(found.values())


def _times(kind: str, dim: str, what: str, size: int, times: int) -> Message:
    """`times` messages of `size` bytes each."""
    return Message(kind, dim, what, times, times * size)


def _of_weights(rank: PipelineRank) -> Iterable[Message]:
    """Weights, gathered where they are used, and the reduction of their gradients."""
    mesh, once = rank.model.mesh, rank.model.work.sync == "step"
    parts = 1 if once else rank.model.work.microbatches
    groups = [(group, parts + (0 if once else rank.recomputations[i])) for i, group in rank.layers.items()]
    groups += [(group, parts) for group in rank.outside.values()]
    for group, times in groups:
        for transfer, size in transfers(group):
            whole = size
            for dim in reversed(transfer.gathered):
                whole *= mesh.sizes[dim]
                yield _times("all_gather", dim, "weights", whole * transfer.dtype.itemsize, times)
                if transfer.trainable:
                    yield _times("reduce_scatter", dim, "gradients", whole * WIDE, parts)
            for dim in transfer.replicated if transfer.trainable else ():
                yield _times("all_reduce", dim, "gradients", size * WIDE, parts)


def _of_layers(rank: PipelineRank) -> Iterable[Message]:
    """Keys, values and states over cp, and tokens sent to experts."""
    model = rank.model
    mesh, parts = model.mesh, model.work.microbatches
    for i, again in rank.recomputations.items():
        # The weight half of a split backward pass repeats one message of the input half.
        layer, twice = model.layers[i], rank.split_backwards[i]
        for size in layer.states:
            yield _times("all_gather", "cp", "states", size * mesh.cp, parts + again)
            yield _times("reduce_scatter", "cp", "their gradients", size * mesh.cp, parts + twice)
        if mesh.cp > 1 and layer.keys:
            yield _times("all_gather", "cp", "keys and values", layer.keys * mesh.cp, parts + again)
            wide = layer.keys * mesh.cp * WIDE // model.work.dtype.itemsize
            yield _times("reduce_scatter", "cp", "their gradients", wide, parts + twice)
        if mesh.ep > 1 and layer.chosen:
            yield _times("all_to_all", "ep", "tokens", layer.chosen, 4 * parts + 2 * again + twice)
        if mesh.tp > 1 and layer.chosen:
            yield _times("all_reduce", "tp", "activations", layer.scores, parts + twice)


def _over_tp(rank: PipelineRank) -> Iterable[Message]:
    """Activations that enter and leave sublayers, gradients of replicated leaves, a loss over sharded vocabulary."""
    model, parts = rank.model, rank.model.work.microbatches
    if model.mesh.tp == 1:
        return
    for i, group in rank.layers.items():
        sublayers = 2 + any(leaf.path.startswith("mlp.shared_expert.") for leaf in group)
        # Recomputation ends at the last saved tensor, before the last sublayer's output is summed.
        # The weight half of a split backward pass repeats the messages at all entries, because leaves share one node.
        times = 2 * sublayers * parts + (sublayers - 1) * rank.recomputations[i] + sublayers * rank.split_backwards[i]
        yield _times("all_reduce", "tp", "activations", model.hidden_bytes, times)
        shared = sum(leaf.whole for leaf in group if leaf.shared)
        if shared:
            yield _times("all_reduce", "tp", "shared leaves", shared * WIDE, parts)
    for stage, group in rank.outside.items():
        ends = (stage == 0) + rank.is_last(stage)
        if ends:
            yield _times("all_reduce", "tp", "activations", model.hidden_bytes, parts * ends)
        if rank.is_last(stage):
            tokens = math.prod(model.shape)
            chunk = automatic_chunk(model.config.vocab_size, torch.device("cpu"), model.work.dtype)
            chunks = -(-tokens // chunk)
            for norm in (leaf for leaf in group if leaf.spec.axes == (EMBED,)):
                size = norm.whole * model.work.dtype.itemsize
                yield _times("all_reduce", "tp", "shared leaves", size, parts)
            # per-token statistics of a cross entropy over a sharded vocabulary
            yield _times(
                "all_gather", "tp", "cross entropy", 3 * tokens * model.mesh.tp * WIDE // chunks, parts * chunks
            )


def _over_pp(rank: PipelineRank) -> Iterable[Message]:
    """Between stages on different ranks, and between the two ends of a tied embedding."""
    pipe, config = rank.model.pipe, rank.model.config
    for stage in rank.stages:
        for other, what in ((stage + 1, "hidden states"), (stage - 1, "their gradients")):
            if 0 <= other < len(pipe.layers) and pipe.ranks[other] != rank.index:
                yield _times("send", "pp", what, rank.model.hidden_bytes, rank.model.work.microbatches)
    several = tree_split.holders(config, pipe)
    for leaf in (leaf for group in rank.outside.values() for leaf in group):
        if (entry := tree_split.entry_of(leaf.path, several)) is not None:
            yield _times("send", "pp", "tied gradients", leaf.local * WIDE, len(several[entry]) - 1)
