"""The main job: from a folder's name to a trained checkpoint in it, by way of however many stops and resumes.

Everything is a function of the settings, which are recorded, and of the step: a resumed run computes the same bits and
writes the same metrics as one that was never stopped.
"""

import datetime
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fnmodels.errors import UserError
from fnmodels.tree import Tree
from train.checkpoint import saved_steps, sharded
from train.checkpoint.background import Saver
from train.checkpoint.saved_steps import Checkpoint
from train.data.mixture import batch
from train.dist import torchrun
from train.eval.generate import complete
from train.eval.pretrained import copy_companions
from train.job.processes.controller import Team
from train.job.processes.signals import stop_requests
from train.job.processes.worker import Work
from train.state import State, init_state
from train.step import make_step

from . import heldout, initial_model, metrics_log, preflight, report, run_folder
from .flops import peak_memory
from .mesh_flags import check_fit, checked
from .profile import traced
from .progress import progress
from .recipe import balance_of, is_plain, strangers, weights
from .settings import FREE, KINDS, SIZES, Settings, absolute, flag, from_json, read_toml
from .setup import Job, Json, prepare, resolved, step_options


@dataclass(frozen=True)
class Reached:
    """Where a run is: steps made, tokens learned from. The batch of a step is a function of the seed and the step."""

    step: int
    tokens: int


@dataclass(frozen=True)
class Options:
    """What was given: the folder, flags by the settings' names, a file of settings; sharing: beside `mesh`."""

    run: Path
    flags: Mapping[str, Any]
    config: Path | None = None
    resume: bool = False
    mesh: str | None = None
    sharing: Mapping[str, Any] = field(default_factory=dict)
    limit: datetime.timedelta | None = None  # of processes that wait for one that hangs


def train_run(options: Options, defaults: Settings) -> int:
    """Start or resume the run; returns the exit code."""
    given, start = told(options), torchrun.start()
    if options.resume and not torchrun.by_torchrun():
        run_folder.refuse_absent(options.run)
    with run_folder.locked(options.run):
        if torchrun.started_anew() and run_folder.begun_by(options.run, start):
            options = replace(options, resume=True)
        run_folder.refuse_to_mix(options.run, resume=options.resume)
        run_folder.let_in(options.run, start)
        saved, problems = saved_steps.newest(options.run / run_folder.STEPS) if options.resume else (None, [])
        report.damaged(problems)
        if options.resume and saved is None:
            print(f"no complete checkpoint in {options.run}: starting at step 0")
        recorded = recorded_in(saved) if saved else run_folder.read_json(options.run / run_folder.RUN)
        settings = choose(options.run, given, recorded, defaults, must_agree=saved is not None)
        sharing = checked(options.mesh, settings, **options.sharing)
        summary = run_folder.read_json(options.run / run_folder.SUMMARY) if saved else None
        if summary is not None and report.is_result(summary) and saved is not None and saved.step == settings.steps:
            print(f"the run is finished: {settings.steps} steps")
            report.result(summary, options.run)
            return 0
        preflight.check_text(settings.data) if saved else preflight.check(settings, sharing)
        print("reading the text", flush=True)
        began = time.monotonic()
        several = sharing.mesh.world > 1
        fits = partial(check_fit, sharing, settings)
        params, job = prepare(options.run, settings, recorded if saved else None, fits, spread=several)
        report.skipped(job)
        report.settings(settings)  # not before: a mistake that the text shows would be lost below a page of them
        report.prepared(job, time.monotonic() - began)
        report.peak(job)
        shared = Team(Work(sharing, settings, job.config, options.limit), fresh=saved is None) if several else None
        return work(job, params, saved, shared)


def recorded_in(saved: Checkpoint) -> Json:
    """The identity of the run that saved the step. UserError where no run did."""
    recorded, tokens = saved.progress.get("run"), saved.progress.get("tokens")
    path = saved.path / saved_steps.PROGRESS
    if not isinstance(recorded, dict) or not isinstance(recorded.get("settings"), dict) or type(tokens) is not int:
        raise UserError(f"{path} does not say which run saved the step, so none can go on from it: name another --run")
    wrong = sorted(from_json(recorded["settings"]).keys() ^ (recorded["settings"].keys() | KINDS.keys() - FREE))
    if wrong:
        raise UserError(
            f"{path} is of a version with other settings ({', '.join(wrong)}), so this one cannot go on from it: name "
            "another --run"
        )
    return recorded


def told(options: Options) -> dict[str, tuple[Any, str]]:
    """{name of a setting: (what it was given as, where)}; flags win over the file."""
    file = read_toml(options.config) if options.config else {}
    places = {name: (value, f"{name} = {value} in {options.config}") for name, value in file.items()}
    for name, value in options.flags.items():
        value = absolute(name, value, Path())
        places[name] = value, f"{flag(name)} {value}"
    return places


