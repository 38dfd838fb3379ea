"""Too little memory while something is loaded: a MemoryError that names the folder, a sentence of every program."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import params as P
import train
from fnmodels import llama, tree
from fnmodels.embedding import DenseLayer, Embedder
from params.inspect import main as inspect_main
from train.checkpoint import saved_steps, sharded

CONFIG = llama.Config.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
    }
)


def model(folder: Path) -> Callable[[], Any]:
    P.save_pretrained(folder, CONFIG, P.init(CONFIG, 0))
    return lambda: P.load_pretrained(folder)


def adapters(folder: Path) -> Callable[[], Any]:
    params = P.init(CONFIG, 0)
    P.lora.save_adapters(folder, CONFIG, P.lora.add(CONFIG, params, rank=2, targets=("q_proj",), seed=0))
    return lambda: P.lora.load_adapters(folder, CONFIG, params)


def embedder(folder: Path) -> Callable[[], Any]:
    form = Embedder(("mean",), (DenseLayer(16, 8, True, "Tanh"),), True, None, False)
    dense = [{"weight": torch.ones(8, 16), "bias": torch.ones(8)}]
    P.save_embedder(folder, CONFIG, {**P.init(CONFIG, 0), "dense": dense}, form)
    return lambda: P.load_embedder(folder)


def step(folder: Path) -> Callable[[], Any]:
    state = {"a": torch.ones(3)}
    train.checkpoint.save(folder, 1, state)
    found = train.checkpoint.latest(folder)
    assert found
    return lambda: saved_steps.load(found, state)


def step_of_shards(folder: Path) -> Callable[[], Any]:
    state = {"a": torch.ones(3)}
    sharded.save(folder, 1, state)
    found = sharded.latest(folder)
    assert found
    return lambda: sharded.load(found, state)


# {what is loaded: (how, what asks for the memory there)}
LOADED = {
    "a model": (model, "params.checkpoint.load.read_leaf"),
    "a header": (model, "params.checkpoint.load.check_folder"),
    "adapters": (adapters, "params.lora.peft_load.map_file"),
    "an embedder's layer": (embedder, "params.checkpoint.embedder.read_tensor"),
    "an embedder's model": (embedder, "params.checkpoint.load.read_leaf"),
    "a step": (step, "train.checkpoint.saved_steps.read_tensor"),
    "a step of shards": (step_of_shards, "torch.empty_like"),
}


def of_torch() -> None:
    torch.empty(2**55)  # more than a process has addresses for


def of_python() -> None:
    raise MemoryError


def of_the_system() -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def of_cuda() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("ask", [of_torch, of_python, of_the_system, of_cuda])
@pytest.mark.parametrize("what", LOADED)
def test_load_without_enough_memory_names_the_folder(
    what: str, ask: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, place = LOADED[what]
    load = make(tmp_path / "folder")
    tree.leaves(load())  # with enough memory it loads
    monkeypatch.setattr(place, lambda *_, **__: ask())
    with pytest.raises(MemoryError, match=f"{tmp_path / 'folder'}.*: there is not enough memory to load this"):
        load()


def test_program_without_enough_memory_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model(tmp_path)
    monkeypatch.setattr("params.checkpoint.load.read_leaf", lambda *_: of_torch())
    assert inspect_main([str(tmp_path), "--verify"]) == 2
    assert capsys.readouterr().err.endswith(f": {tmp_path}: there is not enough memory to load this.\n")


def test_load_of_another_error_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    load = model(tmp_path)
    monkeypatch.setattr("params.checkpoint.load.read_leaf", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        load()
