"""The main job: from a folder's name to a trained checkpoint in it, by way of however many stops and resumes.

Everything is a function of the choices recorded in run.json and of the step: a resumed run computes the same bits and
writes the same metrics as one that was never stopped.
"""

import hashlib
import json
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

import fnmodels
import params as P
from fnmodels import llama, tree
from fnmodels.tree import Tree
from train import checkpoint, corpus, data, evaluate, folder, metrics
from train.cache import cached
from train.errors import UserError
from train.files import write_text
from train.loss import next_token_loss
from train.optim import Optimizer, adamw
from train.plot import loss_picture
from train.preset import Preset, hf_config
from train.progress import progress
from train.sample import complete
from train.schedule import warmup_stable_decay
from train.state import State, init_state
from train.step import make_step
from train.stop import stop_requests
from train.tokenizer import special_ids, tokenizer_config, train

Json = dict[str, Any]


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


@dataclass(frozen=True)
class Choices:
    """What decides the run's numbers, as run.json keeps it."""

    steps: int
    seed: int
    data: str | None
    init: str | None


@dataclass(frozen=True)
class Job:
    """Everything that training needs and that does not change while it runs."""

    path: Path
    choices: Choices
    preset: Preset
    config: Any
    tokenizer: Tokenizer
    ends: tuple[int, ...]
    texts: corpus.Corpus
    dataset: data.Dataset
    rows: data.Batch
    heldout: data.Batch
    loss: Callable[..., tuple[Tensor, Tensor]]
    optimizer: Optimizer

    @property
    def heldout_targets(self) -> int:
        return int((self.heldout["labels"] >= 0).sum())

    def bits_per_byte(self, loss: float) -> float:
        return evaluate.bits_per_byte(loss, self.heldout_targets, self.dataset.heldout.bytes)


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
            tell(summary, options.run)
            return 0
        job, params = prepare(options.run, choices, preset, recorded if saved else None)
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
                f"--{name} {value} differs from the run in {options.run}: {was}; leave the flag out, or name another --run"
            )
    defaults: Json = {"steps": preset.steps, "seed": 0, "data": None, "init": None}
    for earlier in (before, given):
        defaults |= {name: value for name, value in earlier.items() if value is not None}
    return Choices(**defaults)


def prepare(path: Path, choices: Choices, preset: Preset, recorded: Json | None) -> tuple[Job, Tree]:
    """Text, tokenizer and model: new ones, those of --init, or on resume (`recorded`) those in the run folder."""
    began = time.monotonic()
    texts = corpus.load(Path(choices.data) if choices.data else None)
    tell_skipped(texts)
    source = path if recorded else Path(choices.init) if choices.init else None
    if source is None:
        tokenizer = new_tokenizer(texts, preset.vocab_size)
        ids = special_ids(tokenizer)
        config: Any = llama.Config.from_hf(hf_config(preset, tokenizer.get_vocab_size(), ids))
        params, ends = P.init(config, choices.seed, dtype=torch.float32), (ids["eos_token_id"],)
    else:
        tokenizer, ends = checkpoint.load_tokenizer(source), checkpoint.end_ids(source)
        if recorded:
            config = checkpoint.load_config(source)
            params = P.init(config, choices.seed, dtype=torch.float32)  # shapes only: the saved state fills them
        else:
            config, params = P.load_pretrained(source, dtype=torch.float32, copy=True)
    checkpoint.check_vocabulary(tokenizer, config.vocab_size, source or path)
    identity = json.loads(
        json.dumps(
            {
                "choices": asdict(choices),
                "preset": asdict(preset),
                "corpus": corpus.fingerprint(texts),
                "tokenizer": hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
                "config": config.to_hf(),
            }
        )
    )
    if recorded:
        check_agreement(recorded, identity, path)
    else:
        begin_folder(path, identity, tokenizer, source, preset)
    dataset = data.tokenised(texts, tokenizer, ends[0] if ends else None)
    length = min(preset.row_length, config.max_position_embeddings)
    job = Job(
        path=path,
        choices=choices,
        preset=preset,
        config=config,
        tokenizer=tokenizer,
        ends=ends,
        texts=texts,
        dataset=dataset,
        rows=data.rows(dataset.train, length),
        heldout=data.rows(dataset.heldout, length),
        loss=loss_function(config, getattr(torch, preset.compute_dtype)),
        optimizer=optimizer_for(config, choices, preset),
    )
    tell_job(job, time.monotonic() - began)
    return job, params


