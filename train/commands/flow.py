"""python -m train.flow --run DIR --data FILE: trains a Flux by flow matching, on latents and texts that are tensors.

With --data FOLDER on pictures, in a folder for each class: pixels are the latents, and a class is the text.

    DIR/transformer      the model, a folder as diffusers writes it
    DIR/samples.png      of pictures: a row of drawn ones for each class, whose names are in DIR/classes.json
    DIR/metrics.jsonl    a line per step
    DIR/steps            saved steps, from which --resume continues to the same weights, bit for bit

Batches, noise and times are functions of (seed, step). One process, fp32; `train.flow_matching_loss` in a loop of one's
own runs over a mesh too.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fnmodels
import params as P
from fnmodels.errors import UserError
from fnmodels.files import check_folder, write_text
from fnmodels.tree import Tree
from train import checkpoint
from train.command_line import Parser, check_installed, program_name, run_command, terminal_text
from train.data.latents import flow_batch, read_latents
from train.data.pictures import class_texts, classes_of, picture_latents, write_grid
from train.job.cpu_memory import bound_product_caches, keep_freed_memory
from train.job.setting_types import NUMBER, integer
from train.losses.flow_matching import flow_matching_loss, flow_noise
from train.state import init_state
from train.step import make_step

from . import plain_run

# {size of a new model: (its default, help)}
_SIZES = {
    "layers": (2, "double layers of a new model"),
    "single_layers": (2, "single layers of a new model"),
    "heads": (4, "heads of a new model"),
    "head_dim": (32, "width of a head of a new model, a multiple of 32"),
}


_PICTURES = {
    "side": (32, "pixels of a side, to which they are resized and cropped"),
    "patch": (2, "pixels of a side of a token, an even number"),
    "samples": (4, "drawn pictures of each class"),
}
_SAMPLER_STEPS = 28


def _name() -> str:
    return program_name("fnmodels-flow", "train.flow")


def parser() -> Parser:
    flags = plain_run.new_parser(
        _name(),
        "Train a Flux by flow matching on latents and texts.",
        data="safetensors: latents, text, pooled; or a folder of pictures in a folder for each class",
        init="start from this transformer, a folder of diffusers",
        learning_rate=1e-3,
    )
    for name, (default, text) in _SIZES.items():
        plain_run.number(flags, name, integer(1), None, text, shown=default)
    for name, (default, text) in _PICTURES.items():
        plain_run.number(flags, name, integer(1), None, f"of a folder of pictures: {text}", shown=default)
    plain_run.number(flags, "accumulate", integer(1), 1, "microbatches per step; less memory, the same step")
    plain_run.number(flags, "guidance", NUMBER, 1.0, "the guidance that a model with this input is given")
    return flags


def train(arguments: argparse.Namespace) -> int:
    if arguments.batch % arguments.accumulate:
        raise UserError(f"--batch {arguments.batch} does not divide into --accumulate {arguments.accumulate}")
    data, classes = _data(arguments)
    identity = plain_run.identity_of(arguments)
    saved = plain_run.saved_step(arguments, identity)
    config, params = _model(arguments, data)
    optimizer = plain_run.optimizer_of(arguments, config)
    state = init_state(params, optimizer, copy=False)
    if saved is not None:
        state = checkpoint.load(saved, state)
    loss = functools.partial(flow_matching_loss, config=config)
    step = make_step(loss, optimizer, clip=arguments.clip, accumulate=arguments.accumulate)
    batch = functools.partial(_batch, arguments, data, config)
    state = plain_run.run_steps(arguments, step, state, batch, identity)
    check_folder(arguments.run / "transformer")
    P.save_pretrained(arguments.run / "transformer", config, state.params)
    print(f"model: {arguments.run / 'transformer'}")
    if classes:
        write_text(arguments.run / "classes.json", json.dumps(classes) + "\n")
        write_grid(arguments.run / "samples.png", _samples(arguments, config, state.params, data, len(classes)))
        print(f"samples: {arguments.run / 'samples.png'}, a row of each class: {terminal_text(', '.join(classes))}")
    return plain_run.finished(arguments.run)


def _data(arguments: argparse.Namespace) -> tuple[dict[str, Tensor], list[str]]:
    """(the data of `train.data.latents`, the names of the classes of a folder of pictures)."""
    if not arguments.data.is_dir():
        if given := [name for name in _PICTURES if getattr(arguments, name) is not None]:
            raise UserError(f"--{given[0]} is of a folder of pictures, and --data {arguments.data} is a file")
        return read_latents(arguments.data), []
    check_installed(("PIL",))
    classes, (side, patch, _) = classes_of(arguments.data), _picture_sizes(arguments)
    return picture_latents(classes, side, patch), list(classes)


def _picture_sizes(arguments: argparse.Namespace) -> list[int]:
    """The side, the patch, and how many samples."""
    return [getattr(arguments, name) or default for name, (default, _) in _PICTURES.items()]


def _samples(
    arguments: argparse.Namespace, config: Any, params: Tree, data: dict[str, Tensor], classes: int
) -> list[list[Tensor]]:
    """Pictures [3, side, side] of each class, drawn from noise that is a function of the seed."""
    _, patch, count = _picture_sizes(arguments)
    numbers = torch.arange(classes).repeat_interleave(count)
    texts, shape = class_texts(numbers, classes), data["latents"].shape[1:]
    noise = torch.randn(len(numbers), *shape, generator=plain_run.generator_of(arguments.seed, arguments.steps))
    tokens, positions, segment_ids = fnmodels.latent_rows(list(noise))
    conditions = {"time": torch.ones(len(numbers), 1), "pooled": texts["pooled"][:, None]}
    if config.guidance_embeds:
        conditions["guidance"] = torch.full_like(conditions["time"], arguments.guidance)
    prepared = fnmodels.prepare_denoising(config, tokens, texts["text"], conditions, positions=positions)
    with torch.no_grad():
        drawn = fnmodels.denoise(params, *prepared, config=config, times=fnmodels.flow_times(_SAMPLER_STEPS))
    found = [F.pixel_shuffle(one, patch // 2) for one in fnmodels.unpacked_latents(drawn, positions, segment_ids)]
    return [found[start : start + count] for start in range(0, len(found), count)]


def _batch(arguments: argparse.Namespace, data: dict[str, Tensor], config: Any, number: int) -> dict[str, Tensor]:
    generator = plain_run.generator_of(arguments.seed, number)
    batch = flow_noise(flow_batch(data, arguments.seed, number, arguments.batch), generator)
    guidance = {"guidance": torch.full_like(batch["time"], arguments.guidance)} if config.guidance_embeds else {}
    return batch | guidance


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
    layers, singles, heads, width = (getattr(arguments, name) or default for name, (default, _) in _SIZES.items())
    if width % 32:
        raise UserError(f"--head-dim {width} is not a multiple of 32, which the three axes of positions divide")
    values = {"num_layers": layers, "num_single_layers": singles, "num_attention_heads": heads}
    values |= {"_class_name": "FluxTransformer2DModel", "attention_head_dim": width}
    values |= {"axes_dims_rope": [width // 8, 7 * width // 16, 7 * width // 16]}
    config = fnmodels.family_for("FluxTransformer2DModel").Config.from_hf(values | sizes)
    return config, P.init(config, arguments.seed, dtype=torch.float32)


def main(argv: Sequence[str] | None = None) -> int:
    bound_product_caches()
    keep_freed_memory()
    return run_command(_name(), parser, train, argv, needs=())
