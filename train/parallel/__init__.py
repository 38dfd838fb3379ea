"""The same pure functions on many processes: every gradient equals that of one process.

    mesh            the sizes of the mesh dimensions, `Mesh(fsdp=2, tp=2)`, and `Strategy`: how they share work
    placement       sharding rules of a mesh, and the shardings of placed parameters
    step            `train.make_step(..., mesh=mesh)`
    compose         all the parallelisms below around one loss, as options that travel with its params
    update          from summed gradients to the next State: global norm, updates of local shards
    eval_steps      evaluation and per-token outputs over a mesh
    agreement       checks that all ranks were given the same batch, or batches that fit together
    batch_shards    the rows and positions of a batch that a rank takes
    padding         a sequence length that every rank can shard, and the way back
    fsdp            dp and fsdp: parameters are sharded and each layer is all-gathered where it runs
    fsdp2           the same functions behind modules, for torch's `fully_shard`
    expert          ep: experts live on different ranks, tokens are exchanged by all-to-all
    tensor/         tp: heads, MLP widths and vocabulary are sharded
    context/        cp: positions of a row are sharded, attention exchanges keys and values
    pipeline/       pp: layers live on different ranks
    whole_model     gathers values that differ per pipeline stage, so that every rank sees the full tree

Collectives, as linear maps with their transposes as gradients, are in `train.comm`; `train.losses.vocab_parallel` has
embedding and cross entropy over a sharded vocabulary.

Nothing here starts a process group, and importing it costs no more than `import torch`: what needs DTensor imports it
inside the function that does.
"""

from train.parallel.mesh import NAMES, DataParallel, Mesh, Strategy, data_parallel

__all__ = ["NAMES", "DataParallel", "Mesh", "Strategy", "data_parallel"]
