"""The command line of the main job."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from train.commands import Parser, at_least, run_command
from train.errors import UserError
from train.preset import DEFAULT, Preset

NEEDS = ("tokenizers", "rich", "tensorboard", "matplotlib")

DESCRIPTION = """\
Train a small Llama from scratch, on the Python standard library's own source files where no text is given.
The run folder becomes a Hugging Face checkpoint with its metrics, curves and everything needed to resume.
"""
EXAMPLES = """\
examples:
  python -m train --run runs/first                    the default model and text: some minutes on two CPU cores
  python -m train --run runs/first --resume           go on where it was stopped, by Ctrl-C or otherwise
  python -m train --run runs/own --data ~/notes       learn from the text files of a folder
  python -m train --run runs/more --init runs/first --data ~/notes --steps 200
  python -m train.sample runs/first --prompt "def "   let it speak
"""


def parser() -> Parser:
    made = Parser(
        prog="python -m train",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--run", type=Path, required=True, metavar="DIR", help="the run folder: new, empty, or with --resume"
    )
    made.add_argument(
        "--steps",
        type=at_least(1),
        metavar="N",
        help=f"optimizer steps of the whole run, resumed parts included (default {DEFAULT.steps})",
    )
    made.add_argument(
        "--seed", type=at_least(0), metavar="N", help="of the initial weights and the order of the text (default 0)"
    )
    made.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        help="a UTF-8 text file, or a folder: its text files, also in folders below, without hidden ones",
    )
    made.add_argument(
        "--init",
        type=Path,
        metavar="CHECKPOINT",
        help="start from the weights and tokenizer of a checkpoint folder, at a smaller learning rate",
    )
    made.add_argument(
        "--resume",
        action="store_true",
        help="go on at the last saved step of the run in DIR; flags left out are the run's, others must agree with it",
    )
    made.add_argument(
        "--save-every",
        type=at_least(1),
        default=DEFAULT.save_every,
        metavar="N",
        help="steps between saves (default %(default)s); the last step is always saved",
    )
    made.add_argument(
        "--keep",
        type=at_least(1),
        default=2,
        metavar="N",
        help="saved steps that stay, the newest (default %(default)s); a damaged one falls back to the one before",
    )
    made.add_argument("--mesh", metavar="AXES", help=argparse.SUPPRESS)
    return made


def run(arguments: argparse.Namespace, preset: Preset) -> int:
    if arguments.mesh is not None:
        raise UserError(
            f"--mesh {arguments.mesh}: one process on one device is all there is so far: leave the flag out"
        )
    from train.run import Options, train_run

    given = {name: value for name, value in vars(arguments).items() if name != "mesh"}
    return train_run(Options(**given), preset)


def main(argv: Sequence[str] | None = None, *, preset: Preset = DEFAULT) -> int:
    """The main job. Returns the exit code: 0, 2 for a mistake that the user can put right, 130 when stopped."""
    return run_command("fnmodels-train", parser, partial(run, preset=preset), argv, NEEDS)
