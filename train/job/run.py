"""The one loop of all training runs: starts or resumes a run, trains, saves checkpoints and evaluates.

What is trained is a module of `train.job.tasks`. All results are a function of the recorded settings and the step: a
resumed run computes the same bits and writes the same metrics as an uninterrupted one.
"""

import datetime
import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fnmodels.errors import UserError
from fnmodels.files import check_folder
from fnmodels.tree import Tree
from params.io.files import plain_file
from train.checkpoint import saved_steps
from train.checkpoint.background import Saver
from train.checkpoint.saved_steps import Checkpoint
from train.comm import torchrun
from train.command_line import check_installed, terminal_text
from train.job.processes.controller import Controller
from train.job.processes.signals import stop_requests
from train.job.processes.worker import WorkerConfig
from train.state import State

from . import metrics_log, model_card, report, run_folder
from .flops import peak_memory
from .mesh_flags import resolve_mesh
from .profile import profiled
from .progress import progress
from .recipe import evaluated_params, resolved, unused_settings
from .settings import (
    RunSettings,
    absolute_paths,
    changeable,
    fixed_settings,
    flag,
    from_json,
    imports,
    is_importable,
    read_toml,
    types_of,
)
from .settings.imported import is_import_path
from .task import Json, Task, TaskModule
from .trackers import tracked_by
from .trackers import trackers as open_trackers

S = TypeVar("S", bound=RunSettings)


@dataclass(frozen=True)
class Position:
    """The progress of a run: steps made and target tokens trained on. The data order needs no other state."""

    step: int
    tokens: int


@dataclass(frozen=True)
class Options:
    """The parsed command line. flags: by the names of settings; config: a TOML file; mesh_flags: beside --mesh.

    program: the command, for the line that says how to resume.
    """

    program: str
    run: Path
    flags: Mapping[str, Any]
    config: Path | None = None
    resume: bool = False
    mesh: str | None = None
    mesh_flags: Mapping[str, Any] = field(default_factory=dict)
    limit: datetime.timedelta | None = None  # how long processes wait for one that hangs


def train_run(options: Options, tasks: TaskModule, defaults: RunSettings) -> int:
    """Starts or resumes the run; returns the exit code. UserError for settings or files that cannot work."""
    kind = type(defaults)
    overrides, start = overrides_of(options, kind), torchrun.launch_id()
    if options.resume and not torchrun.is_torchrun():
        run_folder.check_exists(options.run)
    with run_folder.locked(options.run):
        if torchrun.is_restart() and run_folder.acquired_by(options.run, start):
            options = replace(options, resume=True)
        run_folder.check_contents(options.run, resume=options.resume)
        run_folder.acquire(options.run, start)
        saved, problems = saved_steps.newest(options.run / run_folder.STEPS) if options.resume else (None, [])
        report.damaged(problems)
        if options.resume and saved is None:
            print(f"no complete checkpoint in {options.run}: starting at step 0")
        recorded = recorded_identity(saved, kind) if saved else run_folder.read_json(options.run / run_folder.RUN)
        settings = choose_settings(options.run, overrides, recorded, defaults, step=saved.step if saved else None)
        tasks.check_settings(settings)
        if settings.track is None and (tracked := tracked_by(options.run)):
            print(f"not tracked from here on: give --track {tracked} again to continue there")
        mesh_setup = resolve_mesh(options.mesh, settings, **options.mesh_flags)
        summary = run_folder.read_json(options.run / run_folder.SUMMARY) if saved else None
        if summary is not None and saved is not None and saved.step == settings.steps and tasks.is_complete(summary):
            print(f"the run is finished: {settings.steps} steps")
            tasks.report_result(summary, options.run)
            return exit_code(options.run, summary)
        tasks.preflight(settings, None if saved else mesh_setup)
        print(f"reading the {tasks.DATA}", flush=True)
        began = time.monotonic()
        task = tasks.prepare(options.run, settings, recorded if saved else None, mesh_setup)
        report.settings(options.run, settings, with_derived(defaults, settings))
        task.report(time.monotonic() - began)
        config = WorkerConfig(mesh_setup, settings, task.blueprint, options.limit)
        return train_and_summarize(options.program, task, tasks, saved, Controller(config, fresh=saved is None))


