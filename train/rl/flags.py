"""The flags of `python -m train.rl`, and which of them go together."""

import argparse
from pathlib import Path

from fnmodels.errors import UserError
from params.imported import add_family_flag
from train.command_line import Parser
from train.job.settings import flag
from train.job.settings.types import NUMBER, integer

from .prompts import CHECKERS
from .tasks import ENVIRONMENTS

SAME = ("init", "updates", "prompts", "answers", "tokens", "seed", "learning_rate")  # what a resumed run must repeat
SAME_ANSWERS = ("checker",)
SAME_TURNS = ("environment", "turns", "context", "staleness", "role")
_MANY = {
    "turns": 4,
    "context": 512,
    "staleness": 0,
    "workers": 0,
    "role": "tool",
}  # flags of --environment, and defaults


def make_parser(name: str) -> Parser:
    """The flags of the command."""
    flags = Parser(
        prog=name,
        description="Reinforcement learning of a chat model: from answers that a checker judges, or in conversations "
        "with an environment.",
    )
    flags.add_argument(
        "--run", type=Path, required=True, metavar="DIR", help="the run folder: new, or with --resume one"
    )
    flags.add_argument("--init", type=Path, required=True, metavar="CHECKPOINT", help="a folder with a chat template")
    flags.add_argument("--data", type=Path, metavar="FILE", help="JSON lines of `messages` and `answer`")
    flags.add_argument(
        "--checker", metavar="NAME", help=f"{', '.join(CHECKERS)}, or your f(answer, record) as module:name"
    )
    flags.add_argument(
        "--environment",
        metavar="NAME",
        help=f"in place of --data and --checker: {', '.join(ENVIRONMENTS)}, or your function that makes an environment "
        "as module:name",
    )
    add_family_flag(flags)
    flags.add_argument("--resume", action="store_true", help="continue from the last saved update")
    numbers = {
        "updates": (30, "updates in total"),
        "prompts": (16, "prompts or tasks of an update"),
        "answers": (8, "answers to each prompt, or conversations about each task"),
        "tokens": (32, "tokens of an answer or turn, at most"),
        "save_every": (10, "updates between saves"),
    }
    for key, (default, text) in numbers.items():
        help = f"{text} (default {default})"
        flags.add_argument(flag(key), type=integer(1).parse, default=default, metavar="N", help=help)
    flags.add_argument("--seed", type=integer(0).parse, default=0, metavar="N", help="of all draws (default 0)")
    rate = "peak learning rate (default 0.0003)"
    flags.add_argument("--learning-rate", type=NUMBER.parse, default=3e-4, metavar="X", help=rate)
    replay = "train with the experts that computed the answers, of a model with experts"
    flags.add_argument("--replay-routing", action="store_true", help=replay)
    of_turns = {
        "turns": (1, "turns of a conversation, at most"),
        "context": (2, "tokens of a conversation, at most"),
        "staleness": (0, "updates between the weights that begin a conversation and those trained on it, at most"),
        "workers": (0, "threads in which environments run, for those that wait for something; 0: none"),
    }
    for key, (least, text) in of_turns.items():
        help = f"with --environment: {text} (default {_MANY[key]})"
        flags.add_argument(flag(key), type=integer(least).parse, metavar="N", help=help)
    flags.add_argument("--role", metavar="ROLE", help="with --environment: the role of observations (default tool)")
    return flags


def check_flags(arguments: argparse.Namespace) -> None:
    """Fills in the defaults of conversations. UserError where flags do not go together."""
    if arguments.environment is None:
        beside = [name for name in _MANY if getattr(arguments, name) is not None]
        if beside:
            raise UserError(f"{flag(beside[0])} is for conversations: name their --environment")
        missing = [name for name in ("data", "checker") if getattr(arguments, name) is None]
        if missing:
            raise UserError(f"{flag(missing[0])} is missing: give --data and --checker, or --environment")
        return
    beside = [name for name in ("data", "checker") if getattr(arguments, name) is not None]
    if beside:
        raise UserError(f"{flag(beside[0])} does not go with --environment, which has tasks and rewards of its own")
    for name, default in _MANY.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
