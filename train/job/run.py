"""The training job of `python -m train`: starts or resumes a run, trains, saves checkpoints and evaluates.

All results are a function of the recorded settings and the step: a resumed run computes the same bits and writes the
same metrics as an uninterrupted one.
"""

import datetime
import os
import shlex
import shutil
import time
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fnmodels.errors import UserError
from fnmodels.files import check_folder, copy_file
from params.io.files import plain_file
from train.checkpoint import saved_steps, sharded
from train.checkpoint.background import Saver
from train.checkpoint.saved_steps import Checkpoint
from train.comm import torchrun
from train.command_line import check_installed, terminal_text
from train.data.mixture import batch
from train.eval.pretrained import copy_companions
from train.generation.text import complete
from train.job.processes.controller import Controller
from train.job.processes.signals import stop_requests
from train.job.processes.worker import WorkerConfig
from train.state import State, init_state
from train.step import make_step

from . import heldout, initial_model, metrics_log, model_card, preflight, report, run_folder
from .flops import peak_memory
from .mesh_flags import check_model_fits, resolve_mesh
from .profile import profiled
from .progress import progress
from .recipe import evaluated_params, is_cross_entropy, moe_balance, step_options, unused_settings
from .settings import (
    CHANGEABLE,
    MODEL_SIZES,
    SETTING_TYPES,
    Settings,
    absolute_paths,
    fixed_settings,
    flag,
    from_json,
    read_toml,
)
from .setup import Job, Json, prepare, resolved
from .trackers import tracked_by
from .trackers import trackers as open_trackers


@dataclass(frozen=True)
class Position:
    """The progress of a run: steps made and target tokens trained on. The data order needs no other state."""

    step: int
    tokens: int


@dataclass(frozen=True)
class Options:
    """The parsed command line. flags: by the names of settings; config: a TOML file; mesh_flags: beside --mesh."""

    run: Path
    flags: Mapping[str, Any]
    config: Path | None = None
    resume: bool = False
    mesh: str | None = None
    mesh_flags: Mapping[str, Any] = field(default_factory=dict)
    limit: datetime.timedelta | None = None  # how long processes wait for one that hangs


def train_run(options: Options, defaults: Settings) -> int:
    """Starts or resumes the run; returns the exit code. UserError for settings or files that cannot work."""
    overrides, start = overrides_of(options), torchrun.launch_id()
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
        recorded = recorded_identity(saved) if saved else run_folder.read_json(options.run / run_folder.RUN)
        settings = choose_settings(options.run, overrides, recorded, defaults, must_agree=saved is not None)
        if settings.track is None and (tracked := tracked_by(options.run)):
            print(f"not tracked from here on: give --track {tracked} again to continue there")
        mesh_setup = resolve_mesh(options.mesh, settings, **options.mesh_flags)
        summary = run_folder.read_json(options.run / run_folder.SUMMARY) if saved else None
        if summary is not None and report.is_complete(summary) and saved is not None and saved.step == settings.steps:
            print(f"the run is finished: {settings.steps} steps")
            report.result(summary, options.run)
            rows = metrics_log.read_rows(options.run / run_folder.METRICS)
            return metrics_log.exit_code(rows, summary["heldout_bits_per_byte"])
        preflight.check_data_paths(settings.data) if saved else preflight.check(settings, mesh_setup)
        print("reading the text", flush=True)
        began = time.monotonic()
        several = mesh_setup.mesh.world > 1
        check_config = partial(check_model_fits, mesh_setup, settings)
        job = prepare(options.run, settings, recorded if saved else None, check_config, on_meta=several)
        report.skipped(job)
        report.settings(settings)  # after reading the text, whose errors would be lost below this page
        report.prepared(job, time.monotonic() - began)
        report.mfu(job)
        controller = (
            Controller(WorkerConfig(mesh_setup, settings, job.model.config, options.limit), fresh=saved is None)
            if several
            else None
        )
        return train_and_summarize(job, saved, controller)


