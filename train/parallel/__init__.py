"""The same pure functions on many processes, equal to one of them in every gradient. One idea per file:

    mesh          how many processes share what: `Mesh(fsdp=2, tp=2)`; and `Strategy`, how, where there is a choice
    step          `train.make_step(..., mesh=mesh)`, of all of them together
    updates       what all their sums become: a norm, an update of the parts that are here
    parts         the rows and columns of a batch that a process takes
    given         those that it has already: what all agree on first
    forward       evaluation and functions of tokens, likewise
    gather        dp and fsdp: layers gathered where they run
    stateful      the same behind modules, for FSDP2
    tensor        heads and columns of each layer divided, and the stream's columns too: `tensor_parallel`
      uses        what becomes of each leaf
      nodes       leaves that know it, in the place of weights
    vocab         the same of embedding, logits and cross entropy
    region        what these two have between the stream and a process' own part
    context       tokens of a row in different processes: attention that fetches keys, or passes them on
    ring          the last of these, whose partial sums are merged
    pipeline      layers on different processes: gradients, losses and outputs of this one's stages, made of
      schedule      which layers are where
      share         the parts of the tree
      staged        a loss that can be cut between layers
      together      leaves that a split backward pass takes as one
      microbatch    what every stage needs of a part of the batch
      passes        torch's schedules, run over them
    everywhere    what stages hold or find, for all processes: whole leaves, counts of all layers
    stages        pp in a step: a pipeline whose stages share their layers by all the other ways
    order         what a schedule does in which order: how long ranks wait, how much they hold
    expert        experts in different processes: tokens travel to theirs and back
    collectives   the one place that talks to other processes, as linear maps with gradients
    dtensors      a DTensor as the part that is here and the place of the rest

Nothing here starts a process group, and importing it costs no more than `import torch`: what needs DTensor imports it
inside of the function that does.
"""

from train.parallel.mesh import NAMES, Mesh, Strategy

__all__ = ["NAMES", "Mesh", "Strategy"]
