"""What a run is before its first step: its settings, text, tokenizer and model, and what resuming must find unchanged.

The latter, its identity, is in run.json for whoever wants to know, and in each saved step, where damage is noticed.
"""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

import fnmodels
from fnmodels import tree
from fnmodels.errors import UserError
from fnmodels.inputs.layout import Layout
from fnmodels.tree import Tree
from params.checkpoint.save import config_text
from params.io.files import write_text
from train.checkpoint import saved_steps as checkpoint
from train.data import sources, tokenized
from train.data.mixture import Mixture, epochs
from train.data.rows import Batch
from train.data.tokenizer import tokenizer_config
from train.eval import pretrained
from train.losses.next_token import next_token_loss
from train.optim.base import Optimizer

from . import heldout as evaluate
from . import initial_model, run_folder
from .flops import flops_per_token
from .initial_model import Model
from .metrics_log import short
from .progress import tokenizing
from .recipe import loss_terms, optimizer_for, with_usual
from .settings import Settings, deciding, flag, to_toml

Json = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """Everything that training needs and that does not change while it runs; `identity` as JSON."""

    path: Path
    identity: Json
    settings: Settings
    config: Any
    tokenizer: Tokenizer
    ends: tuple[int, ...]
    texts: sources.DataSources
    dataset: tokenized.Dataset
    mixture: Mixture
    heldout: Batch
    loss: Callable[..., tuple[Any, ...]]
    train_loss: Callable[..., tuple[Any, ...]]  # with what only training has
    optimizer: Optimizer
    trained: int  # parameters
    flops_per_token: float
    left_out: tuple[str, ...]

    @property
    def heldout_targets(self) -> int:
        return int((self.heldout["labels"] >= 0).sum())

    def bits_per_byte(self, loss: float) -> float:
        return evaluate.bits_per_byte(loss, self.heldout_targets, self.dataset.heldout.bytes)

    def train_bits_per_byte(self, loss: float) -> float:
        """With the mean bytes of a target of all that is learned from, not of the batch."""
        return evaluate.bits_per_byte(loss, self.dataset.train.target_count, self.dataset.train.bytes)

    def epochs(self, steps: int) -> dict[str, float]:
        """How often each source was gone through, by the number it has in --data."""
        gone = epochs(self.mixture, steps, self.settings.batch_rows)
        return {str(number): short(times) for number, times in enumerate(gone.values())}


def resolved(settings: Settings) -> Settings:
    """With a value where it depends on the others or on the machine; a run keeps it wherever it is resumed."""
    return with_usual(replace(settings, dtype=settings.dtype or fast_dtype()))


def prepare(
    path: Path, settings: Settings, recorded: Json | None, fits: Callable[[Any], None], *, spread: bool = False
) -> tuple[Tree, Job]:
    """Text, tokenizer and model: new ones, those of --init, or on resume (`recorded`) those in the run folder.

    fits: raises where the model, by its config, is not for the processes; before anything is written.
    spread: without values of weights, of which each of several processes makes its part.
    """
    texts = sources.read_sources(settings.data, without=path, strict=settings.broken == "stop")
    if recorded:
        made = initial_model.resumed(path, settings, spread=spread)
    else:
        made = initial_model.begun(settings, texts, spread=spread)
    config, tokenizer, ends = made.config, made.tokenizer, made.ends
    fits(config)
    length = min(settings.row_length, config.max_position_embeddings)
    if not tokenizer.encode(settings.prompt).ids:
        raise UserError(f"--prompt {settings.prompt!r}: the tokenizer makes no token of it")
    template = tokenized.template_for(texts, made.source or path, (recorded or {}).get("day"))
    with tokenizing() as show:
        dataset = tokenized.tokenize(
            texts,
            tokenizer,
            ends[0] if ends else None,
            config.vocab_size,
            length=length,
            template=template,
            strict=settings.broken == "stop",
            show=show,
        )
    identity = {
        "settings": deciding(settings),
        "corpus": dataset.fingerprint,
        "tokenizer": hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
        "config": json.loads(json.dumps(config.to_hf())),
        "weights": made.weights,
    }
    if template and template.day:
        identity["day"] = template.day  # which a resumed run tells again
    if recorded:
        check_agreement(recorded, identity, path)
    check_length(dataset, length, settings.data)
    if not recorded:
        begin_folder(path, identity, made, length)
    write_text(path / run_folder.SETTINGS, to_toml(settings))
    return made.params, Job(
        path=path,
        identity=identity,
        settings=settings,
        config=config,
        tokenizer=tokenizer,
        ends=ends,
        texts=texts,
        dataset=dataset,
        mixture=tokenized.make_mixture(dataset, length),
        heldout=tokenized.heldout_batch(dataset, length),
        loss=loss_function(config, made.spec, getattr(torch, str(settings.dtype))),
        train_loss=loss_function(config, made.spec, getattr(torch, str(settings.dtype)), **loss_terms(settings)),
        optimizer=optimizer_for(made.spec, settings),
        trained=sum(math.prod(leaf.shape) for leaf in tree.leaves(made.spec) if leaf.trainable),
        flops_per_token=flops_per_token(config, made.spec, length),
        left_out=made.left_out,
    )