def recorded_identity(saved: Checkpoint) -> Json:
    """The identity of the run that saved the step. UserError where it is missing or of another version."""
    recorded, tokens = saved.progress.get("run"), saved.progress.get("tokens")
    path = saved.path / saved_steps.PROGRESS
    if not isinstance(recorded, dict) or not isinstance(recorded.get("settings"), dict) or type(tokens) is not int:
        raise UserError(f"{path} does not say which run saved the step, so it cannot be resumed: name another --run")
    wrong = sorted(
        from_json(recorded["settings"]).keys() ^ (recorded["settings"].keys() | SETTING_TYPES.keys() - CHANGEABLE)
    )
    if wrong:
        raise UserError(
            f"{path} is of a version with other settings ({', '.join(wrong)}), so it cannot be resumed here: "
            "name another --run"
        )
    return recorded


def overrides_of(options: Options) -> dict[str, tuple[Any, str]]:
    """{setting: (value, the flag or file entry that gave it)} of the command line; flags override the file."""
    file = read_toml(options.config) if options.config else {}
    places = {name: (value, f"{name} = {value} in {options.config}") for name, value in file.items()}
    for name, value in options.flags.items():
        value = absolute_paths(name, value, Path())
        places[name] = value, f"{flag(name)} {value}"
    return places


def choose_settings(
    path: Path, overrides: Mapping[str, tuple[Any, str]], recorded: Json | None, defaults: Settings, *, must_agree: bool
) -> Settings:
    """Settings from the command line, else the recorded run, else the defaults. UserError where they conflict."""
    before = (recorded or {}).get("settings")
    before = from_json(before) if isinstance(before, dict) else {}
    if recorded and os.path.lexists(path / run_folder.SETTINGS):
        kept = read_toml(plain_file(path, run_folder.SETTINGS))
        before |= {name: value for name, value in kept.items() if name in CHANGEABLE}
    for name, (value, place) in overrides.items():
        if must_agree and name not in CHANGEABLE and value != before[name]:
            was = "it was not given" if before[name] is None else f"it was {before[name]}"
            longer = f"continue training in another --run with --init {path}"
            other = longer if name == "steps" else "name another --run"
            raise UserError(f"{place} differs from the run in {path}: {was}; leave it out, or {other}")
    values = {name: value for name, value in before.items() if value is not None}
    settings = replace(defaults, **values | {name: value for name, (value, _) in overrides.items()})
    if settings.ignore_fields and settings.init is None:
        raise UserError(f"--ignore-fields {','.join(settings.ignore_fields)} is for the checkpoint that --init names")
    if settings.lora is not None and settings.init is None:
        raise UserError(f"--lora {settings.lora}: adapters need the weights of a checkpoint: name one with --init")
    if settings.lora is not None and settings.optimizer == "muon":
        raise UserError("--optimizer muon is for full matrices: adapters (--lora) need another, such as adamw")
    for name in MODEL_SIZES:
        if settings.init and name in overrides:
            raise UserError(f"{overrides[name][1]} is for a new model, and --init {settings.init} names a checkpoint")
    unused = unused_settings(settings)
    for name in [name for name in unused if name in overrides]:
        raise UserError(
            f"{overrides[name][1]} is of another optimizer than --optimizer {settings.optimizer}: leave it out"
        )
    cleared: Json = dict.fromkeys(unused)
    settings = replace(settings, **cleared)
    if settings.accumulate > settings.batch_rows:
        raise UserError(
            f"--accumulate {settings.accumulate} splits a batch into more microbatches than it has rows: "
            f"--batch-rows is {settings.batch_rows}"
        )
    if settings.track is not None:
        check_installed((settings.track,))
    compilers = (os.environ.get("CXX", "c++"), "g++", "clang++")
    if settings.compile != "none" and not any(map(shutil.which, compilers)):
        raise UserError(f"--compile {settings.compile} needs a C++ compiler, and there is no {' or '.join(compilers)}")
    return resolved(settings)


