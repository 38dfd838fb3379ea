"""What a run is before its first step: its settings, text, tokenizer and model, and what resuming must find unchanged.

The latter, its identity, is in run.json for whoever wants to know, and in each saved step, where damage is noticed.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

import fnmodels
import params as P
from fnmodels import llama, tree
from fnmodels.mask import Layout
from fnmodels.tree import Tree
from params.manifest import MANIFEST
from params.save import config_text
from train import checkpoint, data, evaluate, folder, pretrained, sources
from train.cache import cached
from train.errors import UserError
from train.files import write_text
from train.loss import next_token_loss
from train.mixture import Mixture
from train.optim import Optimizer, adamw
from train.progress import tokenizing
from train.rows import Batch
from train.schedule import warmup_stable_decay
from train.settings import Settings, deciding, to_toml
from train.tokenizer import special_ids, tokenizer_config, train

Json = dict[str, Any]
FROM_SCRATCH, FROM_CHECKPOINT = 3e-3, 3e-4  # peaks of the learning rate


@dataclass(frozen=True)
class Job:
    """Everything that training needs and that does not change while it runs; `identity` as JSON."""

    path: Path
    identity: Json
    settings: Settings
    config: Any
    tokenizer: Tokenizer
    ends: tuple[int, ...]
    texts: sources.Texts
    dataset: data.Dataset
    mixture: Mixture
    heldout: Batch
    loss: Callable[..., tuple[Tensor, Tensor]]
    optimizer: Optimizer

    @property
    def heldout_targets(self) -> int:
        return int((self.heldout["labels"] >= 0).sum())

    def bits_per_byte(self, loss: float) -> float:
        return evaluate.bits_per_byte(loss, self.heldout_targets, self.dataset.heldout.bytes)


def resolved(settings: Settings) -> Settings:
    """With a value where it depends on the others or on the machine; a run keeps it wherever it is resumed."""
    rate = settings.learning_rate
    if rate is None:
        rate = FROM_CHECKPOINT if settings.init else FROM_SCRATCH
    return replace(settings, learning_rate=rate, dtype=settings.dtype or fast_dtype())


def prepare(path: Path, settings: Settings, recorded: Json | None) -> tuple[Tree, Job]:
    """Text, tokenizer and model: new ones, those of --init, or on resume (`recorded`) those in the run folder."""
    texts = sources.load(settings.data, without=path)
    source = path if recorded else Path(settings.init) if settings.init else None
    if source is None:
        tokenizer = new_tokenizer(texts, settings.vocab_size)
        ids = special_ids(tokenizer)
        config: Any = llama.Config.from_hf(hf_config(settings, tokenizer.get_vocab_size(), ids))
        params = P.init(config, settings.seed, dtype=torch.float32)
        ends: tuple[int, ...] = (ids["eos_token_id"],)
    else:
        tokenizer, ends = pretrained.load_tokenizer(source), pretrained.end_ids(source)
        if recorded:
            config = P.load_config(source)
            params = P.abstract(config, dtype=torch.float32)  # the saved state has their values
        else:
            check_unchanged(source)
            config, params = P.load_pretrained(source, dtype=torch.float32, copy=True)
    pretrained.check_vocabulary(tokenizer, config.vocab_size, source or path)
    with tokenizing() as show:
        dataset = data.tokenized(texts, tokenizer, ends[0] if ends else None, config.vocab_size, show=show)
    identity = {
        "settings": deciding(settings),
        "corpus": dataset.fingerprint,
        "tokenizer": hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
        "config": json.loads(json.dumps(config.to_hf())),
    }
    if recorded:
        check_agreement(recorded, identity, path)
    length = min(settings.row_length, config.max_position_embeddings)
    check_length(dataset, length, settings.data)
    if not recorded:
        begin_folder(path, identity, config, tokenizer, source, length)
    write_text(path / folder.SETTINGS, to_toml(settings))
    return params, Job(
        path=path,
        identity=identity,
        settings=settings,
        config=config,
        tokenizer=tokenizer,
        ends=ends,
        texts=texts,
        dataset=dataset,
        mixture=data.mixture(dataset, length),
        heldout=data.heldout(dataset, length),
        loss=loss_function(config, getattr(torch, str(settings.dtype))),
        optimizer=optimizer_for(config, settings),
    )


def check_unchanged(source: Path) -> None:
    """UserError where a manifest lies beside the model and a byte has changed since: it would train all the same."""
    if not (source / MANIFEST).exists():
        return
    try:
        P.verify(source)
    except P.CheckpointError as error:
        raise UserError(f"--init {source}: {str(error).rstrip('.')}; where that is meant, remove {MANIFEST}") from error


def new_tokenizer(texts: sources.Texts, vocab_size: int) -> Tokenizer:
    """A tokenizer made of the train documents, from the cache where an equal corpus had one before."""
    for source in texts.sources:
        if source.text is None:
            raise UserError(
                f"--data {source.name} holds token ids: name with --init the checkpoint whose tokenizer made them"
            )
    return cached(
        f"tokenizer-{texts.fingerprint[:32]}-{vocab_size}.json",
        lambda path: train((document.text for document in texts.train), vocab_size).save(str(path)),
        lambda path: Tokenizer.from_file(str(path)),
    )


def fast_dtype() -> str:
    """bfloat16 where the CPU has instructions for it: 1.5 times the speed of fp32, and a fraction of it elsewhere.

    A run keeps what it began with, so that it may be resumed on another machine.
    """
    able: Json = getattr(torch.cpu, "get_capabilities", dict)()  # not in every torch that is supported
    return "bfloat16" if able.get("avx512_bf16") or able.get("amx_bf16") else "float32"


def hf_config(settings: Settings, vocab_size: int, special_ids: dict[str, int]) -> Json:
    """The new model's config.json for a tokenizer of `vocab_size` tokens."""
    return {
        "model_type": "llama",
        "vocab_size": -(-vocab_size // 64) * 64,  # divides by any mesh, whatever the text was
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size,
        "num_hidden_layers": settings.num_hidden_layers,
        "num_attention_heads": settings.num_attention_heads,
        "num_key_value_heads": settings.num_key_value_heads,
        "max_position_embeddings": settings.row_length,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        **special_ids,
    }


def begin_folder(
    path: Path, identity: Json, config: Any, tokenizer: Tokenizer, source: Path | None, length: int
) -> None:
    """What never changes during a run. run.json makes the folder known as a run's, which may be resumed."""
    (path / folder.SUMMARY).unlink(missing_ok=True)
    checkpoint.set_aside(path / folder.STEPS, after=-1)
    folder.write_json(path / folder.RUN, identity)
    write_text(path / "tokenizer.json", tokenizer.to_str(pretty=True))
    write_text(path / "config.json", config_text(config, torch.float32))  # as saving will, which then leaves it alone
    if source is None:
        folder.write_json(path / "tokenizer_config.json", tokenizer_config(context=length))
    else:
        pretrained.copy_companions(source, path)


def check_agreement(recorded: Json, identity: Json, path: Path) -> None:
    """UserError where resuming would go on with something else than what the run began with."""
    what = {
        "corpus": "the text has changed since the run began",
        "tokenizer": "tokenizer.json is not the one that the run began with",
        "config": "config.json is not the one that the run began with",
    }
    for name, change in what.items():
        if recorded.get(name) != identity[name]:
            raise UserError(
                f"--run {path}: {change}, so that resuming would not give the same result: name another --run"
            )


def check_length(dataset: data.Dataset, length: int, source: str | None) -> None:
    """UserError where the held-out text does not fill one row: its bits per byte would say nothing."""
    tokens, size = dataset.heldout.total, dataset.train.bytes + dataset.heldout.bytes
    if tokens < length:
        kilobytes = -(-size * length // (tokens * 1000))
        raise UserError(
            f"too little text in {source or 'the standard library'}: of its {size:,} bytes "
            f"{dataset.heldout.bytes:,} are held out, which are {tokens} tokens and not the {length} of one row: "
            f"give about {kilobytes} kB or more"
        )


def loss_function(config: Any, dtype: torch.dtype) -> Callable[..., tuple[Tensor, Tensor]]:
    """Computes in `dtype`; the parameters, their gradients and the loss stay fp32."""

    def loss(params: Tree, batch: Batch, *, layout: Layout | None = None) -> tuple[Tensor, Tensor]:
        return next_token_loss(tree.map(lambda p: p.to(dtype), params), batch, config=config, layout=layout)

    return loss


def optimizer_for(config: Any, settings: Settings) -> Optimizer:
    peak, warmup = settings.learning_rate, min(settings.warmup, settings.steps // 10)
    assert peak is not None  # as in `resolved`

    def rate(step: Tensor) -> float:
        return peak * float(
            warmup_stable_decay(int(step), total=settings.steps, warmup=warmup, decay_ratio=settings.decay_ratio)
        )

    return adamw(
        rate, betas=settings.betas, weight_decay=settings.weight_decay, spec=fnmodels.family_of(config).spec(config)
    )
