"""Flags, saved steps and the loop of runs in one process: what the commands `flow` and `documents` share.

A batch is a function of (seed, step), so a run that was stopped and resumed ends with the same weights, bit for bit.
"""

import argparse
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fnmodels
from fnmodels.errors import UserError
from fnmodels.files import check_folder, open_append
from params.checkpoint.manifest import digest
from train import checkpoint
from train.batch import Batch
from train.command_line import Parser
from train.job.metrics_log import exit_code, json_line, read_rows, truncate_after, warn_at_resume
from train.job.run_folder import METRICS
from train.job.setting_types import POSITIVE, integer
from train.optim.adamw import adamw
from train.optim.base import Optimizer
from train.optim.schedules import warmup_stable_decay
from train.state import State

_WARMUP = 20  # steps at most
_FREE = ("run", "resume", "data", "init", "save_every")  # flags without effect on results, or known by their bytes
_READ = (".safetensors", ".json", ".txt", ".model")  # files of --init that may be read: weights, configs, tokenizers
# {flag: (its default, the least value, help)}
_WHOLE: dict[str, tuple[int, int, str]] = {
    "steps": (1000, 1, "optimizer steps of the run, over all resumes"),
    "batch": (16, 1, "examples per step"),
    "seed": (0, 0, "seed of all that is drawn: new weights, the order of the data, noise"),
    "save_every": (200, 1, "steps between saved steps; the last one is always saved"),
}


def new_parser(prog: str, description: str, *, data: str, init: str, learning_rate: float) -> Parser:
    """A parser with the shared flags. data, init: the help of these flags."""
    flags = Parser(prog=prog, description=description)
    flags.add_argument("--run", type=Path, required=True, metavar="DIR", help="the folder of the run")
    flags.add_argument("--data", type=Path, required=True, metavar="FILE", help=data)
    flags.add_argument("--init", type=Path, metavar="FOLDER", help=init)
    flags.add_argument("--resume", action="store_true", help="continue the run with the flags it began with")
    for name, (default, low, text) in _WHOLE.items():
        number(flags, name, integer(low), default, text)
    number(flags, "learning_rate", POSITIVE, learning_rate, "peak learning rate of AdamW")
    number(flags, "clip", POSITIVE, 1.0, "maximal global gradient norm")
    return flags


def number(flags: Parser, name: str, kind: Any, default: Any, text: str, *, shown: Any = None) -> None:
    """Adds the flag of a number. kind: of `setting_types`. shown: the default in the help, where it is another."""
    flag = f"--{name.replace('_', '-')}"
    flags.add_argument(
        flag,
        type=kind.parse,
        default=default,
        metavar=kind.metavar,
        help=f"{text} (default {default if shown is None else shown})",
    )


def identity_of(arguments: argparse.Namespace, files: Sequence[Path] = ()) -> dict[str, Any]:
    """Everything that results depend on: the flags, and the bytes of the data and of the initial model's folder.

    files: what the data name, such as pictures.
    """
    own = {name: value for name, value in vars(arguments).items() if name not in _FREE}
    init = [] if arguments.init is None else [path for path in arguments.init.rglob("*") if path.suffix in _READ]
    return own | {"data": _fingerprint([arguments.data, *files]), "init": _fingerprint(init)}


def _fingerprint(paths: Sequence[Path]) -> str:
    """A hash of the names and bytes of files, and of those in folders."""
    files = {path for given in paths for path in ([given] if given.is_file() else given.rglob("*")) if path.is_file()}
    known = sorted((path.name, digest(path)) for path in files)
    return hashlib.blake2b(json.dumps(known).encode(), digest_size=16).hexdigest()


def saved_step(arguments: argparse.Namespace, identity: Mapping[str, Any]) -> checkpoint.Checkpoint | None:
    """The saved step to continue from; None: the run is new, in a folder that is empty. UserError where it is not."""
    run = arguments.run
    if not arguments.resume:
        run.mkdir(parents=True, exist_ok=True)
        if any(run.iterdir()):
            raise UserError(f"--run {run}: the folder is not empty; --resume continues the run in it")
        return None
    check_folder(run / "steps")
    saved = checkpoint.latest(run / "steps")
    if saved is None:
        raise UserError(f"--run {run}: there is no saved step to resume from")
    if differ := [name for name, value in identity.items() if saved.progress.get(name) != value]:
        flag = differ[0].replace("_", "-")
        raise UserError(f"--{flag} is not that with which the run in {run} began, and its results depend on it")
    return saved


def optimizer_of(arguments: argparse.Namespace, config: Any, spec: Any = None) -> Optimizer:
    """AdamW with a short warmup, and a decay over the second half of the run. spec: None is that of the config."""
    total, warmup = arguments.steps, min(_WARMUP, arguments.steps // 10)
    return adamw(
        lambda step: arguments.learning_rate * warmup_stable_decay(step, total=total, warmup=warmup, decay_ratio=0.5),
        spec=fnmodels.family_of(config).spec(config) if spec is None else spec,
    )


def generator_of(seed: int, step: int) -> torch.Generator:
    """The generator of a step's random draws."""
    key = hashlib.blake2b(repr((seed, step)).encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(key, "little"))


def run_steps(
    arguments: argparse.Namespace,
    step: Callable[[State, Batch], tuple[State, dict[str, Tensor]]],
    state: State,
    batch: Callable[[int], Batch],
    identity: dict[str, Any],
) -> State:
    """The state after all steps, which are saved and logged. batch: of a step's number, from 0.

    One line says that a resumed run has diverged. UserError where rows of metrics.jsonl are missing; a file that was
    moved away begins anew.
    """
    log = arguments.run / METRICS
    begin = int(state.step)
    warn_at_resume(truncate_after(log, begin))
    with open_append(log) as out:
        for index in range(begin, arguments.steps):
            state, measured = step(state, batch(index))
            row = {"step": index + 1} | {name: float(measured[name]) for name in ("loss", "grad_norm", "lr")}
            out.write(json_line(row))
            last = index + 1 == arguments.steps
            if last or (index + 1) % max(1, arguments.steps // 20) == 0:
                print(f"step {index + 1}: loss {row['loss']:.4f}", flush=True)
            if last or (index + 1) % arguments.save_every == 0:
                out.flush()
                checkpoint.save(arguments.run / "steps", index + 1, state, identity, keep=2)
    return state


def finished(run: Path) -> int:
    """The exit code of the run in this folder, all of whose steps are made; see `metrics_log.exit_code`."""
    return exit_code(read_rows(run / METRICS))