def fast_dtype() -> str:
    """bfloat16 where the CPU has instructions for it: 1.5 times the speed of fp32, and a fraction of it elsewhere.

    A run keeps what it began with, so that it may be resumed on another machine.
    """
    able: Json = getattr(torch.cpu, "get_capabilities", dict)()  # not in every torch that is supported
    return "bfloat16" if able.get("avx512_bf16") or able.get("amx_bf16") else "float32"


def begin_folder(path: Path, identity: Json, made: Model, length: int) -> None:
    """What never changes during a run. run.json makes the folder known as a run's, which may be resumed."""
    (path / run_folder.SUMMARY).unlink(missing_ok=True)
    checkpoint.set_aside(path / run_folder.STEPS, after=-1)
    if made.weights is not None:  # at once, for PEFT knows no adapters of some weights, and would say so after the run
        initial_model.write(path, made.config, made.params, identity["settings"]["init"])
    run_folder.write_json(path / run_folder.RUN, identity)
    write_text(path / "tokenizer.json", made.tokenizer.to_str(pretty=True))
    if (
        made.weights is None
    ):  # as saving will, which then leaves it alone; beside adapters it would promise whole weights
        write_text(path / "config.json", config_text(made.config, torch.float32))
    if made.source is None:
        run_folder.write_json(path / "tokenizer_config.json", tokenizer_config(context=length))
    else:
        pretrained.copy_companions(made.source, path)


def check_agreement(recorded: Json, identity: Json, path: Path) -> None:
    """UserError where resuming would go on with something else than what the run began with."""
    what = {
        "corpus": "the text has changed since the run began",
        "tokenizer": "tokenizer.json is not the one that the run began with",
        "config": "config.json is not the one that the run began with",
        "weights": "the weights that its adapters belong to have changed",
    }
    for name, change in what.items():
        if recorded.get(name) != identity[name]:
            raise UserError(
                f"--run {path}: {change}, so that resuming would not give the same result: name another --run"
            )


def check_experts(config: Any, spec: Tree, settings: Settings) -> None:
    """UserError where the settings balance what the model does not have."""
    of = f"and {settings.init or 'the new model'} has none"
    for name in ("balance_loss", "router_z_loss"):
        if getattr(settings, name) and not is_routed(config):
            raise UserError(f"{flag(name)} {getattr(settings, name)} is for models with experts, {of}")
    if settings.balance_rate is not None:
        if not any(path.endswith("selection_bias") for path in tree.flatten(spec)):
            raise UserError(f"--balance-rate {settings.balance_rate} moves the selection bias of routers, {of}")
        if settings.lora:
            raise UserError(
                f"--balance-rate {settings.balance_rate} moves what is not of the adapters, which alone are kept "
                "(--lora): leave one of the two out"
            )


def check_length(dataset: tokenized.Dataset, length: int, source: str | None) -> None:
    """UserError where the held-out text does not fill one row: its bits per byte would say nothing."""
    tokens, size = dataset.heldout.total, dataset.train.bytes + dataset.heldout.bytes
    if tokens < length:
        kilobytes = -(-size * length // (tokens * 1000))
        raise UserError(
            f"too little text in {source or 'the standard library'}: of its {size:,} bytes "
            f"{dataset.heldout.bytes:,} are held out, which are {tokens} tokens and not the {length} of one row: "
            f"give about {kilobytes} kB or more"
        )


def is_routed(config: Any) -> bool:
    return bool(getattr(fnmodels.family_of(config), "ROUTED", False))


def step_options(settings: Settings) -> Json:
    """Of `make_step`."""
    return {name: getattr(settings, name) for name in ("accumulate", "clip", "remat", "compile", "balance_rate")}


def loss_function(config: Any, spec: Tree, dtype: torch.dtype, **terms: Any) -> Callable[..., tuple[Any, ...]]:
    """Computes in `dtype`; parameters that train, their gradients and the loss stay fp32. With counts of experts.

    terms: of `next_token_loss`.
    """
    casts = tree.map(lambda leaf: leaf.dtype.is_floating_point and not leaf.keep_dtype, spec)

    def loss(
        params: Tree, batch: Batch, *, layout: Layout | None = None, layer_fn: Any = None, aux: bool = is_routed(config)
    ) -> tuple[Any, ...]:
        cast = tree.map(lambda param, casts: param.to(dtype) if casts else param, params, casts)
        return next_token_loss(cast, batch, config=config, layout=layout, layer_fn=layer_fn, aux=aux, **terms)

    return loss
