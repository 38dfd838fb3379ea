"""The model that a run trains: a new one, a checkpoint's, or LoRA adapters on a checkpoint; and what a run saves of it.

With adapters only they are saved, in the saved steps and in the run folder: the base weights stay in their checkpoint,
and a resumed run compares them with the digests recorded at its start.
"""

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.errors import UserError
from fnmodels.files import read_text
from fnmodels.models.common.family import DecoderConfig, traits_of
from fnmodels.tree import Tree
from params.checkpoint.header_checks import check_folder
from params.checkpoint.manifest import digest, manifests
from train.comm.dtensor import map_local
from train.data.cache import cached
from train.data.tokenizer import SPLIT_PATTERN, special_ids, train_tokenizer
from train.eval import pretrained
from train.job.settings import Settings, family_module, lora_flag

from .new_model import new_config
from .text_data import Texts

Json = dict[str, Any]


@dataclass(frozen=True, eq=False)
class InitialModel:
    """A model with its tokenizer before the first step. spec: `Leaf`s, with what is trainable and what is decayed.

    params: on the meta device where a saved step has their values, or each of several processes makes its own shard of
    them (`on_meta`, in the functions below). source: the checkpoint folder. dropped: parts of the checkpoint that a run
    does not train. weights: {file: digest} of the base weights of adapters.
    """

    config: DecoderConfig
    params: Tree
    spec: Tree
    tokenizer: Tokenizer
    end_ids: tuple[int, ...]
    source: Path | None = None
    dropped: tuple[str, ...] = ()
    weights: Json | None = None


def for_new_run(settings: Settings, texts: Texts, *, on_meta: bool = False) -> InitialModel:
    """The model of a new run. UserError where the settings name none that can be trained."""
    if settings.init is None:
        model = from_scratch(settings, texts, on_meta=on_meta)
    else:
        model = from_checkpoint(Path(settings.init), settings, on_meta=on_meta)
    pretrained.check_vocabulary(model.tokenizer, model.config, model.source or Path("the new model"))
    return model


def from_run(path: Path, settings: Settings, *, on_meta: bool = False) -> InitialModel:
    """The model of the run in the folder `path`, whose parameter values are in its saved steps."""
    tokenizer = pretrained.load_tokenizer(path)  # compared with the one that the run started with
    if settings.lora:
        return replace(from_checkpoint(Path(str(settings.init)), settings, on_meta=on_meta), tokenizer=tokenizer)
    config = P.load_config(path, family=family_module(settings), part="text")
    pretrained.check_vocabulary(tokenizer, config, path)
    params = params_without_storage(config, settings)
    return InitialModel(config, params, family_spec(config), tokenizer, pretrained.end_ids(path), path)


def from_scratch(settings: Settings, texts: Texts, *, on_meta: bool) -> InitialModel:
    """A Llama of the settings' sizes, with a tokenizer trained on the text."""
    tokenizer = new_tokenizer(texts, settings.vocab_size)
    ids = special_ids(tokenizer)
    config = new_config(settings, tokenizer.get_vocab_size(), ids)
    params = P.abstract(config, dtype=torch.float32) if on_meta else P.init(config, settings.seed, dtype=torch.float32)
    return InitialModel(config, params, family_spec(config), tokenizer, (ids["eos_token_id"],))


def from_checkpoint(source: Path, settings: Settings, *, on_meta: bool) -> InitialModel:
    """The weights of a checkpoint as `load_weights` reads them; adapters get values even with `on_meta`."""
    check_unchanged(source)
    config, tokenizer = config_of_checkpoint(source, settings), pretrained.load_tokenizer(source)
    params = params_without_storage(config, settings) if on_meta else load_weights(source, settings)[1]
    spec, weights = family_spec(config), None
    if settings.lora:
        spec = P.lora.spec(config, params)
        weights = {path.name: digest(path) for path in sorted(source.glob("*.safetensors"))}
    ends, unused = pretrained.end_ids(source), unused_parts(source, settings)
    return InitialModel(config, params, spec, tokenizer, ends, source, unused, weights)


def config_of_checkpoint(source: Path, settings: Settings) -> DecoderConfig:
    """The config of --init's checkpoint, without unused parts; only headers are read. UserError, CheckpointError."""
    pretrained.load_tokenizer(source)
    folder = pretrained.weights_folder(source)
    if settings.lora and folder != source:
        raise UserError(f"--init {source} holds adapters: --lora needs the checkpoint of their base model")
    with ExitStack() as stack:
        known: Json = {"part": "text", "family": family_module(settings), "ignore_fields": settings.ignore_fields or ()}
        config = check_folder(folder, stack, unused_parts(source, settings), **known).config
    if not traits_of(fnmodels.family_of(config)).causal:
        raise UserError(
            f"--init {source} is a {config.model_type}, whose tokens see later ones, and this job trains next-token "
            "prediction: train it with train.make_step and the labels of train.mask_tokens"
        )
    return config


