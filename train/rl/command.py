"""python -m train.rl --run DIR --init CHECKPOINT --data PROMPTS --checker NAME: reinforcement learning of a chat model.

PROMPTS has lines of JSON with `messages` and the `answer` that the checker compares with. The run folder becomes a
checkpoint; metrics.jsonl has the mean reward of each update.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fnmodels.errors import UserError
from fnmodels.files import copy_file, open_append
from params.checkpoint.hub import local_folder
from params.checkpoint.save import save_pretrained
from params.imported import add_family_flag, imported_family
from params.io.files import plain_file
from train.command_line import Parser, program_name, run_command
from train.data.chat import read_template
from train.engine import Engine
from train.eval import pretrained
from train.imported import FunctionFailed, absolute, is_import_path, located
from train.job import metrics_log, run_folder
from train.job.processes.signals import stop_requests
from train.job.settings import flag
from train.job.settings.types import NUMBER, integer
from train.job.watch.failures import kept
from train.optim.adamw import adamw
from train.optim.schedules import warmup_stable_decay

from .loop import PASSES, Setup, judged, update
from .prompts import CHECKERS, Checker, Prompts, checker_of, read_prompts

NEEDS = ("tokenizers", "jinja2")
SAMPLES = 8  # answers in summary.json


def _name() -> str:
    return program_name("fnmodels-rl", "train.rl")


def parser() -> Parser:
    flags = Parser(
        prog=_name(), description="Reinforcement learning of a chat model from answers that a checker judges."
    )
    flags.add_argument(
        "--run", type=Path, required=True, metavar="DIR", help="the run folder: new, or with --resume one"
    )
    flags.add_argument("--init", type=Path, required=True, metavar="CHECKPOINT", help="a folder with a chat template")
    flags.add_argument("--data", type=Path, required=True, metavar="FILE", help="JSON lines of `messages` and `answer`")
    flags.add_argument(
        "--checker",
        required=True,
        metavar="NAME",
        help=f"{', '.join(CHECKERS)}, or your f(answer, record) as module:name",
    )
    add_family_flag(flags)
    flags.add_argument("--resume", action="store_true", help="continue from the last saved update")
    numbers = {
        "updates": (30, "updates in total"),
        "prompts": (16, "prompts of an update"),
        "answers": (8, "answers to each prompt"),
        "tokens": (32, "tokens of an answer, at most"),
        "save_every": (10, "updates between saves"),
    }
    for name, (default, text) in numbers.items():
        help = f"{text} (default {default})"
        flags.add_argument(flag(name), type=integer(1).parse, default=default, metavar="N", help=help)
    flags.add_argument("--seed", type=integer(0).parse, default=0, metavar="N", help="of all draws (default 0)")
    rate = "peak learning rate (default 0.0003)"
    flags.add_argument("--learning-rate", type=NUMBER.parse, default=3e-4, metavar="X", help=rate)
    return flags


def reinforce(arguments: argparse.Namespace) -> int:
    """Runs the command; returns 0, or 130 where it was stopped and saved."""
    if is_import_path(arguments.checker):
        arguments.checker = absolute(arguments.checker, Path())
    family = None if arguments.family is None else imported_family(arguments.family)
    checker, prompts = checked(arguments)
    arguments.init = local_folder(arguments.init)
    with run_folder.locked(arguments.run):
        run_folder.check_contents(arguments.run, resume=arguments.resume)
        identity = recorded(arguments, prompts)
        config, params = pretrained.load_model(arguments.init, merge=True, copy=True, family=family)
        tokenizer = pretrained.load_tokenizer(arguments.init)
        ends = pretrained.answer_end_ids(arguments.init, tokenizer)
        shape = {name: getattr(arguments, name) for name in ("prompts", "answers", "tokens", "seed")}
        setup = Setup(config, tokenizer, read_template(arguments.init), ends, checker, **shape)
        total = PASSES * arguments.updates
        engine = Engine(
            config, params, adamw(_rate(arguments.learning_rate, total), weight_decay=0.0), clip=1.0, copy=False
        )
        try:
            return learn(arguments, identity, setup, engine, prompts)
        except FunctionFailed as failed:
            raise kept(arguments.run, failed) from failed


def checked(arguments: argparse.Namespace) -> tuple[Checker, Prompts]:
    """(the checker, the prompts) of the flags. UserError where there is none, or a line is no prompt."""
    return checker_of(arguments.checker), read_prompts(arguments.data, arguments.checker)


def recorded(arguments: argparse.Namespace, prompts: Prompts) -> dict[str, Any]:
    """run.json of the run: written, or on resume compared. UserError where they differ."""
    kept = ("init", "checker", "updates", "prompts", "answers", "tokens", "seed", "learning_rate")
    identity = {name: getattr(arguments, name) for name in kept} | {"data": prompts.fingerprint}
    identity["init"] = str(arguments.init.resolve())
    if arguments.family is not None:
        identity["family"] = arguments.family
    before = run_folder.read_json(arguments.run / run_folder.RUN)
    if before is not None and before != identity:
        changed = next(name for name in identity | before if before.get(name) != identity.get(name))
        raise UserError(f"{flag(changed)} differs from that of the run in {arguments.run}: name another --run")
    run_folder.write_json(arguments.run / run_folder.RUN, identity)
    return identity


def learn(
    arguments: argparse.Namespace, identity: dict[str, Any], setup: Setup, engine: Engine, prompts: Prompts
) -> int:
    """The updates, from the last saved one on, then the checkpoint and summary.json."""
    run, steps = arguments.run, arguments.run / run_folder.STEPS
    try:
        progress = engine.load(steps)
    except FileNotFoundError:
        progress = {"updates": 0, "before": judged(setup, engine.params, prompts.heldout)[0]}
    first, metrics = int(progress["updates"]), run / run_folder.METRICS
    rows = metrics_log.truncate_after(metrics, first, needed=first > 0)
    print(
        f"{len(prompts.train)} prompts, and {len(prompts.heldout)} held out: reward {progress['before']:.2f}",
        flush=True,
    )
    with stop_requests() as stop_requested:
        for number in range(first, arguments.updates):
            with located(f"at update {number + 1}"):
                row = {"step": number + 1} | update(setup, engine, prompts.train, number)
            rows.append(row)
            with open_append(metrics) as file:
                file.write(metrics_log.json_line(row))
            print(f"update {number + 1}/{arguments.updates}  reward {row['reward']:.2f}", flush=True)
            stopping, last = stop_requested(), number + 1 == arguments.updates
            if stopping or last or (number + 1) % arguments.save_every == 0:
                engine.save(steps, progress | {"updates": number + 1}, keep=2)
            if stopping and not last:
                print(f"stopped at update {number + 1}, saved; continue with --resume")
                return 130
    after, answers = judged(setup, engine.params, prompts.heldout)
    shown = zip(prompts.heldout[:SAMPLES], answers, strict=False)
    write_checkpoint(arguments.init, run, setup, engine)
    summary = {
        "updates": arguments.updates,
        "heldout_prompts": len(prompts.heldout),
        "heldout_reward_before": progress["before"],
        "heldout_reward": after,
        "samples": [{"messages": record["messages"], "answer": answer} for record, answer in shown],
    }
    run_folder.write_json(run / run_folder.SUMMARY, summary)
    print(f"reward of the likeliest answers to held-out prompts: {progress['before']:.2f} -> {after:.2f}")
    print(f"checkpoint: {run}")
    return 0


def write_checkpoint(source: Path, run: Path, setup: Setup, engine: Engine) -> None:
    """The run folder as a checkpoint, with the tokenizer and the chat template of its source."""
    save_pretrained(run, setup.config, engine.params)
    copy_file(plain_file(source, "tokenizer.json"), run / "tokenizer.json")
    pretrained.copy_companions(source, run)


def _rate(peak: float, total: int) -> Any:
    return lambda step: peak * warmup_stable_decay(step, total=total, warmup=min(10, total // 10), decay_ratio=0.5)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(_name(), parser, reinforce, argv, NEEDS)


if __name__ == "__main__":
    sys.exit(main())
