"""python -m train.rl --run DIR --init CHECKPOINT --data PROMPTS --checker NAME: reinforcement learning of a chat model.

PROMPTS has lines of JSON with `messages` and the `answer` that the checker compares with. With --environment NAME in
place of these two, conversations have many turns. The run folder becomes a checkpoint; metrics.jsonl has the mean
reward of each update, and reward.png its curve.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fnmodels.errors import UserError
from fnmodels.files import copy_file, open_append
from fnmodels.tree import Tree
from params.checkpoint.hub import local_folder
from params.checkpoint.save import save_pretrained
from params.imported import imported_family
from params.io.files import plain_file
from train.command_line import Parser, program_name, run_command
from train.data.chat import read_template
from train.engine import Engine
from train.eval import pretrained
from train.generation.routing import expert_layers
from train.imported import FunctionFailed, absolute, is_import_path, located
from train.job import metrics_log, run_folder
from train.job.processes.signals import stop_requests
from train.job.settings import flag
from train.job.watch.failures import kept
from train.optim.adamw import adamw
from train.optim.schedules import warmup_stable_decay

from .conversation import Limits
from .environment import MakeEnvironment, environment_of
from .flags import SAME, SAME_ANSWERS, SAME_TURNS, check_flags, make_parser
from .loop import PASSES, OneTurn, Setup
from .many_turns import Groups, ManyTurns
from .pictures import IMAGES, Pictures
from .prompts import Checker, Prompts, checker_of, read_prompts
from .rollouts import Scene, check_scene
from .tasks import ENVIRONMENTS
from .turns import turns_of

NEEDS = ("tokenizers", "jinja2")
SAMPLES = 8  # answers in summary.json
PICTURE = "reward.png"


class Judged(NamedTuple):
    """Prompts, and the checker of the answers to them."""

    checker: Checker
    prompts: Prompts


class Learner(Protocol):
    """GRPO of one turn or of many."""

    def update(self, engine: Engine, number: int) -> dict[str, Any]: ...

    def judged(self, params: Tree) -> tuple[float, list[dict[str, Any]]]: ...

    def saved(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


MakeLearner = Callable[[Mapping[str, Any]], Learner]  # of what a saved run had made ahead


def _name() -> str:
    return program_name("fnmodels-rl", "train.rl")


def parser() -> Parser:
    return make_parser(_name())


def reinforce(arguments: argparse.Namespace) -> int:
    """Runs the command; returns 0, or 130 where it was stopped and saved."""
    for name in ("checker", "environment"):
        if is_import_path(getattr(arguments, name)):
            setattr(arguments, name, absolute(getattr(arguments, name), Path()))
    family = None if arguments.family is None else imported_family(arguments.family)
    source = checked(arguments)
    arguments.init = local_folder(arguments.init)
    with run_folder.locked(arguments.run):
        run_folder.check_contents(arguments.run, resume=arguments.resume)
        pictures = Pictures.load(arguments.init) if isinstance(source, Judged) and source.prompts.pictured else None
        if pictures is None:
            config, params = pretrained.load_model(arguments.init, merge=True, copy=True, family=family)
        else:
            config, params = pictures.config.text, pictures.params["text"]
        make_learner = learner_of(arguments, source, config, pictures)
        recorded(arguments, source)
        total = PASSES * arguments.updates
        engine = Engine(
            config, params, adamw(_rate(arguments.learning_rate, total), weight_decay=0.0), clip=1.0, copy=False
        )
        try:
            return learn(arguments, make_learner, engine, pictures)
        except FunctionFailed as failed:
            raise kept(arguments.run, failed) from failed


def checked(arguments: argparse.Namespace) -> Judged | MakeEnvironment:
    """The prompts and their checker, or the environment. UserError where flags, a line or a name are wrong."""
    check_flags(arguments)
    if arguments.environment is not None:
        return environment_of(arguments.environment, ENVIRONMENTS)
    found = Judged(checker_of(arguments.checker), read_prompts(arguments.data, arguments.checker))
    if found.prompts.pictured and arguments.family is not None:
        raise UserError(
            f"--family {arguments.family} is read as a model of text, and --data has prompts with {IMAGES!r}: leave "
            "one of them out"
        )
    return found


def learner_of(
    arguments: argparse.Namespace, source: Judged | MakeEnvironment, config: Any, pictures: Pictures | None = None
) -> MakeLearner:
    """A function that makes the learner. UserError where the model or its template do not suit the conversations."""
    tokenizer = pretrained.load_tokenizer(arguments.init) if pictures is None else pictures.reader.tokenizer
    template = read_template(arguments.init, images=pictures is not None)
    ends = pretrained.answer_end_ids(arguments.init, tokenizer)
    if arguments.replay_routing and not expert_layers(config):
        raise UserError(f"--replay-routing is for models with experts; a {config.model_type} has none")
    if isinstance(source, Judged):
        shape = {name: getattr(arguments, name) for name in ("prompts", "answers", "tokens", "seed", "replay_routing")}
        setup = Setup(config, tokenizer, template, ends, source.checker, pictures=pictures, **shape)
        one = OneTurn(setup, source.prompts)
        print(f"{len(source.prompts.train)} prompts, and {len(source.prompts.heldout)} held out", flush=True)
        return lambda _: one
    limits = Limits(arguments.turns, arguments.tokens, arguments.context)
    turns = turns_of(tokenizer, template, ends, arguments.role)
    scene = Scene(config, template, turns, source, limits, arguments.workers, arguments.replay_routing)
    check_scene(scene)
    groups = Groups(arguments.prompts, arguments.answers, arguments.seed)
    ages = {"updates": arguments.updates, "staleness": arguments.staleness}
    return lambda pending: ManyTurns(scene, groups, pending=pending, **ages)


def recorded(arguments: argparse.Namespace, source: Judged | MakeEnvironment) -> dict[str, Any]:
    """run.json of the run: written, or on resume compared. UserError where they differ."""
    kept = (*SAME, *(SAME_ANSWERS if isinstance(source, Judged) else SAME_TURNS))
    identity = {name: getattr(arguments, name) for name in kept}
    if isinstance(source, Judged):
        identity["data"] = source.prompts.fingerprint
    identity["init"] = str(arguments.init.resolve())
    if arguments.replay_routing:
        identity["replay_routing"] = True
    if arguments.family is not None:
        identity["family"] = arguments.family
    before = run_folder.read_json(arguments.run / run_folder.RUN)
    if before is not None and before != identity:
        changed = next(name for name in identity | before if before.get(name) != identity.get(name))
        raise UserError(f"{flag(changed)} differs from that of the run in {arguments.run}: name another --run")
    run_folder.write_json(arguments.run / run_folder.RUN, identity)
    return identity


def learn(
    arguments: argparse.Namespace, make_learner: MakeLearner, engine: Engine, pictures: Pictures | None = None
) -> int:
    """The updates, from the last saved one on, then the checkpoint, the curve and summary.json."""
    run, steps = arguments.run, arguments.run / run_folder.STEPS
    try:
        progress = engine.load(steps)
    except FileNotFoundError:
        progress = {"updates": 0}
    learner = make_learner(progress.pop("ahead", {}))
    try:
        if "before" not in progress:
            progress["before"] = learner.judged(engine.params)[0]
        first, metrics = int(progress["updates"]), run / run_folder.METRICS
        rows = metrics_log.truncate_after(metrics, first, needed=first > 0)
        print(f"reward of the likeliest answers to what is held out: {progress['before']:.2f}", flush=True)
        with stop_requests() as stop_requested:
            for number in range(first, arguments.updates):
                with located(f"at update {number + 1}"):
                    row = {"step": number + 1} | learner.update(engine, number)
                rows.append(row)
                with open_append(metrics) as file:
                    file.write(metrics_log.json_line(row))
                print(f"update {number + 1}/{arguments.updates}  reward {row['reward']:.2f}", flush=True)
                stopping, last = stop_requested(), number + 1 == arguments.updates
                if stopping or last or (number + 1) % arguments.save_every == 0:
                    ahead = {"ahead": made} if (made := learner.saved()) else {}
                    engine.save(steps, progress | {"updates": number + 1} | ahead, keep=2)
                if stopping and not last:
                    print(f"stopped at update {number + 1}, saved; continue with --resume")
                    return 130
        after, samples = learner.judged(engine.params)
    finally:
        learner.close()
    write_checkpoint(arguments.init, run, engine, pictures)
    summary = {
        "updates": arguments.updates,
        "heldout_prompts": len(samples),
        "heldout_reward_before": progress["before"],
        "heldout_reward": after,
        "samples": samples[:SAMPLES],
    }
    run_folder.write_json(run / run_folder.SUMMARY, summary)
    if find_spec("matplotlib") is not None:
        from train.job.pictures import draw_losses

        draw_losses(run / PICTURE, {run.name: run})
        print(f"curve: {run / PICTURE}")
    print(f"reward of the likeliest answers to held-out prompts: {progress['before']:.2f} -> {after:.2f}")
    print(f"checkpoint: {run}")
    return 0


def write_checkpoint(source: Path, run: Path, engine: Engine, pictures: Pictures | None) -> None:
    """The run folder as a checkpoint, with the tokenizer and the chat template of its source."""
    if pictures is None:
        save_pretrained(run, engine.config, engine.params)
    else:
        pictures.save(source, run, engine.params)
    copy_file(plain_file(source, "tokenizer.json"), run / "tokenizer.json")
    pretrained.copy_companions(source, run)


def _rate(peak: float, total: int) -> Any:
    return lambda step: peak * warmup_stable_decay(step, total=total, warmup=min(10, total // 10), decay_ratio=0.5)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(_name(), parser, reinforce, argv, NEEDS)


if __name__ == "__main__":
    sys.exit(main())
