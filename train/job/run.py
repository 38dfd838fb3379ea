"""The one loop of all training runs: starts or resumes a run, trains, saves checkpoints and evaluates.

What is trained is a module of `train.job.tasks`. All results are a function of the recorded settings and the step: a
resumed run computes the same bits and writes the same metrics as an uninterrupted one.
"""

import shlex
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fnmodels.files import remove_tree
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
from .disk_room import check_room
from .flops import peak_memory
from .mesh_flags import resolve_mesh
from .mirror import Mirror, check_writable, mirrored, restore
from .profile import profiled
from .progress import progress
from .rewind import returned
from .saving import Position, position_of, save_now, save_shards, save_state, write_checkpoints
from .settings import RunSettings, fixed_settings
from .task import Json, Task, TaskModule
from .trackers import tracked_by
from .trackers import trackers as open_trackers
from .watch.callback import callback
from .watch.failures import keeping_traceback, naming_code
from .watch.trouble import Trouble
from .watch.watch import Watch

FORESEEN = 50  # steps from which on the time that they will take is worth four forward passes
FORWARD_PASSES = 3.0  # as long as a step takes: the backward pass has twice the work


@dataclass(frozen=True)
class History:
    """The rows of metrics.jsonl and speed.jsonl up to the last step."""

    rows: list[metrics_log.Row]
    costs: list[metrics_log.Row]

    @classmethod
    def of(cls, path: Path, position: Position) -> "History":
        """The run folder's history up to `position`; later rows and samples are removed from its files."""
        rows = metrics_log.truncate_after(path / run_folder.METRICS, position.step)
        costs = metrics_log.truncate_after(path / run_folder.SPEED, position.step, needed=False)
        metrics_log.truncate_after(path / run_folder.SAMPLES, position.step, needed=False)
        return cls(rows, costs)

    def append(self, row: metrics_log.Row, cost: metrics_log.Row) -> None:
        self.rows.append(row)
        self.costs.append(cost)


@dataclass(frozen=True)
class End:
    """The end of the loop. bad: upon so many bad steps, 0: not upon them; reason: of --on-step, None: none."""

    position: Position
    bad: int = 0
    reason: str | None = None


def train_run(options: Options, tasks: TaskModule, defaults: RunSettings) -> int:
    """Starts or resumes the run; returns the exit code. UserError for settings or files that cannot work."""
    kind = type(defaults)
    overrides, start = overrides_of(options, kind), torchrun.launch_id()
    mirror = options.flags.get("mirror")
    if options.resume and not torchrun.is_torchrun() and mirror is None:
        run_folder.check_exists(options.run)
    with run_folder.locked(options.run):
        if torchrun.is_restart() and run_folder.acquired_by(options.run, start):
            options = replace(options, resume=True)
        run_folder.check_contents(options.run, resume=options.resume)
        run_folder.acquire(options.run, start)
        if options.resume and mirror is not None:
            restore(mirror, options.run)
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
        if summary is not None and saved is not None and _is_last(saved.step, summary, settings, tasks):
            print(f"the run is finished: {saved.step} steps")
            tasks.report_result(summary, options.run)
            return exit_code(options.run, summary)
        tasks.preflight(settings, None if saved else mesh_setup, overrides.keys())
        if settings.mirror is not None:
            check_writable(settings.mirror)
        remove_tree(options.run / run_folder.FAILURE)
        with keeping_traceback(options.run, settings):
            print(f"reading the {tasks.DATA}", flush=True)
            began = time.monotonic()
            known = recorded | {"data_position": saved.progress.get("data_position")} if saved and recorded else None
            task = tasks.prepare(options.run, settings, known, mesh_setup)
            report.settings(options.run, settings, with_derived(defaults, settings))
            task.report(time.monotonic() - began)
            config = WorkerConfig(mesh_setup, settings, task.blueprint, options.limit)
            return train_and_summarize(options.program, task, tasks, saved, Controller(config, fresh=saved is None))


def _is_last(step: int, summary: Json, settings: RunSettings, tasks: TaskModule) -> bool:
    """Whether the run ended at this step: its last one, or that at which --on-step ended it."""
    last = summary.get("steps") if settings.on_step and "ended_by" in summary else settings.steps
    return step == last and tasks.is_complete(summary)


def exit_code(run: Path, summary: Json) -> int:
    """The exit code of a complete run: 0, or that of a diverged one."""
    rows = metrics_log.read_rows(run / run_folder.METRICS)
    return metrics_log.exit_code(rows, float(summary.get("heldout_loss") or 0.0))


def train_and_summarize(
    program: str, task: Task, tasks: TaskModule, saved: Checkpoint | None, controller: Controller
) -> int:
    """Trains from the saved step to the end and evaluates, or saves and stops on a signal; returns the exit code."""
    settings, position = task.settings, position_of(saved)
    if saved:
        controller.do("load", saved)
        saved_steps.set_aside(task.path / run_folder.STEPS, after=saved.step)
        # a kill may have come after the step was saved and before this
        write_checkpoints(task, partial(controller.do, "gather_checkpoint"))
        print(f"resuming at step {position.step} of {settings.steps}")
    check_room(task, controller.state)
    if saved is None and settings.on_divergence is not None:
        save_now(task, controller, position)  # what a return before the first save returns to
    history = History.of(task.path, position)
    metrics_log.warn_at_resume(history.rows)
    streams = task.data_position(position.step + position.skipped) is not None  # a batch of a stream is read once
    if settings.steps - position.step >= FORESEEN and not streams:
        report.expected(step_seconds(task, controller, position), settings.steps - position.step)
    with mirrored(settings.mirror, task.path) as mirror:
        while (end := train_steps(task, history, position, controller, mirror)).bad:
            back = settings.on_divergence and returned(task, controller, end.position, end.bad)
            if not back:
                task.draw(history.rows, history.costs, None)
                return report.stopped_after_bad(task.path, end.position.step, end.bad)
            position, history = back, History.of(task.path, back)
        resume = f"{program} --run {shlex.quote(str(task.path))} --resume"
        return finished(task, tasks, history, end, controller, resume)


