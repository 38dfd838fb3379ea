"""The model that a run trains: a new one, a checkpoint's, or adapters beside the weights of one; and how it is kept.

Of adapters only they are kept, in the saved steps and in the run folder: the weights they belong to stay where they
are, and a resumed run holds them against the digests that it began with.
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
from fnmodels.models import llama
from fnmodels.tree import Tree
from params.checkpoint.load import check_folder
from params.checkpoint.manifest import MANIFEST, digest
from train.data import sources
from train.data.cache import cached
from train.data.tokenizer import SPLIT_PATTERN, special_ids, train_tokenizer
from train.dist.dtensor import map_local
from train.eval import pretrained
from train.state import State

from . import lora_flag
from .settings import Settings

Json = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Model:
    """params: on the meta device where a saved step has their values, or each of several processes makes its own part
    of them (`spread`, in the functions below). spec: what trains, and what decays.

    source: the folder it is from. left_out: parts that the checkpoint has and a run does not train. weights: {file:
    digest} of what adapters belong to.
    """

    config: Any
    params: Tree
    spec: Tree
    tokenizer: Tokenizer
    ends: tuple[int, ...]
    source: Path | None = None
    left_out: tuple[str, ...] = ()
    weights: Json | None = None


def begun(settings: Settings, texts: sources.DataSources, *, spread: bool = False) -> Model:
    """The model of a run that begins. UserError where the settings name one that cannot be."""
    if settings.init is not None:
        source = Path(settings.init)
        made = adapted(source, settings, spread=spread) if settings.lora else whole(source, spread=spread)
    else:
        made = new(settings, texts, spread=spread)
    pretrained.check_vocabulary(made.tokenizer, made.config.vocab_size, made.source or Path("the new model"))
    return made


def resumed(path: Path, settings: Settings, *, spread: bool = False) -> Model:
    """The model of the run in the folder `path`, whose values are in its saved steps."""
    if settings.lora:
        made = adapted(Path(str(settings.init)), settings, spread=spread)
        tokenizer = pretrained.load_tokenizer(path)  # held against the one that the run began with
        return replace(made, tokenizer=tokenizer)
    config, tokenizer = P.load_config(path), pretrained.load_tokenizer(path)
    pretrained.check_vocabulary(tokenizer, config.vocab_size, path)
    params = P.abstract(config, dtype=torch.float32)
    return Model(config, params, spec_of(config), tokenizer, pretrained.end_ids(path), path)


def new(settings: Settings, texts: sources.DataSources, *, spread: bool) -> Model:
    """A Llama of the settings' sizes, with a tokenizer made of the text."""
    tokenizer = new_tokenizer(texts, settings.vocab_size)
    ids = special_ids(tokenizer)
    config = llama.Config.from_hf(hf_config(settings, tokenizer.get_vocab_size(), ids))
    params = P.abstract(config, dtype=torch.float32) if spread else P.init(config, settings.seed, dtype=torch.float32)
    return Model(config, params, spec_of(config), tokenizer, (ids["eos_token_id"],))


def whole(source: Path, *, spread: bool) -> Model:
    """All weights of a checkpoint, in fp32; adapters, where it is a folder of them, merged into what they belong to."""
    tokenizer = pretrained.load_tokenizer(source)
    check_unchanged(source)
    left_out = optional(source)
    if spread:
        config = config_of(source, left_out)
        params = P.abstract(config, dtype=torch.float32)
    else:
        config, params = load_whole(source)
    return Model(config, params, spec_of(config), tokenizer, pretrained.end_ids(source), source, left_out)


def config_of(source: Path, left_out: tuple[str, ...]) -> Any:
    """That of a folder, without what is left out, after a look whether the weights are what it calls for."""
    with ExitStack() as stack:
        return check_folder(pretrained.weights_folder(source), stack, left_out).config


def load_whole(source: Path, *, plan: Tree | None = None) -> tuple[Any, Tree]:
    """(config, params) as a run trains them, of a `plan` those that it names, of each the part that is here."""
    how: Json = {"dtype": torch.float32, "copy": True, "drop": optional(source), "plan": plan}
    return pretrained.load_model(source, merge=True, **how)


def promised(source: Path, settings: Settings) -> Any:
    """The config of what --init names, of which the beginnings of its files alone are read."""
    pretrained.load_tokenizer(source)
    if settings.lora:
        check_whole(source)
    return config_of(source, optional(source))


def check_whole(source: Path) -> None:
    if pretrained.weights_folder(source) != source:
        raise UserError(f"--init {source} holds adapters; --lora needs the checkpoint of whole weights they are of")