def choose(
    path: Path, given: Mapping[str, tuple[Any, str]], recorded: Json | None, defaults: Settings, *, must_agree: bool
) -> Settings:
    """What was given, else the recorded run's, else the defaults. UserError where what was given contradicts it."""
    before = (recorded or {}).get("settings")
    before = from_json(before) if isinstance(before, dict) else {}
    if recorded and (path / run_folder.SETTINGS).exists():
        before |= {name: value for name, value in read_toml(path / run_folder.SETTINGS).items() if name in FREE}
    for name, (value, place) in given.items():
        if must_agree and name not in FREE and value != before[name]:
            was = "it was not given" if before[name] is None else f"it was {before[name]}"
            longer = f"train on in another --run with --init {path}"
            other = longer if name == "steps" else "name another --run"
            raise UserError(f"{place} differs from the run in {path}: {was}; leave it out, or {other}")
    values = {name: value for name, value in before.items() if value is not None}
    settings = replace(defaults, **values | {name: value for name, (value, _) in given.items()})
    if settings.lora is not None and settings.init is None:
        raise UserError(f"--lora {settings.lora}: adapters belong to the weights of a checkpoint: name one with --init")
    if settings.lora is not None and settings.optimizer == "muon":
        raise UserError("--optimizer muon is for whole matrices: adapters (--lora) take another, such as adamw")
    for name in SIZES:
        if settings.init and name in given:
            raise UserError(f"{given[name][1]} is of a model that is made anew, and --init {settings.init} names one")
    idle = strangers(settings)
    for name in [name for name in idle if name in given]:
        raise UserError(f"{given[name][1]} is of another optimizer than --optimizer {settings.optimizer}: leave it out")
    without: Json = dict.fromkeys(idle)
    settings = replace(settings, **without)
    if settings.accumulate > settings.batch_rows:
        parts = f"--accumulate {settings.accumulate} takes the rows of a batch in so many parts"
        raise UserError(f"{parts}, and --batch-rows is {settings.batch_rows}")
    compilers = (os.environ.get("CXX", "c++"), "g++", "clang++")
    if settings.compile != "none" and not any(map(shutil.which, compilers)):
        raise UserError(f"--compile {settings.compile} needs a C++ compiler, and there is no {' or '.join(compilers)}")
    return resolved(settings)


def work(job: Job, params: Tree, saved: Checkpoint | None, shared: Team | None) -> int:
    """Train from the saved step to the end, then evaluate; or save and stop where a signal asks for it.

    shared: the processes that train together, where there are several.
    """
    state, reached = shared.state if shared else init_state(params, job.optimizer), Reached(step=0, tokens=0)
    if saved:
        reached = Reached(step=saved.step, tokens=saved.progress["tokens"])
        if shared:
            state = shared.do("load", saved)
        else:
            by_one = (saved.path / saved_steps.STATE).exists()
            kept = (saved_steps if by_one else sharded).load(saved, like=initial_model.kept(state, job.settings))
            state = initial_model.restored(state, kept, job.settings)
        saved_steps.set_aside(job.path / run_folder.STEPS, after=saved.step)
        write_out(job, state, shared)  # a kill may have come between the step and this
        print(f"resuming at step {reached.step} of {job.settings.steps}")
    rows = metrics_log.cut_after(job.path / run_folder.METRICS, reached.step)
    costs = metrics_log.cut_beside(job.path / run_folder.SPEED, reached.step)
    metrics_log.cut_beside(job.path / run_folder.SAMPLES, reached.step)
    state = train_steps(job, state, rows, costs, reached, shared)
    stopped = int(state.step)
    if stopped < job.settings.steps:
        report.draw(job, rows, costs, None)
        print(f"stopped at step {stopped} of {job.settings.steps}, saved; {report.how_to_resume(job.path)}")
        return 130
    summary = summarize(job, state, shared)
    report.draw(job, rows, costs, summary["heldout_loss"])
    run_folder.write_json(job.path / run_folder.SUMMARY, summary)
    report.result(summary, job.path)
    return 0