def finished(task: Task, tasks: TaskModule, history: History, end: End, controller: Controller, resume: str) -> int:
    """Evaluates and summarizes a run at its end, or says how one that was stopped goes on; returns the exit code."""
    step, settings = end.position.step, task.settings
    if step < settings.steps and end.reason is None:
        task.draw(history.rows, history.costs, None)
        print(f"stopped at step {step} of {settings.steps}, saved; resume with: {resume}")
        return 130
    summary = task.finish(task.evaluated(partial(controller.do, "loss"), full=True), weights_of(controller))
    summary["trouble"] = Trouble(history.rows).counts | {"rewinds": end.position.rewinds}
    if end.reason is not None:
        print(f"ended at step {step} of {settings.steps} by --on-step: {terminal_text(end.reason)}")
        summary |= {"steps": step, "ended_by": end.reason}
    task.draw(history.rows, history.costs, summary)
    run_folder.write_json(task.path / run_folder.SUMMARY, summary)
    model_card.write(task, step, summary)
    tasks.report_result(summary, task.path)
    return exit_code(task.path, summary)


def weights_of(controller: Controller) -> Callable[[], Tree]:
    """A function that gathers the evaluated parameters."""
    return partial(controller.do, "gather_weights")


def train_steps(
    task: Task, history: History, position: Position, controller: Controller, mirror: Mirror | None = None
) -> End:
    """The training loop. Appends what it logs to `history`; a run that a signal stops is saved before it returns."""
    settings, total, first, tokens = task.settings, task.settings.steps, position.step, position.tokens
    evaluate_every, speed = settings.eval_every or max(1, total // 10), 0.0
    tracking: Json = {"track": settings.track, "settings": fixed_settings(settings)}
    watch, on_step = Watch.of(settings, history.rows), callback(settings, history.rows)
    end = End(position)
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
            if mirror:
                mirror.look()
            began, computed = time.perf_counter(), time.process_time()
            with naming_code(settings, f"at step {index + 1}"):
                batch = task.batch(index + position.skipped)
                state, measured = controller.do("step", batch)
            tokens += int(measured["count"])  # waits for the step
            real_tokens = int((batch["segment_ids"] > 0).sum())
            cost = speed_row(task, index + 1, real_tokens, time.perf_counter() - began)
            cost["cpu_seconds"] = metrics_log.six_digits(time.process_time() - computed)
            done()
            row: metrics_log.Row = {"step": index + 1}
            row |= task.row(index + 1 + position.skipped, tokens, measured)
            now = cost["tokens_per_second"]
            speed = 0.9 * speed + 0.1 * now if speed else now
            if (index + 1) % evaluate_every == 0 or index + 1 == total:
                row |= task.evaluated(partial(controller.do, "loss"), full=False)
            log.write(row, cost)
            history.append(row, cost)
            show(index + 1, row["loss"], row["lr"], speed)
            watch.look(row, cost, controller)
            if task.sample_every and (index + 1) % task.sample_every == 0:
                sample = task.sample(weights_of(controller))
                log.sample(index + 1, sample)
                print(f"step {index + 1} says: {terminal_text(sample)}", flush=True)
            data = task.data_position(index + 1 + position.skipped)
            end = End(replace(position, step=index + 1, tokens=tokens, data=data), watch.ends, on_step(state, row))
            if end.bad:
                break
            stopping = stop_requested() or end.reason is not None
            due = (index + 1) % settings.save_every == 0 and not watch.defers_saves
            if due or index + 1 == total or stopping:
                log.sync()
                if saver:
                    saver.save(task.blueprint.state_to_save(state), end.position)
                else:
                    save_shards(task, controller, end.position)
            if stopping:
                break
    return end


def step_seconds(task: Task, controller: Controller, position: Position) -> float:
    """The time that a step will take, from that of a forward pass over its batch, which changes nothing."""
    batch, times = task.batch(position.step + position.skipped), []
    for _ in range(4):  # the first warms up, and another program may interrupt some
        began = time.perf_counter()
        controller.do("loss", batch)
        times.append(time.perf_counter() - began)
    return FORWARD_PASSES * min(times)


def speed_row(task: Task, step: int, tokens: int, seconds: float) -> metrics_log.Row:
    """The row of speed.jsonl; has `mfu` only with --peak-flops.

    tokens: those the model processed without padding, whether or not they are targets.
    """
    cost: metrics_log.Row = {"step": step, "seconds": metrics_log.six_digits(seconds), "peak_memory": peak_memory()}
    cost["tokens_per_second"] = metrics_log.six_digits(tokens / seconds)
    if task.mfu_per_rate is not None:
        cost["mfu"] = metrics_log.six_digits(tokens / seconds * task.mfu_per_rate)
    return cost
