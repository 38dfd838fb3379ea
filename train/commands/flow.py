"""python -m train.flow --run DIR --data FILE: trains a Flux by flow matching, on latents and texts that are tensors.

    DIR/transformer      the model, a folder as diffusers writes it
    DIR/metrics.jsonl    a line per step
    DIR/steps            saved steps, from which --resume continues to the same weights, bit for bit

Batches, noise and times are functions of (seed, step). One process, fp32; `train.flow_matching_loss` in a loop of one's
own runs over a mesh too.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fnmodels
import params as P
from fnmodels.errors import UserError
from fnmodels.tree import Tree
from params.checkpoint.manifest import digest
from train import checkpoint
from train.command_line import Parser, run_command
from train.data.latents import flow_batch, read_latents
from train.job.setting_types import NUMBER, POSITIVE, integer
from train.losses.flow_matching import flow_matching_loss, flow_noise
from train.optim.adamw import adamw
from train.optim.schedules import warmup_stable_decay
from train.state import State, init_state
from train.step import make_step

_SIZES = {"layers": 2, "single_layers": 2, "heads": 4, "head_dim": 32}  # of a new model
_WARMUP = 20  # steps at most


def parser() -> Parser:
    flags = Parser(prog="python -m train.flow", description="Train a Flux by flow matching on latents and texts.")
    flags.add_argument("--run", type=Path, required=True, metavar="DIR", help="the folder of the run")
    flags.add_argument("--data", type=Path, required=True, metavar="FILE", help="safetensors: latents, text, pooled")
    flags.add_argument("--init", type=Path, metavar="FOLDER", help="start from this transformer, a folder of diffusers")
    flags.add_argument("--resume", action="store_true", help="continue the run with the flags it began with")
    whole = {"steps": (1000, 1), "batch": (16, 1), "seed": (0, 0), "accumulate": (1, 1), "save_every": (200, 1)}
    for name, (default, low) in whole.items():
        _number(flags, name, integer(low), default)
    for name in _SIZES:
        _number(flags, name, integer(1), None)
    for name, rate in (("learning_rate", 1e-3), ("clip", 1.0), ("guidance", 1.0)):
        _number(flags, name, NUMBER if name == "guidance" else POSITIVE, rate)
    return flags


_HELP = {
    "steps": "optimizer steps of the run, over all resumes",
    "batch": "images per step",
    "seed": "seed of the weights, the order of the data, noise and times",
    "accumulate": "microbatches per step; less memory, the same step",
    "save_every": "steps between saved steps; the last one is always saved",
    "layers": "double layers of a new model",
    "single_layers": "single layers of a new model",
    "heads": "heads of a new model",
    "head_dim": "width of a head of a new model, a multiple of 32",
    "learning_rate": "peak learning rate of AdamW",
    "clip": "maximal global gradient norm",
    "guidance": "the guidance that a model with this input is given",
}


def _number(flags: Parser, name: str, kind: Any, default: Any) -> None:
    shown = default if default is not None else _SIZES[name]
    flag = f"--{name.replace('_', '-')}"
    flags.add_argument(
        flag, type=kind.parse, default=default, metavar=kind.metavar, help=f"{_HELP[name]} (default {shown})"
    )


def train(arguments: argparse.Namespace) -> int:
    if arguments.batch % arguments.accumulate:
        raise UserError(f"--batch {arguments.batch} does not divide into --accumulate {arguments.accumulate}")
    data = read_latents(arguments.data)
    identity = _identity(arguments)
    saved = _saved(arguments, identity)
    config, params = _model(arguments, data)
    rate = warmup_stable_decay
    total, warmup = arguments.steps, min(_WARMUP, arguments.steps // 10)
    optimizer = adamw(
        lambda step: arguments.learning_rate * rate(step, total=total, warmup=warmup, decay_ratio=0.5),
        spec=fnmodels.family_of(config).spec(config),
    )
    loss = functools.partial(flow_matching_loss, config=config)
    state = init_state(params, optimizer, copy=False)
    if saved is not None:
        state = checkpoint.load(saved, state)
    step = make_step(loss, optimizer, clip=arguments.clip, accumulate=arguments.accumulate)
    state = _steps(arguments, step, state, data, config, identity)
    P.save_pretrained(arguments.run / "transformer", config, state.params)
    print(f"model: {arguments.run / 'transformer'}")
    return 0


def _steps(
    arguments: argparse.Namespace,
    step: Any,
    state: State,
    data: dict[str, Tensor],
    config: Any,
    identity: dict[str, Any],
) -> State:
    log = arguments.run / "metrics.jsonl"
    begin = int(state.step)
    before = log.read_text().splitlines()[:begin] if begin else []
    log.write_text("".join(f"{line}\n" for line in before))
    with log.open("a") as out:
        for number in range(begin, arguments.steps):
            state, metrics = step(state, _batch(arguments, data, config, number))
            row = {"step": number + 1} | {name: float(metrics[name]) for name in ("loss", "grad_norm", "lr")}
            out.write(json.dumps(row) + "\n")
            last = number + 1 == arguments.steps
            if last or (number + 1) % max(1, arguments.steps // 20) == 0:
                print(f"step {number + 1}: loss {row['loss']:.4f}", flush=True)
            if last or (number + 1) % arguments.save_every == 0:
                out.flush()
                checkpoint.save(arguments.run / "steps", number + 1, state, identity, keep=2)
    return state


def _batch(arguments: argparse.Namespace, data: dict[str, Tensor], config: Any, number: int) -> dict[str, Tensor]:
    key = hashlib.blake2b(repr((arguments.seed, number)).encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
    batch = flow_noise(flow_batch(data, arguments.seed, number, arguments.batch), generator)
    guidance = {"guidance": torch.full_like(batch["time"], arguments.guidance)} if config.guidance_embeds else {}
    return batch | guidance


def _identity(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the results of a run depend on: the flags and the bytes of the data and of the initial weights."""
    files = [] if arguments.init is None else sorted(arguments.init.glob("*.safetensors"))
    own = {name: value for name, value in vars(arguments).items() if name not in _FREE}
    return own | {"data": digest(arguments.data), "init": [digest(path) for path in files]}


