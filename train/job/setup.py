"""Setup of a run before its first step: text, tokenizer and model, and the identity that resuming must find unchanged.

The identity is written to run.json for readers, and into each saved step, where a checksum protects it.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.errors import UserError
from fnmodels.files import write_text
from fnmodels.models.common.config_json import strict_json
from fnmodels.models.common.family import DecoderConfig
from fnmodels.tree import Tree
from params.checkpoint.save import config_text
from train.checkpoint import saved_steps as checkpoint
from train.data import sources, tokenized
from train.data.mixture import Mixture, epochs
from train.data.rows import Batch
from train.data.tokenizer import tokenizer_config
from train.eval import pretrained
from train.loss import LossFn
from train.optim.base import Optimizer

from . import initial_model, run_folder
from .flops import flops_per_token
from .heldout import bits_per_byte
from .initial_model import Model
from .metrics_log import six_digits
from .progress import tokenizing
from .recipe import is_routed, losses, optimizer_for, with_optimizer_defaults
from .settings import Settings, fixed_settings, flag, to_toml

Json = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """All inputs of training that do not change during the run."""

    path: Path
    identity: Json
    settings: Settings
    model: Model
    texts: sources.DataSources
    dataset: tokenized.Dataset
    mixture: Mixture
    heldout: Batch
    loss: LossFn
    train_loss: LossFn  # with the terms that only training has
    optimizer: Optimizer
    flops_per_token: float

    @property
    def heldout_targets(self) -> int:
        return int((self.heldout["labels"] >= 0).sum())

    def bits_per_byte(self, loss: float) -> float:
        return bits_per_byte(loss, self.heldout_targets, self.dataset.heldout.bytes)

    def train_bits_per_byte(self, loss: float) -> float:
        """Converts a train loss in nats, with the bytes per target averaged over all train text, not the batch."""
        return bits_per_byte(loss, self.dataset.train.target_count, self.dataset.train.bytes)

    def epochs(self, steps: int) -> dict[str, float]:
        """Epochs over each source after `steps` steps, by its index in --data."""
        passes = epochs(self.mixture, steps, self.settings.batch_rows)
        return {str(number): six_digits(times) for number, times in enumerate(passes.values())}


def resolved(settings: Settings) -> Settings:
    """`settings` with defaults that depend on other settings or the machine; a run keeps them when it is resumed."""
    return with_optimizer_defaults(replace(settings, dtype=settings.dtype or fast_dtype()))


def prepare(
    path: Path,
    settings: Settings,
    recorded: Json | None,
    check_config: Callable[[DecoderConfig], None],
    *,
    on_meta: bool = False,
) -> Job:
    """Text, tokenizer and model, new or of --init, or on resume (`recorded`) of the run folder.

    check_config: raises where the mesh cannot shard the model; called before anything is written. on_meta: parameters
    without values, of which each of several processes will make its shard. UserError for settings or text that cannot
    be trained on, or that differ from the recorded run.
    """
    strict = settings.broken == "stop"
    texts = sources.read_sources(settings.data, without=path, strict=strict)
    if recorded:
        model = initial_model.from_run(path, settings, on_meta=on_meta)
    else:
        model = initial_model.for_new_run(settings, texts, on_meta=on_meta)
    config, tokenizer = model.config, model.tokenizer
    check_config(config)
    length = min(settings.row_length, config.max_position_embeddings)
    if not tokenizer.encode(settings.prompt).ids:
        raise UserError(f"--prompt {settings.prompt!r}: the tokenizer makes no token of it")
    template = tokenized.template_for(texts, model.source or path, (recorded or {}).get("day"))
    with tokenizing() as show:
        end = model.end_ids[0] if model.end_ids else None
        dataset = tokenized.tokenize(
            texts, tokenizer, end, config.vocab_size, length=length, template=template, strict=strict, show=show
        )
    identity = {
        "settings": fixed_settings(settings),
        "corpus": dataset.fingerprint,
        "tokenizer": hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
        "config": strict_json(config.to_hf()),
        "weights": model.weights,
    }
    if template and template.day:
        identity["day"] = template.day  # the chat template's date, which a resumed run must reuse
    if recorded:
        check_agreement(recorded, identity, path)
    check_heldout_length(dataset, length, settings.data)
    if not recorded:
        init_run_folder(path, identity, model, length)
    write_text(path / run_folder.SETTINGS, to_toml(settings))
    dtype = getattr(torch, str(settings.dtype))
    loss, train_loss = (computed_in(dtype, function, model.spec) for function in losses(config, settings))
    return Job(
        path=path,
        identity=identity,
        settings=settings,
        model=model,
        texts=texts,
        dataset=dataset,
        mixture=tokenized.make_mixture(dataset, length),
        heldout=tokenized.heldout_batch(dataset, length),
        loss=loss,
        train_loss=train_loss,
        optimizer=optimizer_for(model.spec, settings),
        flops_per_token=flops_per_token(config, model.spec, length),
    )


def fast_dtype() -> str:
    """bfloat16 on CPUs that multiply faster in it (a step is 1.5 times as fast as in fp32), else float32.

    A resumed run keeps the dtype it started with, also on another machine.
    """
    capabilities: Json = getattr(torch.cpu, "get_capabilities", dict)()  # missing in older supported versions of torch
    if not (capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")):
        return "float32"
    from fnmodels.ops.cpu import product_table  # here, for its import measures

    # A variable such as ONEDNN_MAX_CPU_ISA may keep the libraries from instructions that the CPU has.
    return "float32" if product_table.WIDENS else "bfloat16"


def init_run_folder(path: Path, identity: Json, model: Model, length: int) -> None:
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


def check_agreement(recorded: Json, identity: Json, path: Path) -> None:
    """UserError where text, tokenizer, config or base weights differ from those the run started with."""
    changes = {
        "corpus": "the text has changed since the run started",
        "tokenizer": "tokenizer.json is not the one that the run started with",
        "config": "config.json is not the one that the run started with",
        "weights": "the weights that its adapters belong to have changed",
    }
    for name, change in changes.items():
        if recorded.get(name) != identity[name]:
            raise UserError(f"--run {path}: {change}, so resuming would not give the same result: name another --run")


def check_expert_settings(config: DecoderConfig, spec: Tree, settings: Settings) -> None:
    """UserError where load-balancing settings do not apply to the model."""
    reason = f"and {settings.init or 'the new model'} has none"
    for name in ("balance_loss", "router_z_loss"):
        if getattr(settings, name) and not is_routed(config):
            raise UserError(f"{flag(name)} {getattr(settings, name)} is for models with experts, {reason}")
    if settings.balance_rate is not None:
        if not any(path.endswith("selection_bias") for path in tree.flatten(spec)):
            raise UserError(f"--balance-rate {settings.balance_rate} moves the selection bias of routers, {reason}")
        if settings.lora:
            raise UserError(
                f"--balance-rate {settings.balance_rate} moves parameters outside of the adapters, and --lora saves "
                "only these: leave one of the two out"
            )


def check_heldout_length(dataset: tokenized.Dataset, length: int, source: str | None) -> None:
    """UserError where the held-out text does not fill one row: its bits per byte would be meaningless."""
    tokens, size = dataset.heldout.total, dataset.train.bytes + dataset.heldout.bytes
    if tokens < length:
        kilobytes = -(-size * length // (tokens * 1000))
        raise UserError(
            f"too little text in {source or 'the standard library'}: of its {size:,} bytes "
            f"{dataset.heldout.bytes:,} are held out, which are {tokens} tokens and not the {length} of one row: "
            f"give about {kilobytes} kB or more"
        )


def computed_in(dtype: torch.dtype, loss: LossFn, spec: Tree) -> LossFn:
    """The loss with its model computed in `dtype`: trainable parameters, their gradients and the loss stay fp32."""
    casts = tree.map(lambda leaf: leaf.dtype.is_floating_point and not leaf.keep_dtype, spec)

    def computed(params: Tree, batch: Mapping[str, Tensor]) -> tuple[Any, ...]:
        return loss(tree.map(lambda param, casts: param.to(dtype) if casts else param, params, casts), batch)

    return computed