def with_derived(defaults: S, settings: S) -> S:
    """The defaults, with those that follow from how `settings` choose the model, the optimizer and the dtype."""
    kept = ("init", "lora", "optimizer", "dtype")
    chosen = replace(defaults, **{name: getattr(settings, name) for name in kept if hasattr(settings, name)})
    followed = resolved(chosen)
    return replace(followed, **{name: getattr(defaults, name) for name in kept[:3] if hasattr(defaults, name)})


def exit_code(run: Path, summary: Json) -> int:
    """The exit code of a complete run: 0, or that of a diverged one."""
    rows = metrics_log.read_rows(run / run_folder.METRICS)
    return metrics_log.exit_code(rows, float(summary.get("heldout_loss") or 0.0))


def recorded_identity(saved: Checkpoint, kind: type[RunSettings]) -> Json:
    """The identity of the run that saved the step. UserError where it is missing or of another version."""
    recorded, tokens, types = saved.progress.get("run"), saved.progress.get("tokens"), types_of(kind)
    path = saved.path / saved_steps.PROGRESS
    if "run" not in saved.progress and (earlier := from_flags(saved.progress, kind)) is not None:
        return earlier
    if not isinstance(recorded, dict) or not isinstance(recorded.get("settings"), dict) or type(tokens) is not int:
        raise UserError(f"{path} does not say which run saved the step, so it cannot be resumed: name another --run")
    # A setting of a later version that nothing is by default was not given.
    needed = {name for name in types.keys() - changeable(kind) if getattr(kind(), name) is not None}
    wrong = sorted(from_json(recorded["settings"], kind).keys() ^ (recorded["settings"].keys() | needed))
    if wrong:
        raise UserError(
            f"{path} is of a version with other settings ({', '.join(wrong)}), so it cannot be resumed here: "
            "name another --run"
        )
    return recorded


def from_flags(progress: Json, kind: type[RunSettings]) -> Json | None:
    """The identity of a run whose steps recorded its flags, as those of this kind did; None where it has others."""
    recorded = from_json({name: value for name, value in progress.items() if name not in ("data", "init")}, kind)
    if not {"steps", "seed", "learning_rate", "data", "init"} <= progress.keys() or recorded.keys() - progress.keys():
        return None
    files = {name: progress[name] for name in ("data", "init")}
    return {"settings": fixed_settings(resolved(replace(kind(), **recorded)))} | files


def overrides_of(options: Options, kind: type[RunSettings]) -> dict[str, tuple[Any, str]]:
    """{setting: (value, the flag or file entry that gave it)} of the command line; flags override the file."""
    file = read_toml(options.config, kind) if options.config else {}
    places = {name: (value, f"{name} = {value} in {options.config}") for name, value in file.items()}
    for name, value in options.flags.items():
        value = absolute_paths(name, value, Path(), kind)
        places[name] = value, f"{flag(name)} {value}"
    return places


def choose_settings(
    path: Path, overrides: Mapping[str, tuple[Any, str]], recorded: Json | None, defaults: S, *, step: int | None
) -> S:
    """Settings from the command line, else the recorded run, else the defaults. UserError where they conflict.

    step: that of the run which is resumed, with which they must agree; None: nothing is saved.
    """
    before = settings_before(path, recorded, type(defaults))
    if step is not None:
        prolonged = is_prolonged(overrides, before, step)
        check_unchanged(path, overrides, before, changeable(type(defaults)) | ({"steps"} if prolonged else set()))
    check_given_again(path, overrides, before, type(defaults))
    values = {name: value for name, value in before.items() if value is not None}
    settings = replace(defaults, **values | {name: value for name, (value, _) in overrides.items()})
    reason, replaced = settings.replaced
    for name in replaced:
        if name in overrides:
            raise UserError(f"{overrides[name][1]} {reason}")
    settings = without_unused(settings, overrides)
    check_machine(settings)
    return resolved(settings)


def is_prolonged(overrides: Mapping[str, tuple[Any, str]], before: Json, step: int) -> bool:
    """Whether a finished run gets more steps, which is printed with what that means."""
    steps = overrides.get("steps", (step, ""))[0]
    if step != before.get("steps") or steps <= step:
        return False
    print(f"prolonged from {step:,} to {steps:,} steps: from here on its rates are those of a run of {steps:,} steps")
    return True


def settings_before(path: Path, recorded: Json | None, kind: type[RunSettings]) -> Json:
    """The settings of the run in the folder: the recorded ones, and of settings.toml those that may change."""
    values = (recorded or {}).get("settings")
    before = from_json(values, kind) if isinstance(values, dict) else {}
    if recorded and os.path.lexists(path / run_folder.SETTINGS):
        kept = read_toml(plain_file(path, run_folder.SETTINGS), kind)
        before |= {name: value for name, value in kept.items() if name in changeable(kind)}
    return before


