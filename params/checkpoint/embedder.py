"""Folders of sentence-transformers: a model beside modules.json, which lists pooling, dense layers, normalization."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from fnmodels.embedding import ACTIVATIONS, DenseLayer, Embedder, LoadedEmbedder
from fnmodels.errors import ConfigError, MismatchError, UnsupportedError, memory_for
from fnmodels.files import write_new
from fnmodels.models.common.config_json import Fields
from fnmodels.models.common.family import DecoderConfig
from fnmodels.tree import Tree
from params.io.files import inner_folder, plain_file, read_json
from params.io.safetensors_file import (
    LazyTensor,
    cast_buffer,
    check_floating,
    open_tensors,
    read_tensor,
    write_tensors,
)

from .config import CONFIG
from .embedder_tokenizer import SETTINGS, finish, prepared_tokenizer, text_limits
from .hub import local_folder
from .load import load_pretrained
from .load_gguf import is_gguf
from .save import write_model

# {our name of a pooling: theirs}, in the order in which older folders concatenate them
_POOLINGS = {
    "first": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len": "mean_sqrt_len_tokens",
    "weighted_mean": "weightedmean",
    "last": "lasttoken",
}
_OLDER = {
    "first": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len": "pooling_mode_mean_sqrt_len_tokens",
    "weighted_mean": "pooling_mode_weightedmean_tokens",
    "last": "pooling_mode_lasttoken",
}
_SENTENCE = "sentence_embedding"
_MODULES = {
    "Transformer": "sentence_transformers.models.Transformer",
    "Pooling": "sentence_transformers.models.Pooling",
    "Dense": "sentence_transformers.models.Dense",
    "Normalize": "sentence_transformers.models.Normalize",
    "SpladePooling": "sentence_transformers.sparse_encoder.models.SpladePooling",
}
_FILL_MASK = "fill-mask"  # the task of a model whose logits are pooled
_PROMPTS = "config_sentence_transformers.json"
MODULES = "modules.json"
_WRITTEN = (MODULES, _PROMPTS, "1_Pooling", *SETTINGS)  # signs of a folder of the package
_ACTIVATION = "torch.nn.modules.activation."


def load_embedder(path: str | os.PathLike[str], *, revision: str | None = None, **options: Any) -> LoadedEmbedder:
    """Loads a folder that sentence-transformers wrote, for `fnmodels.embed_texts`.

    A folder of a model alone, without any file of that package, is pooled by the mean, as that package does.

    The model is read without its head, or of a sparse encoder (SPLADE) with its masked-LM head; the parameters of dense
    layers are params["dense"].

    `embedder.tokenizer` is that of tokenizer.json, made for packing: it does not pad, cuts at the length of the
    folder's settings, and lowercases if these say so. It is None without the file or without the optional package
    tokenizers.

    Args:
        path: The folder, or "org/name" as in `load_pretrained`.
        revision: Of a model of the Hub, its branch, tag or commit.
        **options: Those of `load_pretrained` but plan.

    Returns:
        A named tuple of config, params and embedder.

    Raises:
        UnsupportedError: A GGUF file; modules other than Transformer, Pooling, Dense and Normalize, and SpladePooling
            alone behind a Transformer.
        CheckpointError: As in `load_pretrained`.
    """
    folder = local_folder(path, revision)
    if is_gguf(folder):
        raise UnsupportedError(
            f"{folder} is a GGUF file: fnmodels-convert {folder} FOLDER makes a folder that load_embedder reads."
        )
    modules = _modules(folder)
    if modules[1:2] and modules[1][0] == "SpladePooling":
        return _load_sparse(folder, modules, options)
    config, params = load_pretrained(modules[0][1], head="none", **options)
    pooling, include_prompt = _pooling(modules[1][1]) if modules[1:] else (("mean",), True)
    rest = modules[2:]
    normalize = bool(rest) and rest[-1][0] == "Normalize"
    dense = rest[: len(rest) - normalize]
    if other := [name for name, _ in dense if name != "Dense"]:
        raise UnsupportedError(
            f"{folder / 'modules.json'}: {other[0]} stands among the dense layers; supported are Transformer, Pooling, "
            "any number of Dense, and Normalize at the end."
        )
    layers = [_dense(where) for _, where in dense]
    if layers:
        like = params["embed_tokens"]
        params = {
            **params,
            "dense": [{name: value.to(like) for name, value in weights.items()} for _, weights in layers],
        }
    longest, lower_case = text_limits(modules[0][1], config)
    tokenizer, pad = prepared_tokenizer(modules[0][1], longest, lower_case=lower_case)
    prompts, default = _prompts(folder)
    embedder = Embedder(
        pooling,
        tuple(layer for layer, _ in layers),
        normalize,
        longest,
        lower_case,
        include_prompt,
        prompts,
        default,
        pad,
        tokenizer,
    )
    return LoadedEmbedder(config, params, embedder)


def _load_sparse(folder: Path, modules: list[tuple[str, Path]], options: dict[str, Any]) -> LoadedEmbedder:
    """`load_embedder` of a sparse encoder."""
    (_, where), (_, pooling), *rest = modules
    if rest:
        raise UnsupportedError(f"{folder / 'modules.json'}: {rest[0][0]} stands behind SpladePooling, the last module.")
    config, params = load_pretrained(where, **options)
    if config.head != "masked_lm":
        raise UnsupportedError(f"{where}: a sparse encoder pools the logits of a masked-LM head, not {config.head!r}.")
    fields = _fields(pooling)
    how = fields.choice("pooling_strategy", ("max", "sum"), "max")
    sparse = fields.choice("activation_function", ("relu", "log1p_relu"), "relu")
    for size in ("embedding_dimension", "word_embedding_dimension"):
        fields.expect(size, config.vocab_size)
    finish(fields, ("chunk_size",))
    longest, lower_case = text_limits(where, config, _FILL_MASK)
    tokenizer, pad = prepared_tokenizer(where, longest, lower_case=lower_case)
    prompts, default = _prompts(folder)
    described: dict[str, Any] = {
        "max_length": longest,
        "lower_case": lower_case,
        "prompts": prompts,
        "default_prompt": default,
    }
    described |= {"pooling": (how,), "normalize": False, "sparse": sparse, "pad_token_id": pad}
    embedder = Embedder(**described, tokenizer=tokenizer)
    return LoadedEmbedder(config, params, embedder)


def save_embedder(path: str | os.PathLike[str], config: DecoderConfig, params: Tree, embedder: Embedder) -> None:
    """Writes a folder that sentence-transformers reads: the model, modules.json and a folder for each module.

    The tokenizer's files are not touched: copy them from the folder that the model was loaded from. All files are of
    one save, as in `save_pretrained`: a kill leaves the older embedder, the new one, or a folder that `recover` or the
    next save finishes.

    Args:
        path: The folder, made if needed.
        config: The model's config.
        params: The parameters, with those of dense layers in params["dense"].
        embedder: How hidden states become vectors.

    Raises:
        MismatchError: The params are not those of `embedder.spec(config)`.
    """
    folder, dense = Path(path), params.get("dense", [])
    if len(dense) != len(embedder.dense):
        raise MismatchError(f"params has {len(dense)} dense layers, and the embedder {len(embedder.dense)}.")
    model = {name: value for name, value in params.items() if name != "dense"}
    tensors = [_dense_tensors(layer, weights) for layer, weights in zip(embedder.dense, dense, strict=True)]
    write_model(folder, config, model, beside=lambda temporary: write_modules(temporary, config, embedder, tensors))


def write_modules(
    folder: Path, config: DecoderConfig, embedder: Embedder, dense: Sequence[Mapping[str, LazyTensor]]
) -> None:
    """Writes what a folder of sentence-transformers has beside the model's files.

    dense: the tensors of each dense layer.
    """
    last = "SpladePooling" if embedder.sparse else "Pooling"
    names = ["Transformer", last, *["Dense"] * len(dense), *["Normalize"] * embedder.normalize]
    places = ["", *(f"{index}_{name}" for index, name in enumerate(names) if index)]
    listed = zip(names, places, strict=True)
    rows = [{"idx": i, "name": str(i), "path": at, "type": _MODULES[name]} for i, (name, at) in enumerate(listed)]
    for place in places[1:]:
        (folder / place).mkdir()
    _write(folder / places[1] / "config.json", _pooling_of(embedder, config))
    for place, layer, weights in zip(places[2:], embedder.dense, dense, strict=False):
        values = {"in_features": layer.in_features, "out_features": layer.out_features, "bias": layer.bias}
        where = "torch.nn.modules.linear." if layer.activation == "Identity" else _ACTIVATION
        _write(folder / place / "config.json", values | {"activation_function": where + layer.activation})
        write_tensors(folder / place / "model.safetensors", weights)
    limits: dict[str, Any] = {"max_seq_length": embedder.max_length, "do_lower_case": embedder.lower_case}
    limits |= {"transformer_task": _FILL_MASK} if embedder.sparse else {}
    _write(folder / SETTINGS[0], limits)
    prompts = {"prompts": dict(embedder.prompts), "default_prompt_name": embedder.default_prompt}
    _write(folder / _PROMPTS, prompts)
    _write(folder / MODULES, rows)


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """(class, folder) of each module, in order: the model's alone where the package has written nothing.

    UnsafePathError: a folder is outside, or is a link.
    """
    file = folder / "modules.json"
    if os.path.lexists(folder / CONFIG) and not any(os.path.lexists(folder / name) for name in _WRITTEN):
        return [("Transformer", folder)]
    listed = read_json(file)
    known = isinstance(listed, list) and all(
        isinstance(module, dict) and isinstance(module.get("type"), str) and isinstance(module.get("path"), str)
        for module in listed
    )
    if not known:
        raise ConfigError(f"{file} must be a list of objects with 'type' and 'path'.")
    if foreign := [module["type"] for module in listed if not module["type"].startswith("sentence_transformers.")]:
        raise UnsupportedError(f"{file}: the module {foreign[0]!r} is none of sentence-transformers' own classes.")
    modules = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in listed]
    # Dropout acts in training alone
    modules = [module for at, module in enumerate(modules) if at < 2 or module[0] != "Dropout"]
    first = [name for name, _ in modules[:2]]
    if first not in (["Transformer", "Pooling"], ["Transformer", "SpladePooling"], ["MLMTransformer", "SpladePooling"]):
        raise UnsupportedError(
            f"{file} begins with {', '.join(first)}; supported are Transformer and Pooling, or SpladePooling."
        )
    return [(name, inner_folder(folder, at)) for name, at in modules]


def _fields(folder: Path, name: str = "config.json") -> Fields:
    file = folder / name
    return Fields(read_json(file), str(file))


def _pooling(folder: Path) -> tuple[tuple[str, ...], bool]:
    """(our names of the poolings, whether they read the prompt)."""
    fields = _fields(folder)
    include_prompt = fields.boolean("include_prompt", True)
    listed = fields.take("pooling_mode", None)
    older = tuple(ours for ours, name in _OLDER.items() if fields.boolean(name, False))
    names = {theirs: ours for ours, theirs in _POOLINGS.items()}
    for pooling in [listed] if isinstance(listed, str) else listed or ():
        if pooling not in names:
            raise UnsupportedError(f"{fields.where}: the pooling {pooling!r} is unknown; known are {', '.join(names)}.")
    for size in ("embedding_dimension", "word_embedding_dimension"):
        fields.take(size, None)  # the model's width
    finish(fields)
    if listed is None:
        return older or ("mean",), include_prompt
    poolings = tuple(names[pooling] for pooling in ([listed] if isinstance(listed, str) else listed))
    if older and set(older) != set(poolings):
        said = ", ".join(_OLDER[ours] for ours in older)
        raise ConfigError(f"{fields.where}: 'pooling_mode' is {listed!r}, and true are {said}, which disagrees.")
    return poolings, include_prompt


def _pooling_of(embedder: Embedder, config: DecoderConfig) -> dict[str, Any]:
    """The config.json of the pooling module."""
    if embedder.sparse:
        values = {"pooling_strategy": embedder.pooling[0], "activation_function": embedder.sparse}
        return {**values, "embedding_dimension": config.vocab_size}
    if "sum" in embedder.pooling:
        raise ConfigError("sentence-transformers has no pooling by sum, but that of sparse encoders.")
    return _pooling_values(embedder.pooling, config.hidden_size) | {"include_prompt": embedder.include_prompt}


def _pooling_values(pooling: tuple[str, ...], width: int) -> dict[str, Any]:
    """The form that older releases read too, unless it cannot say the order of what is concatenated."""
    if pooling == tuple(name for name in _OLDER if name in pooling):
        return {"word_embedding_dimension": width} | {name: ours in pooling for ours, name in _OLDER.items()}
    return {"embedding_dimension": width, "pooling_mode": [_POOLINGS[name] for name in pooling]}


def _dense(folder: Path) -> tuple[DenseLayer, dict[str, Tensor]]:
    """The layer and its parameters."""
    fields = _fields(folder)
    name = fields.choice("activation_function", _activation_names(), _ACTIVATION + "Tanh").rpartition(".")[2]
    for key in ("module_input_name", "module_output_name"):
        fields.expect(key, _SENTENCE)
    fields.expect("use_residual", False)
    sizes = fields.integer("in_features"), fields.integer("out_features")
    layer = DenseLayer(*sizes, fields.boolean("bias", True), name)
    finish(fields)
    if not os.path.lexists(folder / "model.safetensors"):
        raise UnsupportedError(f"{folder} has no model.safetensors; save the model again with sentence-transformers.")
    expected = {"linear.weight": sizes[::-1]} | ({"linear.bias": sizes[1:]} if layer.bias else {})
    with memory_for(folder), ExitStack() as stack:
        file = open_tensors(plain_file(folder, "model.safetensors"), stack)
        shapes = {name: tuple(entry.shape) for name, entry in file.entries.items()}
        if shapes != expected:
            raise MismatchError(f"{file.path} has {shapes}, and its config.json says {expected}.")
        check_floating(file)
        buffer = cast_buffer()
        values = {name: read_tensor(file, entry, None, buffer) for name, entry in file.entries.items()}
    return layer, {name.removeprefix("linear."): values[name] for name in expected}


def _activation_names() -> tuple[str, ...]:
    inner = tuple(_ACTIVATION + name for name in ACTIVATIONS if name != "Identity")
    return (*inner, "torch.nn.modules.linear.Identity")


def _prompts(folder: Path) -> tuple[tuple[tuple[str, str], ...], str | None]:
    """((name, text) of each prompt, the name of the default one)."""
    if not os.path.lexists(folder / _PROMPTS):
        return (), None
    fields = _fields(folder, _PROMPTS)
    prompts, default = fields.take("prompts", {}), fields.take("default_prompt_name", None)
    fields.expect("truncate_dim", None)
    finish(fields, ("similarity_fn_name", "model_type"))
    texts = isinstance(prompts, dict) and all(isinstance(text, str | None) for text in prompts.values())
    if not texts or not (default is None or default in prompts):
        raise ConfigError(
            f"{fields.where}: 'prompts' must be an object of texts, and 'default_prompt_name' one of its names or null."
        )
    return tuple((name, text or "") for name, text in prompts.items()), default


def _write(file: Path, values: Any) -> None:
    write_new(file, json.dumps(values, indent=2) + "\n")


def _dense_tensors(layer: DenseLayer, weights: Tree) -> dict[str, LazyTensor]:
    shapes: dict[str, tuple[int, ...]] = {"weight": (layer.out_features, layer.in_features)}
    shapes |= {"bias": (layer.out_features,)} if layer.bias else {}
    weight_shapes = {name: tuple(value.shape) for name, value in weights.items()}
    if weight_shapes != shapes:
        raise MismatchError(f"A dense layer has {weight_shapes}, and the embedder says {shapes}.")
    return {
        f"linear.{name}": LazyTensor(value.dtype, tuple(value.shape), value.detach().cpu().contiguous)
        for name, value in weights.items()
    }
