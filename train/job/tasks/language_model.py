"""Next-token prediction on text, the task of `python -m train`: text, tokenizer, model, losses and evaluation.

The identity of a run, which resuming must find unchanged, is written to run.json for readers, and into each saved step,
where a checksum protects it.
"""

import functools
import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from fnmodels.errors import UserError
from fnmodels.files import copy_file, write_text
from fnmodels.inputs.noise import noise_keys
from fnmodels.models.common.config_json import strict_json
from fnmodels.models.common.family import DecoderConfig
from fnmodels.tree import Tree
from params.checkpoint.save import config_text
from params.io.files import plain_file
from train.batch import Entries
from train.checkpoint import saved_steps as checkpoint
from train.data import tokenized
from train.data.chat import Template, render_prompt
from train.data.stream.sources import StreamedSources
from train.data.tokenizer import tokenizer_config
from train.eval import pretrained
from train.generation.text import complete
from train.job import heldout, report, run_folder
from train.job.blueprint import Blueprint
from train.job.flops import flops_per_token
from train.job.heldout import SumOf
from train.job.mesh_flags import MeshSetup
from train.job.metrics_log import Row, six_digits, step_metrics
from train.job.model_card import name_of
from train.job.pictures import RunRows
from train.job.settings import Settings, fixed_settings, flag, imports, to_toml
from train.job.task import Card, Json, Weights
from train.loss import LossFn
from train.losses.next_token import next_token_loss
from train.run_options import Balance

from . import initial_model, text_data
from .initial_model import InitialModel
from .language_model_checks import check_agreement, check_model_fits, check_model_settings, is_routed
from .new_model import new_config
from .text_data import TextData

DATA = "text"
PROMPT_TOKENS, PROMPT_LETTERS = 8, 48  # at most, of the beginning of a document that samples continue