def train_and_summarize(job: Job, saved: Checkpoint | None, controller: Controller | None) -> int:
    """Trains from the saved step to the end and evaluates, or saves and stops on a signal; returns the exit code.

    controller: controls the processes of the run, where there are several.
    """
    position = Position(saved.step, saved.progress["tokens"]) if saved else Position(step=0, tokens=0)
    state = controller.state if controller else init_state(job.model.params, job.optimizer)
    if saved:
        if controller:
            state = controller.do("load", saved)
        else:
            load = saved_steps.load if (saved.path / saved_steps.STATE).exists() else sharded.load
            found = load(saved, like=initial_model.state_to_save(state, job.settings))
            state = initial_model.restore_state(state, found, job.settings)
        saved_steps.set_aside(job.path / run_folder.STEPS, after=saved.step)
        write_checkpoints(job, state, controller)  # a kill may have come after the step was saved and before this
        print(f"resuming at step {position.step} of {job.settings.steps}")
    rows = metrics_log.truncate_after(job.path / run_folder.METRICS, position.step)
    costs = metrics_log.truncate_after(job.path / run_folder.SPEED, position.step, needed=False)
    metrics_log.truncate_after(job.path / run_folder.SAMPLES, position.step, needed=False)
    metrics_log.warn_at_resume(rows)
    state = train_steps(job, state, rows, costs, position, controller)
    stopped = int(state.step)
    if stopped < job.settings.steps:
        report.draw(job, rows, costs, None)
        resume = f"fnmodels-train --run {shlex.quote(str(job.path))} --resume"
        print(f"stopped at step {stopped} of {job.settings.steps}, saved; resume with: {resume}")
        return 130
    summary = summarize(job, state, controller)
    report.draw(job, rows, costs, summary["heldout_loss"])
    run_folder.write_json(job.path / run_folder.SUMMARY, summary)
    model_card.write(job, stopped, summary)
    report.result(summary, job.path)
    return metrics_log.exit_code(rows, summary["heldout_bits_per_byte"])


