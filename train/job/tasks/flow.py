"""Flow matching of images, the task of `fnmodels-flow`: a Flux on latents and texts that are tensors, or on pictures.

Batches, noise and times are functions of (seed, step).
"""

import dataclasses
import functools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fnmodels
import params as P
from fnmodels.errors import UserError
from fnmodels.files import check_folder, write_text
from fnmodels.tree import Tree
from train.batch import Entries
from train.command_line import check_installed, terminal_text
from train.data.latents import flow_batch, read_latents, rows_of_images
from train.data.pictures import class_texts, classes_of, picture_latents, write_grid
from train.job import report
from train.job.blueprint import Blueprint
from train.job.heldout import SumOf
from train.job.mesh_flags import MeshSetup, check_shards
from train.job.metrics_log import Row
from train.job.model_card import name_of
from train.job.task import Card, Json, Weights
from train.losses.flow_matching import flow_matching_loss, flow_noise

from . import examples as common
from .examples import is_complete as is_complete
from .examples import report_result as report_result
from .settings import FlowSettings

DATA = "images"
_PICTURES = {"side": 32, "patch": 2, "samples": 4}  # {setting of a folder of pictures: its default}
_SAMPLER_STEPS = 28
Images = dict[str, Tensor]  # as `train.data.latents` describes them