def adapted(source: Path, settings: Settings, *, spread: bool) -> Model:
    """A checkpoint's weights and new adapters, which have values however the weights are spread."""
    tokenizer = pretrained.load_tokenizer(source)
    check_whole(source)
    check_unchanged(source)
    left_out = optional(source)
    if spread:
        config = config_of(source, left_out)
        params = with_adapters(config, without_values(config, settings), settings)
    else:
        config, params = load_adapted(source, settings)
    spec = P.lora.spec(config, params)
    weights = {path.name: digest(path) for path in sorted(source.glob("*.safetensors"))}
    return Model(config, params, spec, tokenizer, pretrained.end_ids(source), source, left_out, weights)


def load_adapted(source: Path, settings: Settings, *, plan: Tree | None = None) -> tuple[Any, Tree]:
    """(config, params) with new adapters: weights in the dtype of the computation, for they stay. plan: as above."""
    dtype = getattr(torch, str(settings.dtype))
    config, params = P.load_pretrained(source, dtype=dtype, copy=True, drop=optional(source), plan=plan)
    return config, with_adapters(config, params, settings)


def with_adapters(config: Any, params: Tree, settings: Settings) -> Tree:
    """`params` beside new adapters in fp32, by --lora; UserError where it names no weight that can have one."""
    wanted = lora_flag.parse(str(settings.lora))
    how: Json = {"rank": wanted.rank, "alpha": wanted.alpha, "targets": wanted.targets, "seed": settings.seed}
    try:
        params = P.lora.add(config, params, **how)
    except ValueError as error:
        raise UserError(f"--lora {settings.lora}: {error}") from error
    return P.lora.attach(params, map_local(torch.Tensor.float, P.lora.adapters(params)))


def without_values(config: Any, settings: Settings) -> Tree:
    """Weights that take no memory, for adapters to stand beside."""
    abstract = P.abstract(config, dtype=getattr(torch, str(settings.dtype)))
    return tree.map(lambda leaf: torch.empty((), dtype=leaf.dtype).expand(leaf.shape), abstract)


def kept(state: State, settings: Settings) -> State:
    """What of the state is saved: of adapters they alone, and their optimizer's state."""
    return State(state.step, trained(state.params, settings), state.opt_state)


def trained(params: Tree, settings: Settings) -> Tree:
    """What of parameters, or of their spec, a run keeps: of adapters they alone, which some stages may have none of."""
    return params if settings.lora is None else P.lora.adapters(params)


def restored(state: State, saved: State, settings: Settings) -> State:
    """The inverse of `kept`, given the state of a run that begins."""
    if settings.lora is None:
        return saved
    return State(saved.step, P.lora.attach(state.params, saved.params), saved.opt_state)


def write(path: Path, config: Any, params: Tree, base: str | None) -> None:
    """The run folder's checkpoint: whole weights, or adapters as PEFT reads them, of what is in the folder `base`."""
    if has_adapters(params):
        P.lora.save_adapters(path, config, params, base=base or "")
    else:
        P.save_pretrained(path, config, params)


def has_adapters(params: Tree) -> bool:
    return bool(tree.leaves(P.lora.adapters(params)))


def spec_of(config: Any) -> Tree:
    return fnmodels.family_of(config).spec(config)


def spec_for(config: Any, settings: Settings) -> Tree:
    """Of what a run with these settings has, adapters included."""
    if settings.lora is None:
        return spec_of(config)
    return P.lora.spec(config, with_adapters(config, without_values(config, settings), settings))


def optional(source: Path) -> tuple[str, ...]:
    """Parts of the checkpoint that the loss of a run does not reach: heads that predict further tokens."""
    config = P.load_config(pretrained.weights_folder(source))
    found: dict[str, str] = getattr(fnmodels.family_of(config), "OPTIONAL", {})
    return tuple(part for part, count in found.items() if getattr(config, count))


def check_unchanged(source: Path) -> None:
    """UserError where a manifest lies beside the model and a byte has changed since: it would train all the same."""
    if not (source / MANIFEST).exists():
        return
    try:
        P.verify(source)
    except P.CheckpointError as error:
        raise UserError(f"--init {source}: {str(error).rstrip('.')}; where that is meant, remove {MANIFEST}") from error


def new_tokenizer(texts: sources.DataSources, vocab_size: int) -> Tokenizer:
    """A tokenizer made of the train documents, from the cache where an equal corpus had one before."""
    for name in texts.token_sources:
        raise UserError(f"--data {name} holds token ids: name with --init the checkpoint whose tokenizer made them")
    for name in texts.chat_sources:
        raise UserError(f"--data {name} holds conversations: name with --init a checkpoint with a chat template")
    key = hashlib.sha256(f"{SPLIT_PATTERN} {texts.fingerprint} {vocab_size}".encode()).hexdigest()
    return cached(
        f"tokenizer-{key[:32]}.json",
        lambda path: path.write_text(
            train_tokenizer((d.text for d in texts.train), vocab_size).to_str(), encoding="utf-8"
        ),
        lambda path: Tokenizer.from_file(str(path)),
    )


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
