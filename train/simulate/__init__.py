"""What a training step will need on a machine that is not here: `python -m train.simulate --preset ... --mesh ...`.

    bytes that each rank holds, bytes that it sends, and how long its pipeline waits, of any model on any mesh

Nothing is communicated and no weight exists. One idea per file:

    facts        what is asked (`Work`) and what is told of each place in the pipeline (`RankFacts`)
    simulation   `simulate`: one from the other
    place        a model on a mesh, and one place in its pipeline
    pieces       the leaves there, which `params.plan` has cut
    kept         what autograd keeps of each kind of layer, run once on meta tensors of the shapes that a rank has
    stand_ins    what takes the place of operations there that send, or that meta does not know
    held         bytes of all that a rank holds at once
    sent         messages, counted by the rules of `train.parallel`
    show         tables and the picture
    command      the command

The order of a pipeline's work, and its waiting, are `train.parallel.pipeline.timeline`'s.

Ranks differ by their place in the pipeline. Where along another dimension the parts differ, the largest is shown.
Taken for granted: AdamW, parameters and moments in fp32, full rows, and tokens spread evenly over the experts. What a
device holds besides, docs/parallel.md says.
"""

from train.simulate.activations import saved_bytes
from train.simulate.cli import main
from train.simulate.facts import HELD, Message, RankFacts, Work
from train.simulate.report import picture, shown, table, traffic
from train.simulate.simulation import simulate

__all__ = [
    "HELD",
    "Message",
    "RankFacts",
    "Work",
    "main",
    "picture",
    "saved_bytes",
    "shown",
    "simulate",
    "table",
    "traffic",
]