@dataclass(frozen=True)
class FlowTask:
    """A run of this task that is ready to train, see `Task`. classes: the names of those of a folder of pictures."""

    path: Path
    settings: FlowSettings
    identity: Json
    blueprint: Blueprint
    images: Images
    heldout: Images | None
    classes: list[str]
    sample_every: None = None
    mfu_per_rate: None = None

    @property
    def model_path(self) -> Path:
        return self.path / "transformer"

    def batch(self, step: int) -> Entries:
        return self._noised(flow_batch(self.images, self.settings.seed, step, self.settings.batch), step)

    def _noised(self, batch: dict[str, Tensor], step: int) -> Entries:
        noised = flow_noise(batch, common.generator_of(self.settings.seed, step))
        if self.blueprint.config.guidance_embeds:
            noised["guidance"] = torch.full_like(noised["time"], self.settings.guidance)
        return noised

    def data_position(self, steps: int) -> None:
        return None

    def row(self, steps: int, tokens: int, measured: Mapping[str, Any]) -> Row:
        return common.columns(self.settings, len(self.images["latents"]), steps, measured)

    def evaluated(self, loss: SumOf, *, full: bool) -> Row:
        images = self.heldout
        if images is None:
            return {}
        parts = common.chunks(len(images["latents"]), self.settings.batch)
        batches = (
            self._noised(rows_of_images(images, torch.tensor(part)), ~number) for number, part in enumerate(parts)
        )
        return common.evaluated(loss, batches)

    def sample(self, weights: Weights) -> str:
        raise NotImplementedError("A model of images says nothing.")

    def write(self, folder: Path, params: Tree) -> None:
        P.save_pretrained(folder, self.blueprint.config, params)

    def finish(self, evaluation: Row, weights: Weights) -> Json:
        if self.classes:
            write_text(self.path / "classes.json", json.dumps(self.classes) + "\n")
            write_grid(self.path / "samples.png", self._drawn(weights()))
            names = terminal_text(", ".join(self.classes))
            print(f"samples: {self.path / 'samples.png'}, a row of each class: {names}")
        return common.summary_of(self.settings, evaluation, self.model_path)

    def _drawn(self, params: Tree) -> list[list[Tensor]]:
        """Pictures [3, side, side] of each class, drawn from noise that is a function of the seed."""
        settings, config, classes = self.settings, self.blueprint.config, len(self.classes)
        _, patch, count = _picture_sizes(settings)
        numbers = torch.arange(classes).repeat_interleave(count)
        texts, shape = class_texts(numbers, classes), self.images["latents"].shape[1:]
        generator = common.generator_of(settings.seed, settings.steps)
        noise = torch.randn(len(numbers), *shape, generator=generator)
        tokens, positions, segment_ids = fnmodels.diffusion.latent_rows(list(noise))
        conditions = {"time": torch.ones(len(numbers), 1), "pooled": texts["pooled"][:, None]}
        if config.guidance_embeds:
            conditions["guidance"] = torch.full_like(conditions["time"], settings.guidance)
        prepared = fnmodels.diffusion.prepare_denoising(config, tokens, texts["text"], conditions, positions=positions)
        with torch.no_grad():
            latents = fnmodels.diffusion.denoise(
                params, *prepared, config=config, times=fnmodels.diffusion.flow_times(_SAMPLER_STEPS)
            )
        each = fnmodels.diffusion.unpacked_latents(latents, positions, segment_ids)
        pictures = [F.pixel_shuffle(picture, patch // 2) for picture in each]
        return [pictures[start : start + count] for start in range(0, len(pictures), count)]

    def report(self, seconds: float) -> None:
        settings = self.settings
        report.data(f"data: {settings.data}, {len(self.images['latents']):,} images", seconds)
        report.model(self.blueprint, f"{settings.steps} steps of {settings.batch} images")

    def draw(self, rows: list[Row], costs: list[Row], summary: Json | None) -> None:
        common.draw(self.path, rows, costs)

    def card(self, step: int, summary: Json | None) -> Card:
        what = f"{self.settings.batch} of {len(self.images['latents']):,} images in {name_of(str(self.settings.data))}"
        front = {"pipeline_tag": "text-to-image", "library_name": "diffusers"}
        usage = 'config, params = P.load_pretrained("path/to/this/folder/transformer")'
        return Card("fnmodels-flow", "of images", what, common.results(summary), front, usage)


def check_settings(settings: FlowSettings) -> None:
    """UserError where files are missing or settings contradict each other."""
    common.check_files(settings)
    if settings.head_dim % 32:
        raise UserError(
            f"--head-dim {settings.head_dim} is not a multiple of 32, which the three axes of positions divide"
        )


def preflight(settings: FlowSettings, mesh_setup: MeshSetup | None, chosen: Collection[str]) -> None:
    """UserError where settings of pictures are given for a file of latents."""
    if not Path(str(settings.data)).is_dir():
        for name in _PICTURES:
            if getattr(settings, name) is not None:
                raise UserError(f"--{name} is of a folder of pictures, and --data {settings.data} is a file")


def prepare(path: Path, settings: FlowSettings, recorded: Json | None, mesh_setup: MeshSetup) -> FlowTask:
    """Images and model. UserError for data or a model that cannot be trained so, or that differ from `recorded`."""
    images, classes = _read(settings, Path(str(settings.data)))
    heldout, others = (None, classes) if settings.heldout is None else _read(settings, Path(settings.heldout))
    if others != classes:
        raise UserError(f"--heldout {settings.heldout} has the classes {others}, and --data has {classes}")
    config = _config(settings, images)
    spec, loss = fnmodels.family_of(config).spec(config), functools.partial(flow_matching_loss, config=config)
    check_shards(mesh_setup, settings, config, spec, spec)
    identity = common.begin(path, settings, recorded)
    check_folder(path / "transformer")
    initial = functools.partial(_initial, config, settings)
    return FlowTask(path, settings, identity, Blueprint(config, spec, loss, loss, initial), images, heldout, classes)


def _read(settings: FlowSettings, data: Path) -> tuple[Images, list[str]]:
    """(the images, the names of the classes of a folder of pictures)."""
    if not data.is_dir():
        return read_latents(data), []
    check_installed(("PIL",))
    classes, (side, patch, _) = classes_of(data), _picture_sizes(settings)
    return picture_latents(classes, side, patch), list(classes)


def _picture_sizes(settings: FlowSettings) -> list[int]:
    """The side, the patch, and how many samples."""
    return [getattr(settings, name) or default for name, default in _PICTURES.items()]


def _config(settings: FlowSettings, images: Images) -> Any:
    """The config of --init or of a new model, for the sizes of the images."""
    sizes = {"in_channels": 4 * images["latents"].shape[1], "joint_attention_dim": images["text"].shape[-1]}
    sizes |= {"pooled_projection_dim": images["pooled"].shape[-1]}
    if settings.init is None:
        if settings.ignore_fields:
            raise UserError("--ignore-fields is for the model that --init names")
        return _new_config(settings, sizes)
    config: Any = P.load_config(settings.init, ignore_fields=settings.ignore_fields or ())
    known = {field.name for field in dataclasses.fields(config)}
    for name, size in sizes.items():
        if name not in known or getattr(config, name) != size:
            has = getattr(config, name, "no such size")
            raise UserError(f"--init {settings.init}: its {name} is {has}, and {settings.data} is for {size}")
    return config


def _new_config(settings: FlowSettings, sizes: dict[str, int]) -> Any:
    width = settings.head_dim
    values = {"num_layers": settings.layers, "num_single_layers": settings.single_layers}
    values |= {"num_attention_heads": settings.heads, "attention_head_dim": width}
    axes: Any = {
        "_class_name": "FluxTransformer2DModel",
        "axes_dims_rope": [width // 8, 7 * width // 16, 7 * width // 16],
    }
    return fnmodels.family_for("FluxTransformer2DModel").Config.from_hf(values | axes | sizes)


def _initial(config: Any, settings: FlowSettings, plan: Tree | None) -> Tree:
    if settings.init is None:
        return P.init(config, settings.seed, dtype=torch.float32, plan=plan)
    options: Any = {"plan": plan, "ignore_fields": settings.ignore_fields or ()}
    return P.load_pretrained(settings.init, dtype=torch.float32, copy=True, **options)[1]