_FREE = ("run", "resume", "data", "init", "save_every")


def _saved(arguments: argparse.Namespace, identity: dict[str, Any]) -> checkpoint.Checkpoint | None:
    """The saved step to continue from; None: the run is new, in a folder that is empty. UserError where it is not."""
    run = arguments.run
    if not arguments.resume:
        run.mkdir(parents=True, exist_ok=True)
        if any(run.iterdir()):
            raise UserError(f"--run {run}: the folder is not empty; --resume continues the run in it")
        return None
    saved = checkpoint.latest(run / "steps")
    if saved is None:
        raise UserError(f"--run {run}: there is no saved step to resume from")
    if differ := [name for name, value in identity.items() if saved.progress.get(name) != value]:
        flag = differ[0].replace("_", "-")
        raise UserError(f"--{flag} is not that with which the run in {run} began, and its results depend on it")
    return saved


def _model(arguments: argparse.Namespace, data: dict[str, Tensor]) -> tuple[Any, Tree]:
    """(config, params) in fp32, of --init or new, for the sizes of the data."""
    sizes = {"in_channels": 4 * data["latents"].shape[1], "joint_attention_dim": data["text"].shape[-1]}
    sizes |= {"pooled_projection_dim": data["pooled"].shape[-1]}
    given = [name for name in _SIZES if getattr(arguments, name) is not None]
    if arguments.init is None:
        return _new_model(arguments, sizes)
    if given:
        raise UserError(f"--{given[0].replace('_', '-')} is of a new model; that of --init has its own sizes")
    config, params = P.load_pretrained(arguments.init, dtype=torch.float32, copy=True)
    known = {field.name for field in dataclasses.fields(config)}
    for name, size in sizes.items():
        if name not in known or getattr(config, name) != size:
            found = getattr(config, name, "no such size")
            raise UserError(f"--init {arguments.init}: its {name} is {found}, and {arguments.data} is for {size}")
    return config, params


def _new_model(arguments: argparse.Namespace, sizes: dict[str, int]) -> tuple[Any, Tree]:
    layers, singles, heads, width = (getattr(arguments, name) or default for name, default in _SIZES.items())
    if width % 32:
        raise UserError(f"--head-dim {width} is not a multiple of 32, which the three axes of positions divide")
    values = {"num_layers": layers, "num_single_layers": singles, "num_attention_heads": heads}
    values |= {"_class_name": "FluxTransformer2DModel", "attention_head_dim": width}
    values |= {"axes_dims_rope": [width // 8, 7 * width // 16, 7 * width // 16]}
    config = fnmodels.family_for("FluxTransformer2DModel").Config.from_hf(values | sizes)
    return config, P.init(config, arguments.seed, dtype=torch.float32)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command("python -m train.flow", parser, train, argv, needs=())