def load_weights(source: Path, settings: Settings, *, plan: Tree | None = None) -> tuple[DecoderConfig, Tree]:
    """(config, params) of a checkpoint in fp32, its adapters merged; with --lora in the compute dtype, with new ones.

    plan: of shardings, loads only the local shards of its parameters.
    """
    options: Json = {"copy": True, "drop": unused_parts(source, settings), "plan": plan}
    options |= {"ignore_fields": settings.ignore_fields or (), "family": family_module(settings)}
    if settings.lora is None:
        return pretrained.load_model(source, merge=True, dtype=torch.float32, **options)
    config, params = P.load_pretrained(source, part="text", dtype=getattr(torch, str(settings.dtype)), **options)
    return config, add_adapters(config, params, settings)


def add_adapters(config: DecoderConfig, params: Tree, settings: Settings) -> Tree:
    """`params` with new adapters in fp32, as --lora names them. UserError where a target is no weight."""
    lora = lora_flag.parse_lora(str(settings.lora))
    options: Json = {name: getattr(lora, name) for name in ("rank", "alpha", "targets", "rslora", "dora")}
    try:
        params = P.lora.add(config, params, seed=settings.seed, **options)
    except ValueError as error:
        raise UserError(f"--lora {settings.lora}: {error}") from error
    return P.lora.attach(params, map_local(torch.Tensor.float, P.lora.adapters(params)))


def initial(config: DecoderConfig, settings: Settings, plan: Tree | None) -> Tree:
    """The parameters at step 0: the local shards of a plan, or for None the full ones."""
    if settings.init is not None:
        return load_weights(Path(settings.init), settings, plan=plan)[1]
    return P.init(config, settings.seed, plan=plan)


def params_without_storage(config: DecoderConfig, settings: Settings) -> Tree:
    """Meta parameters; with --lora expanded scalars, to which adapters with values can be added."""
    if settings.lora is None:
        return P.abstract(config, dtype=torch.float32)
    abstract = P.abstract(config, dtype=getattr(torch, str(settings.dtype)))
    scalars = tree.map(lambda leaf: torch.empty((), dtype=leaf.dtype).expand(leaf.shape), abstract)
    return add_adapters(config, scalars, settings)


def write_checkpoint(path: Path, config: DecoderConfig, params: Tree, base: str | None) -> None:
    """Writes the run folder's checkpoint: full weights, or adapters in PEFT's format for the base model `base`."""
    if tree.leaves(P.lora.adapters(params)):
        P.lora.save_adapters(path, config, params, base=base or "")
    else:
        P.save_pretrained(path, config, params)


def family_spec(config: DecoderConfig) -> Tree:
    """The spec of the model without adapters."""
    return fnmodels.family_of(config).spec(config)


def run_spec(config: DecoderConfig, settings: Settings) -> Tree:
    """The spec of a run with these settings, adapters included."""
    if settings.lora is None:
        return family_spec(config)
    return P.lora.spec(config, params_without_storage(config, settings))


def unused_parts(source: Path, settings: Settings) -> tuple[str, ...]:
    """Parts of the checkpoint that the loss does not use: MTP heads."""
    folder = pretrained.weights_folder(source)
    known: Json = {"part": "text", "family": family_module(settings), "ignore_fields": settings.ignore_fields or ()}
    config = P.load_config(folder, **known)
    lengths = traits_of(fnmodels.family_of(config)).optional
    return tuple(part for part, length in lengths.items() if getattr(config, length))


def check_unchanged(source: Path) -> None:
    """UserError where the checkpoint has a manifest and its files differ from it: it might load all the same."""
    if not (names := manifests(source)):
        return
    try:
        P.verify(source)
    except P.CheckpointError as error:
        text = f"--init {source}: {str(error).rstrip('.')}; if that is intended, remove {' and '.join(names)}"
        raise UserError(text) from error


def new_tokenizer(texts: Texts, vocab_size: int) -> Tokenizer:
    """A tokenizer trained on the train documents, cached by their hash."""
    for name in texts.token_sources:
        raise UserError(f"--data {name} holds token ids: name with --init the checkpoint whose tokenizer made them")
    for name in texts.chat_sources:
        raise UserError(f"--data {name} holds conversations: name with --init a checkpoint with a chat template")
    key = hashlib.sha256(f"{SPLIT_PATTERN} {texts.fingerprint} {vocab_size}".encode()).hexdigest()
    return cached(
        f"tokenizer-{key[:32]}.json",
        lambda path: path.write_text(train_tokenizer(texts.train_texts, vocab_size).to_str(), encoding="utf-8"),
        lambda path: Tokenizer.from_str(read_text(path)),
    )
