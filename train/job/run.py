"""The one loop of all training runs: starts or resumes a run, trains, saves checkpoints and evaluates.

What is trained is a module of `train.job.tasks`. All results are a function of the recorded settings and the step: a
resumed run computes the same bits and writes the same metrics as an uninterrupted one.
"""

import shlex
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from fnmodels.tree import Tree
from train.checkpoint import saved_steps
from train.checkpoint.background import Saver
from train.checkpoint.saved_steps import Checkpoint
from train.comm import torchrun
from train.command_line import terminal_text
from train.job.processes.controller import Controller
from train.job.processes.signals import stop_requests
from train.job.processes.worker import WorkerConfig

from . import metrics_log, model_card, report, run_folder
from .chosen_settings import Options, choose_settings, overrides_of, recorded_identity, with_derived
from .flops import peak_memory
from .mesh_flags import resolve_mesh
from .profile import profiled
from .progress import progress
from .saving import Position, save_shards, save_state, write_checkpoints
from .settings import RunSettings, fixed_settings
from .task import Json, Task, TaskModule
from .trackers import tracked_by
from .trackers import trackers as open_trackers


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


def exit_code(run: Path, summary: Json) -> int:
    """The exit code of a complete run: 0, or that of a diverged one."""
    rows = metrics_log.read_rows(run / run_folder.METRICS)
    return metrics_log.exit_code(rows, float(summary.get("heldout_loss") or 0.0))


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