def train_steps(
    job: Job,
    state: State,
    rows: list[metrics_log.Row],
    costs: list[metrics_log.Row],
    position: Position,
    controller: Controller | None,
) -> State:
    """The training loop. Appends logged rows to `rows` and `costs`; returns at the end or, after saving, on a stop."""
    total, first, tokens = job.settings.steps, position.step, position.tokens
    step = controller.step if controller else make_step(job.train_loss, job.optimizer, **step_options(job.settings))
    loss = controller.loss if controller else job.loss
    sample = heldout.evenly_spaced_rows(job.heldout, job.settings.eval_rows)
    evaluate_every = job.settings.eval_every or max(1, total // 10)
    sample_every, speed = job.settings.sample_every, 0.0
    bits_per_byte = job.train_bits_per_byte if is_cross_entropy(job.settings) else None
    balance = moe_balance(job.settings)
    tracking: Json = {"track": job.settings.track, "settings": fixed_settings(job.settings)}
    with (
        closing(metrics_log.MetricsLog(job.path, open_trackers(job.path, after=first, **tracking))) as log,
        progress(total, first) as show,
        profiled(job.path / run_folder.TRACE, job.settings.profile, total - first) as done,
        stop_requests() as stop_requested,
        Saver(partial(save, job, None)) if not controller else nullcontext() as saver,
    ):
        for index in range(first, total):
            if saver:
                saver.check()
            began = time.perf_counter()
            rows_of_step = batch(job.mixture, job.settings.seed, index, job.settings.batch_rows)
            state, measured = step(state, rows_of_step)
            tokens += int(measured["count"])  # waits for the step
            real_tokens = int((rows_of_step["segment_ids"] > 0).sum())
            cost = speed_row(job, index + 1, real_tokens, time.perf_counter() - began)
            done()
            row: metrics_log.Row = {"step": index + 1, "tokens": tokens, "epochs": job.epochs(index + 1)}
            row |= metrics_log.step_metrics(measured, bits_per_byte, balance)
            now = cost["tokens_per_second"]
            speed = 0.9 * speed + 0.1 * now if speed else now
            if (index + 1) % evaluate_every == 0 or index + 1 == total:
                row["heldout_loss"] = heldout.heldout_loss(loss, evaluated_params(state, job.settings), sample)
                row["heldout_bits_per_byte"] = job.bits_per_byte(row["heldout_loss"])
            log.write(row, cost)
            rows.append(row)
            costs.append(cost)
            show(index + 1, row["loss"], row["lr"], speed)
            if sample_every and (index + 1) % sample_every == 0:
                sample_now = sample_text(job, state, controller)
                log.sample(index + 1, sample_now)
                print(f"step {index + 1} says: {terminal_text(sample_now)}", flush=True)
            stopping = stop_requested()
            if (index + 1) % job.settings.save_every == 0 or index + 1 == total or stopping:
                log.sync()
                current = Position(index + 1, tokens)
                if saver:
                    saver.save(initial_model.state_to_save(state, job.settings), current)
                else:
                    save(job, controller, state, current)
            if stopping:
                break
    return state


def speed_row(job: Job, step: int, tokens: int, seconds: float) -> metrics_log.Row:
    """The row of speed.jsonl; has `mfu` only with --peak-flops.

    tokens: those the model processed without padding, whether or not they are targets.
    """
    cost: metrics_log.Row = {"step": step, "seconds": metrics_log.six_digits(seconds), "peak_memory": peak_memory()}
    cost["tokens_per_second"] = metrics_log.six_digits(tokens / seconds)
    if job.settings.peak_flops is not None:
        cost["mfu"] = metrics_log.six_digits(tokens / seconds * job.flops_per_token / job.settings.peak_flops)
    return cost


def save(job: Job, controller: Controller | None, state: State, position: Position) -> None:
    """Saves the step in one rename, then writes the Hugging Face checkpoints of the same state."""
    steps, progress_so_far = job.path / run_folder.STEPS, {"tokens": position.tokens, "run": job.identity}
    if controller:
        controller.do("save", steps, position.step, progress_so_far, job.settings.keep)
    else:
        saved_steps.save(steps, position.step, state, progress_so_far, keep=job.settings.keep)
    write_checkpoints(job, state, controller)
    model_card.write(job, position.step, None)


def write_checkpoints(job: Job, state: State, controller: Controller | None) -> None:
    """Writes the run folder's checkpoint and, with --ema, a complete one of the averaged weights below it."""

    def write(path: Path, averaged: bool) -> None:
        if controller:
            params = controller.do("gather_checkpoint", averaged)
        else:
            params = evaluated_params(state, job.settings) if averaged else state.params
        initial_model.write_checkpoint(path, job.model.config, params, job.settings.init)

    write(job.path, False)
    if job.settings.ema is not None:
        average = job.path / run_folder.EMA
        check_folder(average)
        write(average, True)
        copy_file(plain_file(job.path, "tokenizer.json"), average / "tokenizer.json")
        copy_companions(job.path, average)


def summarize(job: Job, state: State, controller: Controller | None) -> Json:
    """summary.json: the loss on all held-out documents, and a sampled continuation."""
    loss = heldout.heldout_loss(
        controller.loss if controller else job.loss, evaluated_params(state, job.settings), job.heldout
    )
    size = job.dataset.heldout.bytes
    return {
        "steps": job.settings.steps,
        "ema": job.settings.ema,
        "heldout_loss": loss,
        "heldout_bytes": size,
        "heldout_bits_per_byte": job.bits_per_byte(loss),
        "zlib_bits_per_byte": 8 * job.dataset.zlib_bytes / size,
        "sample": sample_text(job, state, controller),
    }


def sample_text(job: Job, state: State, controller: Controller | None) -> str:
    """The prompt with a sampled continuation; the random draws are the same each time."""
    params = controller.do("gather_weights") if controller else evaluated_params(state, job.settings)
    model, settings = job.model, job.settings
    return complete(
        params, model.config, model.tokenizer, settings.prompt, model.end_ids, tokens=settings.sample_tokens
    )
