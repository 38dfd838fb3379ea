"""The main job: from a folder's name to a trained checkpoint in it, by way of however many stops and resumes.

Everything is a function of the choices recorded in run.json and of the step: a resumed run computes the same bits and
writes the same metrics as one that was never stopped.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from fnmodels.tree import Tree
from train import data, evaluate, folder, metrics, report
from train.errors import UserError
from train.job import Choices, Job, Json, prepare
from train.preset import Preset
from train.progress import progress
from train.sample import complete
from train.state import State, init_state
from train.step import make_step
from train.stop import stop_requests


@dataclass(frozen=True)
class Options:
    """The flags; None where one was not given."""

    run: Path
    steps: int | None = None
    seed: int | None = None
    data: Path | None = None
    init: Path | None = None
    resume: bool = False
    save_every: int = 100


def train_run(options: Options, preset: Preset) -> int:
    """Start or resume the run; returns the exit code."""
    with folder.locked(options.run):
        folder.refuse_to_mix(options.run, resume=options.resume)
        recorded = folder.read_json(options.run / folder.RUN) if options.resume else None
        saved = folder.saved_progress(options.run / folder.STATE) if recorded else None
        if options.resume and saved is None:
            print(f"no complete checkpoint in {options.run}: starting at step 0")
        choices = choose(options, recorded, preset, must_agree=saved is not None)
        summary = folder.read_json(options.run / folder.SUMMARY) if saved else None
        if summary is not None and saved is not None and saved["step"] == choices.steps:
            print(f"the run is finished: {choices.steps} steps")
            report.result(summary, options.run)
            return 0
        print("reading the text", flush=True)
        began = time.monotonic()
        params, job = prepare(options.run, choices, preset, recorded if saved else None)
        report.skipped(job.texts)
        report.prepared(job, time.monotonic() - began)
        return work(job, params, saved or {"step": 0, "tokens": 0}, options.save_every)


def choose(options: Options, recorded: Json | None, preset: Preset, *, must_agree: bool) -> Choices:
    """The flags where given, else the recorded run's, else the defaults. UserError where a flag contradicts it."""
    given = {
        "steps": options.steps,
        "seed": options.seed,
        "data": options.data and str(options.data.resolve()),
        "init": options.init and str(options.init.resolve()),
    }
    before = recorded["choices"] if recorded else {}
    for name, value in given.items():
        if must_agree and value is not None and value != before[name]:
            was = "it was not given" if before[name] is None else f"it was {before[name]}"
            raise UserError(
                f"--{name} {value} differs from the run in {options.run}: {was}; leave it out, or name another --run"
            )
    defaults: Json = {"steps": preset.steps, "seed": 0, "data": None, "init": None}
    for earlier in (before, given):
        defaults |= {name: value for name, value in earlier.items() if value is not None}
    return Choices(**defaults)


def work(job: Job, params: Tree, saved: Json, save_every: int) -> int:
    """Train from the saved step to the end, then evaluate; or save and stop where a signal asks for it."""
    state = init_state(params, job.optimizer)
    if saved["step"]:
        folder.load_state(job.path / folder.STATE, state)
        print(f"resuming at step {saved['step']} of {job.choices.steps}")
    rows = metrics.cut_after(job.path / folder.METRICS, saved["step"])
    state = train_steps(job, state, rows, saved, save_every)
    stopped = int(state.step)
    if stopped < job.choices.steps:
        report.draw(job, rows, None)
        print(f"stopped at step {stopped} of {job.choices.steps}, saved; {report.how_to_resume(job.path)}")
        return 130
    summary = summarize(job, state.params)
    report.draw(job, rows, summary["heldout_loss"])
    folder.write_json(job.path / folder.SUMMARY, summary)
    report.result(summary, job.path)
    return 0


def train_steps(job: Job, state: State, rows: list[metrics.Row], saved: Json, save_every: int) -> State:
    """The loop. Appends to `rows` what it writes to metrics.jsonl; returns at the end or, saved, at a stop."""
    total, first, tokens = job.choices.steps, saved["step"], saved["tokens"]
    step = make_step(job.loss, job.optimizer, clip=job.preset.clip)
    sample = evaluate.spread(job.heldout, job.preset.evaluation_rows)
    evaluate_every = max(1, total // job.preset.evaluations)
    path, board, speed = job.path / folder.METRICS, job.path / "tensorboard", 0.0
    with metrics.log(path, board, after=first) as log, progress(total, first) as show, stop_requests() as asked:
        for index in range(first, total):
            began = time.perf_counter()
            chosen = data.order(len(job.rows["tokens"]), job.choices.seed, index, job.preset.batch_rows)
            state, measured = step(state, data.take(job.rows, chosen))
            count = int(measured["count"])
            tokens += count
            row: metrics.Row = {"step": index + 1, "tokens": tokens, "finite": bool(measured["finite"])}
            row |= {name: metrics.shortest(measured[name]) for name in ("loss", "lr", "grad_norm")}
            now = count / (time.perf_counter() - began)
            speed = 0.9 * speed + 0.1 * now if speed else now
            if (index + 1) % evaluate_every == 0 or index + 1 == total:
                row["heldout_loss"] = evaluate.heldout_loss(job.loss, state.params, sample)
                row["heldout_bits_per_byte"] = job.bits_per_byte(row["heldout_loss"])
            log.write(row, tokens_per_second=now)
            rows.append(row)
            show(index + 1, row["loss"], row["lr"], speed)
            stopping = asked()
            if (index + 1) % save_every == 0 or index + 1 == total or stopping:
                log.sync()
                save(job, state, {"step": index + 1, "tokens": tokens})
            if stopping:
                break
    return state


def save(job: Job, state: State, reached: Json) -> None:
    """The state first, in one rename; the checkpoint for others to read is made from the same step after it."""
    folder.save_state(job.path / folder.STATE, state, reached)
    folder.save_checkpoint(job.path, job.config, state.params)


def summarize(job: Job, params: Tree) -> Json:
    """What the run reached on all held-out documents, and a sample of its speech."""
    loss = evaluate.heldout_loss(job.loss, params, job.heldout)
    size = job.dataset.heldout.bytes
    return {
        "steps": job.choices.steps,
        "heldout_loss": loss,
        "heldout_bytes": size,
        "heldout_bits_per_byte": job.bits_per_byte(loss),
        "zlib_bits_per_byte": 8 * job.dataset.zlib_bytes / size,
        "sample": complete(
            params, job.config, job.tokenizer, job.preset.prompt, job.ends, tokens=job.preset.sample_tokens
        ),
    }
