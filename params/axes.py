"""The logical axes of parameters: which mesh dimension may shard each, and where a layer computes with it.

A `Leaf` names the axis of every dimension. `params.sharding` reads here which of them are heads, tensor parallelism in
which region of a layer a parameter acts, simulation and adapters the names. An axis that is not in the table is never
sharded by default, and tensor parallelism refuses a layer that has one.
"""

from collections.abc import Collection
from dataclasses import dataclass

EMBED = "embed"  # the residual stream
EMBED_TWICE = "embed_twice"  # the residual stream and the embedding side by side
VOCAB = "vocab"
POSITION = "position"  # of a learned table
HEADS, KV_HEADS, HEAD_DIM, LATENT = "heads", "kv_heads", "head_dim", "latent"  # of attention
LINEAR_HEADS, LINEAR_KV_HEADS = "linear_heads", "linear_kv_heads"  # of recurrent layers
CONV, KERNEL = "conv", "kernel"  # channels and taps of a convolution
MLP = "mlp"
EXPERT, EXPERT_MLP = "expert", "expert_mlp"
BUCKET = "bucket"  # of distances, in a table of relative biases
SHIFTED = "shifted"  # the residual stream, of a token beside the one before it
NGRAM = "ngram"  # rows of a table of n-grams
CONVOLVED = "convolved"  # the residual stream, of which a convolution reads all positions
RANK = "rank"  # of an adapter


@dataclass(frozen=True)
class LogicalAxis:
    """One logical axis of the parameters of layers.

    mesh: the mesh dimension that shards it, or None.
    region: the axis that makes a sharded region of the layer where it is sharded, in which parameters with this axis
        act; None for parameters that act on the residual stream or have a region of their own (experts).
    whole_heads: it is sharded between heads only; a head has `Leaf.unit` elements.
    whole_rows: a layer mixes the positions of a row with it, and every rank computes that with all of them.
    read_by: of key heads, which may be fewer than the shards: the axis of the heads that read them.
    uneven: the shards may differ in size, for they are read where they are.
    """

    name: str
    mesh: str | None = None
    region: str | None = None
    whole_heads: bool = False
    whole_rows: bool = False
    read_by: str | None = None
    uneven: bool = False


_TABLE = (
    LogicalAxis(EMBED),
    LogicalAxis(EMBED_TWICE),
    LogicalAxis(HEADS, "tp", HEADS, whole_heads=True),
    LogicalAxis(KV_HEADS, "tp", HEADS, whole_heads=True, read_by=HEADS),
    LogicalAxis("head_groups", "tp", HEADS, whole_heads=True),  # which share an output projection of low rank
    LogicalAxis(LATENT, region=HEADS),
    LogicalAxis(HEAD_DIM, region=HEADS),
    LogicalAxis("frequency", region=HEADS),  # of rotary embeddings that are learned, outside of layers
    LogicalAxis("distance", region=HEADS),  # of keys and queries, in a table of vectors that all heads read
    LogicalAxis(MLP, "tp", MLP),
    LogicalAxis("activation", region=MLP),
    LogicalAxis(LINEAR_HEADS, "tp", LINEAR_HEADS, whole_heads=True),
    LogicalAxis(LINEAR_KV_HEADS, "tp", LINEAR_HEADS, whole_heads=True, read_by=LINEAR_HEADS),
    LogicalAxis("linear_head_dim", region=LINEAR_HEADS),
    LogicalAxis("linear_latent", region=LINEAR_HEADS),
    LogicalAxis(CONV, "tp", CONV),
    LogicalAxis(KERNEL),
    LogicalAxis("channels", whole_rows=True),  # of Mamba 1, whose projections read all of them
    LogicalAxis("channels_latent", whole_rows=True),
    LogicalAxis(EXPERT, "ep"),
    LogicalAxis(EXPERT_MLP, "tp"),
    LogicalAxis("router"),
    LogicalAxis("moe_latent"),
    LogicalAxis("per_layer"),
    LogicalAxis("laurel"),  # between the matrices of a residual connection of low rank
    LogicalAxis("norm_gate"),  # between the matrices of a gate after a norm
    LogicalAxis("time"),  # between the matrices that read the delay of a text behind its sound
    LogicalAxis("label"),  # of a head within the layers
    LogicalAxis("channel"),  # of a convolution that every process computes in full
    LogicalAxis("whole_mlp"),  # of an MLP whose gate reads moments of all of it
    LogicalAxis("modulation"),
    LogicalAxis(SHIFTED),
    LogicalAxis("one"),
    LogicalAxis("streams"),  # the rows of the residual stream of families with hyper-connections, together
    LogicalAxis("streams_latent"),  # between the matrices that mix them
    LogicalAxis(NGRAM, "tp", uneven=True),
    LogicalAxis("ngram_latent"),
    LogicalAxis(CONVOLVED, whole_rows=True),
    LogicalAxis("ngram_taps"),
    LogicalAxis(VOCAB, "tp"),
)
AXES = {axis.name: axis for axis in _TABLE}


def sharded_by(mesh: str) -> tuple[str, ...]:
    """The axes that this mesh dimension shards."""
    return tuple(name for name, axis in AXES.items() if axis.mesh == mesh)


KEYS = {name: axis.read_by for name, axis in AXES.items() if axis.read_by}  # {axis of key heads: that of their readers}


def may_be_uneven(name: str) -> bool:
    """Whether shards of an axis may differ in size."""
    return name in AXES and AXES[name].uneven


def has_whole_heads(name: str) -> bool:
    """Whether an axis is sharded between heads only."""
    return name in AXES and AXES[name].whole_heads


def has_whole_rows(axes: Collection[str]) -> bool:
    """Whether a parameter with these axes acts on all positions of a row, on every rank."""
    return any(name in AXES and AXES[name].whole_rows for name in axes)


def regions_of(axes: Collection[str]) -> set[str]:
    """The axes that make the regions in which a parameter with these axes acts."""
    return {region for name in axes if name in AXES and (region := AXES[name].region)}
