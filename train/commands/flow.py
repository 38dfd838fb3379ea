"""python -m train.flow --run DIR --data FILE: trains a Flux by flow matching, on latents and texts that are tensors.

With --data FOLDER on pictures, in a folder for each class: pixels are the latents, and a class is the text.

    DIR/transformer      the model, a folder as diffusers writes it
    DIR/samples.png      of pictures: a row of drawn ones for each class, whose names are in DIR/classes.json

The loop is that of `python -m train`, with its flags and the other files of its run folder.
"""

from collections.abc import Sequence

from train.cli import Program, train
from train.command_line import NEEDS_OF_RUN
from train.job.tasks.settings import FlowSettings

PROGRAM = Program(
    "fnmodels-flow", "Train a Flux by flow matching on latents and texts.", "train.job.tasks.flow", NEEDS_OF_RUN
)


def main(argv: Sequence[str] | None = None) -> int:
    return train(PROGRAM, FlowSettings(), argv)