def new_tokenizer(texts: corpus.Corpus, vocab_size: int) -> Tokenizer:
    """A tokenizer made of the train documents, from the cache where an equal corpus had one before."""
    return cached(
        f"tokenizer-{corpus.fingerprint(texts)[:32]}-{vocab_size}.json",
        lambda path: train((document.text for document in texts.train), vocab_size).save(str(path)),
        lambda path: Tokenizer.from_file(str(path)),
    )


def begin_folder(path: Path, identity: Json, tokenizer: Tokenizer, source: Path | None, preset: Preset) -> None:
    """run.json first: from then on the folder is known as a run's, and may be resumed."""
    folder.write_json(path / folder.RUN, identity)
    for stale in (folder.STATE, folder.SUMMARY):
        (path / stale).unlink(missing_ok=True)
    write_text(path / "tokenizer.json", tokenizer.to_str(pretty=True))
    folder.write_json(path / "config.json", identity["config"])
    if source is None:
        folder.write_json(path / "tokenizer_config.json", tokenizer_config(context=preset.row_length))
    else:
        checkpoint.copy_companions(source, path)


def check_agreement(recorded: Json, identity: Json, path: Path) -> None:
    """UserError where resuming would go on with something else than what the run began with."""
    what = {
        "corpus": "the text has changed since the run began",
        "tokenizer": "tokenizer.json is not the one that the run began with",
        "config": "config.json is not the one that the run began with",
        "preset": "this version trains with other settings than the run began with",
    }
    for name, change in what.items():
        if recorded.get(name) != identity[name]:
            raise UserError(
                f"--run {path}: {change}, so that resuming would not give the same result: name another --run"
            )


def loss_function(config: Any, dtype: torch.dtype) -> Callable[..., tuple[Tensor, Tensor]]:
    """Computes in `dtype`; the parameters, their gradients and the loss stay fp32."""

    def loss(params: Tree, batch: data.Batch, *, layout: Any = None) -> tuple[Tensor, Tensor]:
        return next_token_loss(tree.map(lambda p: p.to(dtype), params), batch, config=config, layout=layout)

    return loss


