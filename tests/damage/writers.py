"""The table of everything that writes files: how a version of it is written, and what a reader finds of it."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import params as P
from fnmodels import files, llama, tree
from fnmodels.embedding import DenseLayer, Embedder
from fnmodels.errors import UserError
from fnmodels.ops.cpu import product_table
from params import lora
from params.checkpoint.gguf_folder import convert
from tests.support.cases import generic_params
from tests.support.gguf_files import tensors_of, write_gguf
from tests.support.gguf_models import MODELS
from train import checkpoint
from train.data.cache import cached
from train.job import metrics_log, run_folder

SMALL = llama.Config(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)
PARAMS = generic_params(SMALL)


@dataclass(frozen=True)
class Writer:
    """Something that writes into a folder.

    Attributes:
        name: of the case.
        write: writes version `number` into the folder.
        read: what a reader finds there, to be compared; raises what a user would see where there is nothing.
        recovers: whether `params.recover` finishes it after a kill.
        disposable: whether it may be lost, as what can be computed again.
        changes: whether it differs from a writer before it by what a version changes of the older one alone.
    """

    name: str
    write: Callable[[Path, int], object]
    read: Callable[[Path], Any]
    recovers: bool = False
    disposable: bool = False
    changes: bool = False

    def __str__(self) -> str:
        return self.name


def content(writer: Writer, folder: Path) -> Any:
    """The content of the folder, None where it cannot be loaded."""
    try:
        return writer.read(folder)
    except (P.CheckpointError, UserError, OSError):
        return None


def _bytes(values: Any) -> dict[str, Any]:
    flat = tree.flatten(values)
    return {name: leaf.contiguous().view(torch.uint8).numpy().tobytes() for name, leaf in flat.items()}


def params_of(number: int) -> Any:
    return tree.map(lambda leaf: leaf + number, PARAMS)


def model(
    config: Callable[[int], Any] = lambda number: SMALL, shards: Callable[[int], str] = lambda number: "5GB"
) -> dict[str, Any]:
    def write(folder: Path, number: int) -> None:
        P.save_pretrained(folder, config(number), params_of(number), max_shard_size=shards(number))

    def read(folder: Path) -> Any:
        found, values = P.load_pretrained(folder)
        return found, _bytes(values)

    return {"write": write, "read": read, "recovers": True}


def _other_config(number: int) -> Any:
    return replace(SMALL, rms_norm_eps=number * 1e-6)


def adapters(ranks: Callable[[int], int] = lambda number: 2) -> dict[str, Any]:
    def write(folder: Path, number: int) -> None:
        made = lora.add(SMALL, PARAMS, rank=ranks(number), targets=("q_proj", "o_proj"), seed=number)
        lora.save_adapters(folder, SMALL, made)

    def read(folder: Path) -> Any:
        return _bytes(lora.adapters(lora.load_adapters(folder, SMALL, PARAMS)))

    return {"write": write, "read": read, "recovers": True}


def embedder(layers: Callable[[int], int] = lambda number: 1) -> dict[str, Any]:
    """layers: how many dense ones version `number` has; their number and widths are in the names of its folders."""

    def write(folder: Path, number: int) -> None:
        sizes = [(16, 8), (8, 4), (4, 2)][: layers(number)]
        made = Embedder(("mean",), tuple(DenseLayer(*size, False, "Tanh") for size in sizes), True, 100 * number)
        dense = [{"weight": torch.full(size[::-1], float(number))} for size in sizes]
        P.save_embedder(folder, SMALL, {**params_of(number), "dense": dense}, made)

    def read(folder: Path) -> Any:
        config, values, found = P.load_embedder(folder)
        return config, _bytes(values), found

    return {"write": write, "read": read, "recovers": True}


def _gguf(path: Path, number: int) -> Path:
    """A GGUF file with a token that is named by `number`."""

    def tokenizer(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(["a", "b", "ab", f"{number}"])
        writer.add_token_merges(["a b"])

    values = MODELS["llama"]
    tensors = {name: tensor + number for name, tensor in tensors_of(values).items()}
    return path if path.exists() else write_gguf(path, "llama", values, tensors, tokenizer)


def _convert(folder: Path, number: int) -> None:
    convert(_gguf(folder.parent / f"{number}.gguf", number), folder)


def _read_converted(folder: Path) -> Any:
    config, values = P.load_pretrained(folder)
    return config, _bytes(values), (folder / "tokenizer.json").read_text()


def steps(keep: int | None) -> dict[str, Any]:
    def write(folder: Path, number: int) -> None:
        checkpoint.save(folder, number, {"w": torch.full((300,), float(number))}, {"seen": number}, keep=keep)

    def read(folder: Path) -> Any:
        found = checkpoint.latest(folder)
        if found is None:
            raise FileNotFoundError
        return found.step, found.progress, _bytes(checkpoint.load(found, {"w": torch.zeros(300)}))

    return {"write": write, "read": read}


def _rows(folder: Path, number: int) -> None:
    files.write_text(
        folder / "metrics.jsonl", "".join(metrics_log.json_line({"step": i}) for i in range(1, number + 1))
    )


def _read_rows(folder: Path) -> Any:
    return len(metrics_log.read_rows(folder / "metrics.jsonl"))


def _write_json(folder: Path, number: int) -> None:
    run_folder.write_json(folder / run_folder.RUN, {"number": number})


def _read_json(folder: Path) -> Any:
    found = run_folder.read_json(folder / run_folder.RUN)
    if found is None:
        raise FileNotFoundError
    return found


@contextlib.contextmanager
def cache_in(folder: Path) -> Iterator[None]:
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("XDG_CACHE_HOME") if before is None else os.environ.update(XDG_CACHE_HOME=before)


def _write_cache(folder: Path, number: int) -> None:
    with cache_in(folder):

        def read(path: Path) -> int:
            if (found := int(path.read_text())) != number:
                raise ValueError("damaged: it is written again")
            return found

        cached("it.txt", lambda path: path.write_text(str(number)), read)


def _read_cache(folder: Path) -> Any:
    return (folder / "fnmodels" / "it.txt").read_text()


def _table(number: int) -> product_table.Table:
    return product_table.Table(dict.fromkeys(product_table.rate_names(), float(number)), True)


def _write_table(folder: Path, number: int) -> None:
    with cache_in(folder):
        product_table.write(product_table.table_file({"it": "this"}), {"it": "this"}, _table(number))


def _read_table(folder: Path) -> Any:
    with cache_in(folder):
        found = product_table.read(product_table.table_file({"it": "this"}))
    if found is None:
        raise FileNotFoundError
    return found


WRITERS = (
    Writer("a model", **model()),
    Writer("a model of another config", **model(_other_config), changes=True),
    Writer("a model in shards", **model(shards=lambda number: "8KB")),
    Writer("a model that becomes shards", **model(shards=lambda number: "8KB" if number == 2 else "5GB"), changes=True),
    Writer("shards that become a model", **model(shards=lambda number: "8KB" if number == 1 else "5GB"), changes=True),
    Writer("adapters", **adapters()),
    Writer("adapters of another rank", **adapters(lambda number: 1 + number), changes=True),
    Writer("an embedder", **embedder()),
    Writer("an embedder of other layers", **embedder(lambda number: 1 + number % 2), changes=True),
    Writer("a converted GGUF file", _convert, _read_converted, recovers=True),
    Writer("a step", **steps(None)),
    Writer("a step that removes older ones", **steps(1), changes=True),
    Writer("rows of metrics", _rows, _read_rows),
    Writer("JSON of a run", _write_json, _read_json),
    Writer("a cached file", _write_cache, _read_cache, disposable=True),
    Writer("rates of products", _write_table, _read_table),
)