def train_steps(
    job: Job,
    state: State,
    rows: list[metrics_log.Row],
    costs: list[metrics_log.Row],
    reached: Reached,
    shared: Team | None,
) -> State:
    """The loop. Appends to `rows` and `costs` what it writes to files; returns at the end or, saved, at a stop."""
    total, first, tokens = job.settings.steps, reached.step, reached.tokens
    step = shared.step if shared else make_step(job.train_loss, job.optimizer, **step_options(job.settings))
    loss = shared.loss if shared else job.loss
    sample = heldout.spread(job.heldout, job.settings.eval_rows)
    evaluate_every = job.settings.eval_every or max(1, total // 10)
    sample_every, speed = job.settings.sample_every, 0.0
    bits_per_byte, balance = job.train_bits_per_byte if is_plain(job.settings) else None, balance_of(job.settings)
    with (
        metrics_log.log(job.path, after=first) as log,
        progress(total, first) as show,
        traced(job.path / run_folder.TRACE, job.settings.profile, total - first) as done,
        stop_requests() as asked,
        Saver(partial(save, job, job.settings.keep)) if not shared else nullcontext() as saver,
    ):
        for index in range(first, total):
            if saver:
                saver.check()
            began = time.perf_counter()
            taken = batch(job.mixture, job.settings.seed, index, job.settings.batch_rows)
            state, measured = step(state, taken)
            tokens += int(measured["count"])  # waits for the step
            text = int((taken["segment_ids"] > 0).sum())
            cost = what_it_cost(job, index + 1, text, time.perf_counter() - began)
            done()
            row: metrics_log.Row = {"step": index + 1, "tokens": tokens, "epochs": job.epochs(index + 1)}
            row |= metrics_log.of_step(measured, bits_per_byte, balance)
            now = cost["tokens_per_second"]
            speed = 0.9 * speed + 0.1 * now if speed else now
            if (index + 1) % evaluate_every == 0 or index + 1 == total:
                row["heldout_loss"] = heldout.heldout_loss(loss, weights(state, job.settings), sample)
                row["heldout_bits_per_byte"] = job.bits_per_byte(row["heldout_loss"])
            log.write(row, cost)
            rows.append(row)
            costs.append(cost)
            show(index + 1, row["loss"], row["lr"], speed)
            if sample_every and (index + 1) % sample_every == 0:
                said = speech(job, state, shared)
                log.sample(index + 1, said)
                print(f"step {index + 1} says: {report.shown(said)}", flush=True)
            stopping = asked()
            if (index + 1) % job.settings.save_every == 0 or index + 1 == total or stopping:
                log.sync()
                here = Reached(index + 1, tokens)
                if saver:
                    saver.save(initial_model.kept(state, job.settings), here)
                elif shared:
                    save_together(job, shared, state, here)
            if stopping:
                break
    return state


def what_it_cost(job: Job, step: int, tokens: int, seconds: float) -> metrics_log.Row:
    """The row of speed.jsonl: without `mfu` where nobody said what the machine's peak is.

    tokens: all that the model met, learned from or not, without padding.
    """
    cost: metrics_log.Row = {"step": step, "seconds": metrics_log.short(seconds), "peak_memory": peak_memory()}
    cost["tokens_per_second"] = metrics_log.short(tokens / seconds)
    if job.settings.peak_flops is not None:
        cost["mfu"] = metrics_log.short(tokens / seconds * job.flops_per_token / job.settings.peak_flops)
    return cost


def save(job: Job, keep: int, state: State, reached: Reached) -> None:
    """The step first, in one rename; the checkpoints for others to read are made from the same step after it."""
    saved_steps.save(job.path / run_folder.STEPS, reached.step, state, progress_of(job, reached), keep=keep)
    write_out(job, state, None)


def save_together(job: Job, shared: Team, state: State, reached: Reached) -> None:
    """The same by several processes, each of which writes what it holds; training waits."""
    shared.do("save", job.path / run_folder.STEPS, reached.step, progress_of(job, reached), job.settings.keep)
    write_out(job, state, shared)


def progress_of(job: Job, reached: Reached) -> Json:
    return {"tokens": reached.tokens, "run": job.identity}


def write_out(job: Job, state: State, shared: Team | None) -> None:
    """The folder's checkpoint; with --ema, below it, that of the average, which is as complete."""

    def write(path: Path, evaluated: bool) -> None:
        if shared:
            params = shared.do("trained", evaluated)
        else:
            params = weights(state, job.settings) if evaluated else state.params
        initial_model.write(path, job.config, params, job.settings.init)

    write(job.path, False)
    if job.settings.ema is not None:
        average = job.path / run_folder.EMA
        write(average, True)
        shutil.copyfile(job.path / "tokenizer.json", average / "tokenizer.json")
        copy_companions(job.path, average)


def summarize(job: Job, state: State, shared: Team | None) -> Json:
    """What the run reached on all held-out documents, and a sample of its speech."""
    loss = heldout.heldout_loss(shared.loss if shared else job.loss, weights(state, job.settings), job.heldout)
    size = job.dataset.heldout.bytes
    return {
        "steps": job.settings.steps,
        "ema": job.settings.ema,
        "heldout_loss": loss,
        "heldout_bytes": size,
        "heldout_bits_per_byte": job.bits_per_byte(loss),
        "zlib_bits_per_byte": 8 * job.dataset.zlib_bytes / size,
        "sample": speech(job, state, shared),
    }


def speech(job: Job, state: State, shared: Team | None) -> str:
    """The prompt and what the model goes on with; the draws are the same each time."""
    params = shared.do("whole") if shared else weights(state, job.settings)
    how = {"tokens": job.settings.sample_tokens}
    return complete(params, job.config, job.tokenizer, job.settings.prompt, job.ends, **how)