def check_unchanged(
    path: Path, overrides: Mapping[str, tuple[Any, str]], before: Json, may_change: frozenset[str]
) -> None:
    """UserError where the command line differs from the run that it resumes."""
    for name, (value, place) in overrides.items():
        if name not in may_change and value != before.get(name):
            was = "it was not given" if before.get(name) is None else f"it was {before[name]}"
            longer = f"continue training in another --run with --init {path}"
            other = longer if name == "steps" else "name another --run"
            raise UserError(f"{place} differs from the run in {path}: {was}; leave it out, or {other}")


def check_given_again(
    path: Path, overrides: Mapping[str, tuple[Any, str]], before: Json, kind: type[RunSettings]
) -> None:
    """UserError where the run in the folder names code that the command line does not."""
    for name, value in before.items():
        if name not in overrides and is_importable(types_of(kind)[name]) and is_import_path(value):
            code = f"{flag(name)} {value}"
            raise UserError(f"the run in {path} was trained with {code}, code that a folder may not run: give it again")


def without_unused(settings: S, overrides: Mapping[str, tuple[Any, str]]) -> S:
    """The settings without hyperparameters of other optimizers. UserError where the command line gives one."""
    unused = unused_settings(settings)
    for name in [name for name in unused if name in overrides]:
        raise UserError(
            f"{overrides[name][1]} is of another optimizer than --optimizer {settings.optimizer}: leave it out"
        )
    cleared: Json = dict.fromkeys(unused)
    return replace(settings, **cleared)


def check_machine(settings: RunSettings) -> None:
    """UserError for microbatches without rows, and for packages or compilers that are missing."""
    name, rows = settings.rows
    if settings.accumulate > rows:
        raise UserError(
            f"--accumulate {settings.accumulate} splits a batch into more microbatches than it has rows: "
            f"{flag(name)} is {rows}"
        )
    if settings.compile == "step" and settings.remat != "none":
        raise UserError(
            f"--compile step makes one graph of forward and backward pass, which recomputes nothing: leave --remat "
            f"{settings.remat} out, or take --compile block"
        )
    for function in imports(settings).values():
        _ = function.function  # before anything is read or written
    if settings.track is not None:
        check_installed((settings.track,))
    compilers = (os.environ.get("CXX", "c++"), "g++", "clang++")
    if settings.compile != "none" and not any(map(shutil.which, compilers)):
        raise UserError(f"--compile {settings.compile} needs a C++ compiler, and there is no {' or '.join(compilers)}")


def train_and_summarize(
    program: str, task: Task, tasks: TaskModule, saved: Checkpoint | None, controller: Controller
) -> int:
    """Trains from the saved step to the end and evaluates, or saves and stops on a signal; returns the exit code."""
    position = Position(saved.step, saved.progress.get("tokens", 0)) if saved else Position(step=0, tokens=0)
    if saved:
        controller.do("load", saved)
        saved_steps.set_aside(task.path / run_folder.STEPS, after=saved.step)
        # a kill may have come after the step was saved and before this
        write_checkpoints(task, partial(controller.do, "gather_checkpoint"))
        print(f"resuming at step {position.step} of {task.settings.steps}")
    rows = metrics_log.truncate_after(task.path / run_folder.METRICS, position.step)
    costs = metrics_log.truncate_after(task.path / run_folder.SPEED, position.step, needed=False)
    metrics_log.truncate_after(task.path / run_folder.SAMPLES, position.step, needed=False)
    metrics_log.warn_at_resume(rows)
    train_steps(task, rows, costs, position, controller)
    stopped = int(controller.state.step)
    if stopped < task.settings.steps:
        task.draw(rows, costs, None)
        resume = f"{program} --run {shlex.quote(str(task.path))} --resume"
        print(f"stopped at step {stopped} of {task.settings.steps}, saved; resume with: {resume}")
        return 130
    summary = task.finish(task.evaluated(partial(controller.do, "loss"), full=True), weights_of(controller))
    task.draw(rows, costs, summary)
    run_folder.write_json(task.path / run_folder.SUMMARY, summary)
    model_card.write(task, stopped, summary)
    tasks.report_result(summary, task.path)
    return exit_code(task.path, summary)