@dataclass(frozen=True)
class LanguageModel:
    """A run of this task that is ready to train, see `Task`."""

    path: Path
    identity: Json
    settings: Settings
    model: InitialModel
    template: Template | None
    text: TextData
    row_length: int
    blueprint: Blueprint
    flops_per_token: float

    @property
    def model_path(self) -> Path:
        return self.path

    @property
    def mfu_per_rate(self) -> float | None:
        peak = self.settings.peak_flops
        return None if peak is None else self.flops_per_token / peak

    @property
    def sample_every(self) -> int | None:
        return self.settings.sample_every

    @property
    def heldout_targets(self) -> int:
        return int((self.text.heldout["labels"] >= 0).sum())

    def data_position(self, steps: int) -> Any:
        return self.text.position(steps)

    def batch(self, step: int) -> Entries:
        settings, batch = self.settings, self.text.batch(step)
        if settings.dropout == "off":
            return batch
        rng = noise_keys((settings.seed << 32) + step, batch["positions"], batch["segment_ids"])
        return {**batch, "rng": rng}

    def row(self, steps: int, tokens: int, measured: Mapping[str, Any]) -> Row:
        epochs = {str(number): six_digits(times) for number, times in enumerate(self.text.epochs(steps).values())}
        bits_per_byte = self._train_bits_per_byte if is_cross_entropy(self.settings) else None
        return {"tokens": tokens, "epochs": epochs} | step_metrics(measured, bits_per_byte, moe_balance(self.settings))

    def _train_bits_per_byte(self, loss: float) -> float:
        """Converts a train loss in nats, with the bytes per target averaged over all text, not the batch."""
        return heldout.bits_per_byte(loss, self.text.targets, self.text.target_bytes)

    def evaluated(self, loss: SumOf, *, full: bool) -> Row:
        rows = self.text.heldout
        sample = rows if full else heldout.evenly_spaced_rows(rows, self.settings.eval_rows)
        mean = heldout.mean_loss(loss, heldout.in_batches(sample))
        bits = heldout.bits_per_byte(mean, self.heldout_targets, self.text.heldout_bytes)
        return {"heldout_loss": mean, "heldout_bits_per_byte": bits}

    def sample(self, weights: Weights) -> str:
        """The prompt with a sampled continuation; the random draws are the same each time."""
        model, tokens = self.model, self.settings.sample_tokens
        return complete(weights(), model.config, model.tokenizer, self.prompt, model.end_ids, tokens=tokens)

    @property
    def prompt(self) -> str:
        """--prompt, or else how the first document begins: the first words of a text, the first turns of a chat."""
        if self.settings.prompt is not None:
            return self.settings.prompt
        if self.settings.data is None:
            return "def "  # the default text is Python
        first = self.text.first
        if first is None:  # token ids alone
            return str(self.model.tokenizer.decode(self.text.heldout["tokens"][0, :PROMPT_TOKENS].tolist()))
        if first.messages is not None and self.template is not None:
            turns = list(takewhile(lambda message: message.get("role") != "assistant", first.messages))
            return render_prompt(self.template, turns, tools=list(first.tools) or None)
        words = re.match(r"\s*(\S+\s+){0,3}\S+", first.text)
        return (words[0] if words else first.text)[:PROMPT_LETTERS]

    def write(self, folder: Path, params: Tree) -> None:
        initial_model.write_checkpoint(folder, self.model.config, params, self.settings.init)
        if folder != self.path:  # which has these files from its beginning
            copy_file(plain_file(self.path, "tokenizer.json"), folder / "tokenizer.json")
            pretrained.copy_companions(self.path, folder)

    def finish(self, evaluation: Row, weights: Weights) -> Json:
        size = self.text.heldout_bytes
        return {
            "steps": self.settings.steps,
            "ema": self.settings.ema,
            "heldout_loss": evaluation["heldout_loss"],
            "heldout_bytes": size,
            "heldout_bits_per_byte": evaluation["heldout_bits_per_byte"],
            "zlib_bits_per_byte": 8 * self.text.zlib_bytes / size,
            "sample": self.sample(weights),
        }

    def report(self, seconds: float) -> None:
        what = self.settings.data or "the Python standard library"
        held = self.text.heldout_bytes / 1e6
        report.data(f"text: {what}, {self.text.size} and {held:.2f} MB held out", seconds)
        for part in self.model.dropped:
            print(f"left out: {part}, a part of the checkpoint that next-token prediction does not use")
        report.model(
            self.blueprint,
            f"{self.settings.steps} steps of {self.settings.batch_rows} rows of {self.row_length} tokens, "
            f"{self.text.fill:.1%} of them text",
        )
        report.mfu(self.settings.peak_flops, self.flops_per_token)

    def draw(self, rows: list[Row], costs: list[Row], summary: Json | None) -> None:
        text, settings = self.text, self.settings
        report.draw_run(
            self.path / run_folder.PICTURE,
            RunRows(rows, costs),
            bytes_per_token=text.heldout_bytes / self.heldout_targets,
            zlib_bits=8 * text.zlib_bytes / text.heldout_bytes,
            final_loss=None if summary is None else summary["heldout_loss"],
            train="train" if is_cross_entropy(settings) else "train (smoothed, or with z-loss)",
            heldout="held out" if settings.ema is None else "held out, average of the weights",
        )

    def card(self, step: int, summary: Json | None) -> Card:
        settings, data = self.settings, self.settings.data or "the Python standard library"
        names = [name_of(name) for name in data.split(",")]
        held = self.text.heldout_bytes / 1e6
        front: Json = {"pipeline_tag": "text-generation", "library_name": "transformers"}
        results = {}
        if summary is not None:
            value = summary["heldout_bits_per_byte"]
            metric = {"type": "bits_per_byte", "value": value, "name": "held-out bits per byte"}
            task, dataset = {"type": "text-generation"}, {"type": "text", "name": ", ".join(names)}
            found = [{"task": task, "dataset": dataset, "metrics": [metric]}]
            front["model-index"] = [{"name": name_of(str(self.path.resolve())), "results": found}]
            results = {
                "held-out loss, nats per token": f"{summary['heldout_loss']:.4f}",
                "held-out bits per byte": f"{value:.4f}",
                "the same text by zlib -9, bits per byte": f"{summary['zlib_bits_per_byte']:.4f}",
            }
        return Card(
            "fnmodels-train",
            "language model",
            f"{settings.batch_rows} rows of {self.row_length} tokens, {self.text.fill:.1%} of them text, on "
            f"{', '.join(names)}\n({self.text.size} and {held:.2f} MB held out)",
            results,
            front,
            "# transformers' AutoModelForCausalLM reads this folder too\n"
            'config, params = P.load_pretrained("path/to/this/folder")',
        )