def optimizer_for(config: Any, choices: Choices, preset: Preset) -> Optimizer:
    peak = preset.init_learning_rate if choices.init else preset.learning_rate
    warmup = min(preset.warmup, choices.steps // 10)

    def rate(step: Tensor) -> float:
        return peak * float(
            warmup_stable_decay(int(step), total=choices.steps, warmup=warmup, decay_ratio=preset.decay_ratio)
        )

    return adamw(
        rate, betas=preset.betas, weight_decay=preset.weight_decay, spec=fnmodels.family_of(config).spec(config)
    )


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
        draw(job, rows, None)
        print(f"stopped at step {stopped} of {job.choices.steps}, saved; {how_to_resume(job.path)}")
        return 130
    summary = summarise(job, state.params)
    draw(job, rows, summary["heldout_loss"])
    folder.write_json(job.path / folder.SUMMARY, summary)
    tell(summary, job.path)
    return 0


def train_steps(job: Job, state: State, rows: list[metrics.Row], saved: Json, save_every: int) -> State:
    """The loop. Appends to `rows` what it writes to metrics.jsonl; returns at the end or, saved, at a stop."""
    total, first, tokens = job.choices.steps, saved["step"], saved["tokens"]
    step = make_step(job.loss, job.optimizer, clip=job.preset.clip)
    sample = evaluate.spread(job.heldout, job.preset.evaluation_rows)
    evaluate_every = max(1, total // job.preset.evaluations)
    path, board, speed = job.path / folder.METRICS, job.path / "tensorboard", 0.0
    with metrics.log(path, board, after=first) as log, progress(total, first) as report, stop_requests() as asked:
        for index in range(first, total):
            began = time.perf_counter()
            chosen = data.order(len(job.rows["tokens"]), job.choices.seed, index, job.preset.batch_rows)
            state, measured = step(state, data.take(job.rows, chosen))
            row = {name: float(measured[name]) for name in ("loss", "lr", "grad_norm")}
            count = int(measured["count"])
            tokens += count
            row = {"step": index + 1, **row, "tokens": tokens, "finite": bool(measured["finite"])}
            now = count / (time.perf_counter() - began)
            speed = 0.9 * speed + 0.1 * now if speed else now
            if (index + 1) % evaluate_every == 0 or index + 1 == total:
                row["heldout_loss"] = evaluate.heldout_loss(job.loss, state.params, sample)
                row["heldout_bits_per_byte"] = job.bits_per_byte(row["heldout_loss"])
            log.write(row, tokens_per_second=now)
            rows.append(row)
            report(index + 1, row["loss"], row["lr"], speed)
            if (index + 1) % save_every == 0 or index + 1 == total or asked():
                log.sync()
                save(job, state, {"step": index + 1, "tokens": tokens})
            if asked():
                break
    return state


def save(job: Job, state: State, reached: Json) -> None:
    """The state first, in one rename; the checkpoint for others to read is made from the same step after it."""
    folder.save_state(job.path / folder.STATE, state, reached)
    folder.save_checkpoint(job.path, job.config, state.params)


def summarise(job: Job, params: Tree) -> Json:
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


def how_to_resume(path: Path) -> str:
    return f"resume with: python -m train --run {shlex.quote(str(path))} --resume"


def draw(job: Job, rows: list[metrics.Row], final_loss: float | None) -> None:
    heldout = job.dataset.heldout
    loss_picture(
        job.path / folder.PICTURE,
        rows,
        bytes_per_token=heldout.bytes / job.heldout_targets,
        zlib_bits=8 * job.dataset.zlib_bytes / heldout.bytes,
        final_loss=final_loss,
    )


def tell_skipped(texts: corpus.Corpus) -> None:
    if texts.skipped:
        shown = ", ".join(texts.skipped[:5]) + (", ..." if len(texts.skipped) > 5 else "")
        print(f"skipped {len(texts.skipped)} files: {shown}")


def tell_job(job: Job, seconds: float) -> None:
    what = job.choices.data or "the Python standard library"
    sizes = job.dataset.train.bytes / 1e6, job.dataset.heldout.bytes / 1e6
    count = sum(leaf.numel() for leaf in tree.leaves(P.abstract(job.config)))
    print(f"text: {what}, {sizes[0]:.2f} MB to learn from and {sizes[1]:.2f} MB held out, ready in {seconds:.0f} s")
    print(
        f"model: {job.config.model_type} with {count / 1e6:.1f} million parameters; {job.choices.steps} steps of "
        f"{job.preset.batch_rows} rows of {job.rows['tokens'].shape[1]} tokens",
        flush=True,
    )


def tell(summary: Json, path: Path) -> None:
    print(
        f"held out: {summary['heldout_bits_per_byte']:.3f} bits per byte over {summary['heldout_bytes']:,} bytes "
        f"(zlib -9, all of them as one stream: {summary['zlib_bits_per_byte']:.3f})"
    )
    print(f"a sample:\n{summary['sample']}\n")
    print(f"curves: {path / folder.PICTURE}\ncheckpoint: {path}")