def weights_of(controller: Controller) -> Callable[[], Tree]:
    """A function that gathers the evaluated parameters."""
    return partial(controller.do, "gather_weights")


def train_steps(
    task: Task, rows: list[metrics_log.Row], costs: list[metrics_log.Row], position: Position, controller: Controller
) -> None:
    """The training loop. Appends logged rows to `rows` and `costs`; returns at the end or, after saving, on a stop."""
    settings, total, first, tokens = task.settings, task.settings.steps, position.step, position.tokens
    evaluate_every, speed = settings.eval_every or max(1, total // 10), 0.0
    tracking: Json = {"track": settings.track, "settings": fixed_settings(settings)}
    with (
        closing(metrics_log.MetricsLog(task.path, open_trackers(task.path, after=first, **tracking))) as log,
        progress(total, first) as show,
        profiled(task.path / run_folder.TRACE, settings.profile, total - first) as done,
        stop_requests() as stop_requested,
        nullcontext() if controller.several else Saver(partial(save_state, task)) as saver,
    ):
        for index in range(first, total):
            if saver:
                saver.check()
            began = time.perf_counter()
            batch = task.batch(index)
            state, measured = controller.do("step", batch)
            tokens += int(measured["count"])  # waits for the step
            real_tokens = int((batch["segment_ids"] > 0).sum())
            cost = speed_row(task, index + 1, real_tokens, time.perf_counter() - began)
            done()
            row: metrics_log.Row = {"step": index + 1} | task.row(index + 1, tokens, measured)
            now = cost["tokens_per_second"]
            speed = 0.9 * speed + 0.1 * now if speed else now
            if (index + 1) % evaluate_every == 0 or index + 1 == total:
                row |= task.evaluated(partial(controller.do, "loss"), full=False)
            log.write(row, cost)
            rows.append(row)
            costs.append(cost)
            show(index + 1, row["loss"], row["lr"], speed)
            if task.sample_every and (index + 1) % task.sample_every == 0:
                sample = task.sample(weights_of(controller))
                log.sample(index + 1, sample)
                print(f"step {index + 1} says: {terminal_text(sample)}", flush=True)
            stopping = stop_requested()
            if (index + 1) % settings.save_every == 0 or index + 1 == total or stopping:
                log.sync()
                current = Position(index + 1, tokens)
                if saver:
                    saver.save(task.blueprint.state_to_save(state), current)
                else:
                    save_shards(task, controller, current)
            if stopping:
                break


def speed_row(task: Task, step: int, tokens: int, seconds: float) -> metrics_log.Row:
    """The row of speed.jsonl; has `mfu` only with --peak-flops.

    tokens: those the model processed without padding, whether or not they are targets.
    """
    cost: metrics_log.Row = {"step": step, "seconds": metrics_log.six_digits(seconds), "peak_memory": peak_memory()}
    cost["tokens_per_second"] = metrics_log.six_digits(tokens / seconds)
    if task.mfu_per_rate is not None:
        cost["mfu"] = metrics_log.six_digits(tokens / seconds * task.mfu_per_rate)
    return cost


def progress_of(task: Task, position: Position) -> Json:
    """What is saved beside the state."""
    return {"tokens": position.tokens, "run": task.identity}


def save_state(task: Task, state: State, position: Position) -> None:
    """Saves the step of a run in one process, then writes the checkpoints of the same state."""
    steps = task.path / run_folder.STEPS
    saved_steps.save(steps, position.step, state, progress_of(task, position), keep=task.settings.keep)

    def params(averaged: bool) -> Tree:
        return evaluated_params(state, task.settings) if averaged else state.params

    write_checkpoints(task, params)
    model_card.write(task, position.step, None)


def save_shards(task: Task, controller: Controller, position: Position) -> None:
    """Saves the step of a run over a mesh, then writes the checkpoints of the same state."""
    steps = task.path / run_folder.STEPS
    controller.do("save", steps, position.step, progress_of(task, position), task.settings.keep)
    write_checkpoints(task, partial(controller.do, "gather_checkpoint"))
    model_card.write(task, position.step, None)


def write_checkpoints(task: Task, params: Callable[[bool], Tree]) -> None:
    """Writes the run's model and, with --ema, a complete one of the averaged weights. params: (averaged) -> these."""
    folders = {False: task.model_path}
    if task.settings.ema is not None:
        folders[True] = task.path / run_folder.EMA
    for averaged, folder in folders.items():
        check_folder(folder)
        task.write(folder, params(averaged))
