"""Memory, communication and time of a training step on any mesh, computed without the machine.

    python -m train.simulate --preset deepseek-v3 --mesh pp=8,ep=64,fsdp=2 --machine h100
    python -m train.simulate --preset llama-3.1-8b --search 64 --rows 512 --machine h100

Nothing is communicated and no weights are allocated. One idea per file:

    facts          `Work`, the step to simulate, and `RankFacts`, the result for each pipeline rank
    simulation     `simulate`: from one to the other
    rank           a model on a mesh, and one rank of its pipeline
    local_leaves   the shards of parameters that `params.plan` gives that rank
    activations    bytes that autograd saves for each kind of layer, run once on meta tensors of the local shapes
    fake_ops       replacements there for operations that communicate, or that meta does not support
    memory         bytes that a rank holds at the same time
    traffic        messages, counted by the rules of `train.parallel`
    operations     FLOPs, bytes and number of operations of a layer, counted in the same run
    machine        `Machine`: what a device computes, reads and sends per second
    step_time      `step_time`: the seconds of a step, of its parts and of its waits
    search         `search`: the fastest meshes that fit
    report         tables and the picture
    cli            the command

The order of a pipeline's work and its idle time come from `train.parallel.pipeline.timeline`.

Ranks differ by their position in the pipeline. If shards differ along another dimension, the largest is reported.
Assumptions: AdamW, parameters and moments in fp32, full rows, and tokens spread evenly over the experts.
docs/parallel.md lists what else a device holds.
"""

from train.simulate.activations import saved_bytes
from train.simulate.cli import main
from train.simulate.facts import HELD, Message, RankFacts, Work
from train.simulate.machine import MACHINES, Link, Machine, measured
from train.simulate.report import picture, shown, table, traffic
from train.simulate.search import Plan, search
from train.simulate.simulation import simulate
from train.simulate.step_time import StepTime, step_time

__all__ = [
    "HELD",
    "MACHINES",
    "Link",
    "Machine",
    "Message",
    "Plan",
    "RankFacts",
    "StepTime",
    "Work",
    "main",
    "measured",
    "picture",
    "saved_bytes",
    "search",
    "shown",
    "simulate",
    "step_time",
    "table",
    "traffic",
]