def check_settings(settings: Settings) -> None:
    """UserError where settings of adapters contradict others."""
    terms = ("label_smoothing", "z_loss", "balance_loss", "router_z_loss")
    if settings.loss is not None and (used := [name for name in terms if getattr(settings, name)]):
        raise UserError(f"{flag(used[0])} is a term of the cross entropy, which --loss {settings.loss} replaces")
    if settings.family is not None and settings.preset is not None:
        raise UserError(
            f"--preset {settings.preset} is a size of a published model, and --family has its own: use --set"
        )
    if settings.ignore_fields and settings.init is None:
        raise UserError(f"--ignore-fields {','.join(settings.ignore_fields)} is for the checkpoint that --init names")
    if settings.lora is not None and settings.init is None:
        raise UserError(f"--lora {settings.lora}: adapters need the weights of a checkpoint: name one with --init")
    if settings.lora is not None and settings.optimizer == "muon":
        raise UserError("--optimizer muon is for full matrices: adapters (--lora) need another, such as adamw")


def preflight(settings: Settings, mesh_setup: MeshSetup | None, chosen: Collection[str]) -> None:
    """UserError or CheckpointError for settings that cannot work. Later checks, which need the text, may still fail."""
    text_data.check_settings(settings)
    if mesh_setup is None:
        return
    if settings.init is None:
        config = provisional_config(settings, mesh_setup)
    else:
        config = initial_model.config_of_checkpoint(Path(settings.init), settings)
    positions = config.max_position_embeddings
    if "row_length" in chosen and settings.row_length > positions:  # the default is at most as many
        model = f"--init {settings.init}" if settings.init else f"--preset {settings.preset}"
        raise UserError(f"--row-length {settings.row_length}: {model} has {positions} positions: give no more")
    check_model_settings(config, initial_model.run_spec(config, settings), settings)
    check_model_fits(mesh_setup, settings, config)


def provisional_config(settings: Settings, mesh_setup: MeshSetup) -> DecoderConfig:
    """The new model's config with a placeholder vocabulary, divisible by the mesh: its size depends on the text."""
    hidden_size, heads = settings.hidden_size, settings.num_attention_heads
    if settings.preset is None and settings.set is None and hidden_size % heads:
        raise UserError(f"--hidden-size {hidden_size} is not a multiple of --num-attention-heads {heads}")
    return new_config(settings, mesh_setup.mesh.world * 64, {})


def prepare(path: Path, settings: Settings, recorded: Json | None, mesh_setup: MeshSetup) -> LanguageModel:
    """Text, tokenizer and model, new or of --init, or on resume (`recorded`) of the run folder.

    Over a mesh the parameters have no values: each of the processes makes its shard. UserError for settings or text
    that cannot be trained on, that differ from the recorded run, or for a model that the mesh cannot shard.
    """
    several, texts = mesh_setup.mesh.world > 1, text_data.read_texts(path, settings)
    if recorded:
        model = initial_model.from_run(path, settings, on_meta=several)
    else:
        model = initial_model.for_new_run(settings, texts, on_meta=several)
    config, tokenizer = model.config, model.tokenizer
    check_model_fits(mesh_setup, settings, config)
    length = min(settings.row_length, config.max_position_embeddings)
    if settings.prompt is not None and not tokenizer.encode(settings.prompt).ids:
        raise UserError(f"--prompt {settings.prompt!r}: the tokenizer makes no token of it")
    end = model.end_ids[0] if model.end_ids else None
    template = None
    if isinstance(texts, StreamedSources):
        position = (recorded or {}).get("data_position")
        text = text_data.as_stream(path, texts, tokenizer, end, settings, length, position)
    else:
        template = tokenized.template_for(texts, model.source or path, (recorded or {}).get("day"))
        text = text_data.in_memory(texts, tokenizer, end, config.vocab_size, template, settings, length)
    identity = {
        "settings": fixed_settings(settings),
        "corpus": text.fingerprint,
        "tokenizer": hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
        "config": strict_json(config.to_hf()),
        "weights": model.weights,
    }
    if template and template.day:
        identity["day"] = template.day  # the chat template's date, which a resumed run must reuse
    if recorded:
        check_agreement(recorded, identity, path)
    if not recorded:
        init_run_folder(path, identity, model, length)
    write_text(path / run_folder.SETTINGS, to_toml(settings))
    report.skipped(path, text.skipped, text.duplicates)
    return LanguageModel(
        path=path,
        identity=identity,
        settings=settings,
        model=model,
        template=template,
        text=text,
        row_length=length,
        blueprint=blueprint(config, settings, None if several else model),
        flops_per_token=flops_per_token(config, model.spec, length),
    )


