"""The main job: from a folder's name to a trained checkpoint in it, by way of however many stops and resumes.

Everything is a function of the choices, which are recorded, and of the step: a resumed run computes the same bits and
writes the same metrics as one that was never stopped.
"""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import params as P
from fnmodels.tree import Tree
from train import checkpoint, evaluate, folder, metrics, report, sources
from train.checkpoint import Checkpoint
from train.errors import UserError
from train.job import Choices, Job, Json, prepare
from train.mixture import batch
from train.preset import Preset
from train.progress import progress
from train.sample import complete
from train.saver import Saver
from train.state import State, init_state
from train.step import make_step
from train.stop import stop_requests


@dataclass(frozen=True)
class Reached:
    """Where a run is: steps made, tokens learned from. The batch of a step is a function of the seed and the step."""

    step: int
    tokens: int


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
    keep: int = 2


def train_run(options: Options, preset: Preset) -> int:
    """Start or resume the run; returns the exit code."""
    with folder.locked(options.run):
        folder.refuse_to_mix(options.run, resume=options.resume)
        saved, problems = checkpoint.newest(options.run / folder.STEPS) if options.resume else (None, [])
        report.damaged(problems)
        if options.resume and saved is None:
            print(f"no complete checkpoint in {options.run}: starting at step 0")
        recorded = recorded_in(saved) if saved else folder.read_json(options.run / folder.RUN)
        choices = choose(options, recorded, preset, must_agree=saved is not None)
        summary = folder.read_json(options.run / folder.SUMMARY) if saved else None
        if summary is not None and report.is_result(summary) and saved is not None and saved.step == choices.steps:
            print(f"the run is finished: {choices.steps} steps")
            report.result(summary, options.run)
            return 0
        print("reading the text", flush=True)
        began = time.monotonic()
        params, job = prepare(options.run, choices, preset, recorded if saved else None)
        report.skipped(job.texts)
        report.prepared(job, time.monotonic() - began)
        return work(job, params, saved, options)


def recorded_in(saved: Checkpoint) -> Json:
    """The identity of the run that saved the step. UserError where no run did."""
    recorded, tokens = saved.progress.get("run"), saved.progress.get("tokens")
    if (
        not isinstance(recorded, dict)
        or not {"steps", "seed"} <= choices_in(recorded).keys()
        or recorded.get("compute_dtype") not in ("bfloat16", "float32")
        or type(tokens) is not int
    ):
        raise UserError(
            f"{saved.path / checkpoint.PROGRESS} does not say which run saved the step, so none can go on from it: "
            "name another --run"
        )
    return recorded


def choices_in(recorded: Json | None) -> Json:
    """The recorded choices, by name; what cannot be one, in a run.json that somebody changed, is as if not there."""
    kinds = {"steps": int, "seed": int, "data": str, "init": str}
    found = (recorded or {}).get("choices")
    found = found if isinstance(found, dict) else {}
    return {name: found[name] for name, kind in kinds.items() if type(found.get(name)) is kind}


def choose(options: Options, recorded: Json | None, preset: Preset, *, must_agree: bool) -> Choices:
    """The flags where given, else the recorded run's, else the defaults. UserError where a flag contradicts it."""
    given = {
        "steps": options.steps,
        "seed": options.seed,
        "data": options.data and sources.absolute(str(options.data)),
        "init": options.init and str(options.init.resolve()),
    }
    before = choices_in(recorded)
    for name, value in given.items():
        if must_agree and value is not None and value != before.get(name):
            was = "it was not given" if before.get(name) is None else f"it was {before[name]}"
            raise UserError(
                f"--{name} {value} differs from the run in {options.run}: {was}; leave it out, or name another --run"
            )
    defaults: Json = {"steps": preset.steps, "seed": 0, "data": None, "init": None}
    for earlier in (before, given):
        defaults |= {name: value for name, value in earlier.items() if value is not None}
    return Choices(**defaults)


def work(job: Job, params: Tree, saved: Checkpoint | None, options: Options) -> int:
    """Train from the saved step to the end, then evaluate; or save and stop where a signal asks for it."""
    state, reached = init_state(params, job.optimizer), Reached(step=0, tokens=0)
    if saved:
        reached = Reached(step=saved.step, tokens=saved.progress["tokens"])
        state = checkpoint.load(saved, like=state)
        checkpoint.set_aside(job.path / folder.STEPS, after=saved.step)
        P.save_pretrained(job.path, job.config, state.params)  # a kill may have come between the step and this
        print(f"resuming at step {reached.step} of {job.choices.steps}")
    rows = metrics.cut_after(job.path / folder.METRICS, reached.step)
    state = train_steps(job, state, rows, reached, options)
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


def train_steps(job: Job, state: State, rows: list[metrics.Row], reached: Reached, options: Options) -> State:
    """The loop. Appends to `rows` what it writes to metrics.jsonl; returns at the end or, saved, at a stop."""
    total, first, tokens = job.choices.steps, reached.step, reached.tokens
    step = make_step(job.loss, job.optimizer, clip=job.preset.clip)
    sample = evaluate.spread(job.heldout, job.preset.evaluation_rows)
    evaluate_every = max(1, total // job.preset.evaluations)
    path, board, speed = job.path / folder.METRICS, job.path / "tensorboard", 0.0
    with (
        metrics.log(path, board, after=first) as log,
        progress(total, first) as show,
        stop_requests() as asked,
        Saver(partial(save, job, options.keep)) as saver,
    ):
        for index in range(first, total):
            saver.check()
            began = time.perf_counter()
            state, measured = step(state, batch(job.mixture, job.choices.seed, index, job.preset.batch_rows))
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
            if (index + 1) % options.save_every == 0 or index + 1 == total or stopping:
                log.sync()
                saver.save(state, Reached(index + 1, tokens))
            if stopping:
                break
    return state


def save(job: Job, keep: int, state: State, reached: Reached) -> None:
    """The step first, in one rename; the checkpoint for others to read is made from the same step after it."""
    progress = {"tokens": reached.tokens, "run": job.identity}
    checkpoint.save(job.path / folder.STEPS, reached.step, state, progress, keep=keep)
    P.save_pretrained(job.path, job.config, state.params)


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