def blueprint(config: DecoderConfig, settings: Settings, model: InitialModel | None = None) -> Blueprint:
    """The blueprint of a run. model: of one process, which has the parameters; None: each process makes its own."""
    loss, train_loss = losses(config, settings)
    return Blueprint(
        config,
        initial_model.run_spec(config, settings) if model is None else model.spec,
        loss,
        train_loss,
        functools.partial(initial_model.initial, config, settings) if model is None else lambda _: model.params,
        settings.balance_rate,
        adapters=settings.lora is not None,
    )


def losses(config: DecoderConfig, settings: Settings) -> tuple[LossFn, LossFn]:
    """(held-out loss, training loss with the terms that only it has), with aux (expert counts) for MoE models."""
    loss = functools.partial(next_token_loss, config=config, aux=is_routed(config))
    terms = {"label_smoothing": settings.label_smoothing, "z_loss": settings.z_loss}
    if (own := imports(settings).get("loss")) is not None:
        return loss, functools.partial(own, config=config)
    return loss, functools.partial(loss, balance=moe_balance(settings), **terms)


def moe_balance(settings: Settings) -> Balance | None:
    """The weights of the load-balancing losses; None where both are 0."""
    if not settings.balance_loss and not settings.router_z_loss:
        return None
    return Balance(sequence=settings.balance_loss, z=settings.router_z_loss)


def is_cross_entropy(settings: Settings) -> bool:
    """Whether the training loss is a plain cross entropy apart from load balancing, so that perplexity is defined."""
    return not settings.label_smoothing and not settings.z_loss and settings.loss is None


def is_complete(summary: Json | None) -> bool:
    """Whether summary.json is complete and valid: it has no checksum."""
    numbers = ("heldout_bits_per_byte", "heldout_bytes", "zlib_bits_per_byte")
    values = summary or {}
    return all(type(values.get(name)) in (int, float) for name in numbers) and isinstance(values.get("sample"), str)


def report_result(summary: Json, path: Path) -> None:
    report.result(summary, path)


def init_run_folder(path: Path, identity: Json, model: InitialModel, length: int) -> None:
    """Writes the files that do not change during a run. run.json marks the folder as a run's."""
    (path / run_folder.SUMMARY).unlink(missing_ok=True)
    checkpoint.set_aside(path / run_folder.STEPS, after=-1)
    if model.weights is not None:  # now, so that weights for which PEFT has no adapters are reported before training
        initial_model.write_checkpoint(path, model.config, model.params, identity["settings"]["init"])
    run_folder.write_json(path / run_folder.RUN, identity)
    write_text(path / "tokenizer.json", model.tokenizer.to_str(pretty=True))
    if model.weights is None:  # as saving writes it; beside adapters it would announce full weights
        write_text(path / "config.json", config_text(model.config, torch.float32))
    if model.source is None:
        run_folder.write_json(path / "tokenizer_config.json", tokenizer_config(context=length))
    else:
        pretrained.copy_companions(model.source, path)
