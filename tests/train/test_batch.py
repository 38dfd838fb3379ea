"""The batch of a loss: its documented keys, and what `pack` makes of documents."""

import ast
from pathlib import Path

import pytest
import torch

import fnmodels
import train
from train.batch import microbatches

LOSSES = Path(train.__file__).parent / "losses"


def read_keys(source: str) -> set[str]:
    """The constant keys with which a module reads its `batch`, or which it says that one needs."""
    keys: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        found: list[ast.expr] = []
        if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "batch":
            found = [node.slice]
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check_entries":
            found = node.args[1:]
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in (
            "_TEXT",
            "_IMAGE",
            "_OWN",
            "_TARGET",
        ):
            found = list(getattr(node.value, "elts", []))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get":
            found = node.args[:1] if getattr(getattr(node.func, "value", None), "id", "") == "batch" else []
        keys |= {one.value for one in found if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return keys


def test_every_key_that_a_loss_reads_is_documented() -> None:
    read = {key for file in LOSSES.glob("*.py") for key in read_keys(file.read_text())}
    assert {"tokens", "labels", "decoder_tokens", "latents", "roles"} <= read
    assert read <= train.Batch.__annotations__.keys()


def test_the_batch_of_packed_rows_has_weights_if_there_are_any() -> None:
    documents = [torch.arange(5), torch.arange(3)]
    packed = fnmodels.pack(documents, 8)
    assert list(packed.batch()) == ["tokens", "positions", "segment_ids", "labels"]
    assert packed.batch()["labels"] is packed.labels
    weighted = fnmodels.pack(documents, 8, weights=[torch.ones(5), torch.zeros(3)])
    assert weighted.batch()["weights"] is weighted.weights


def test_one_seed_of_rows_that_are_split_is_refused() -> None:
    tokens = torch.zeros(4, 3, dtype=torch.int64)
    batch = {"tokens": tokens, "rng": torch.tensor(3)}
    for split, options in (([batch], {}), ([{"tokens": tokens}, batch], {}), (batch, {"accumulate": 2})):
        with pytest.raises(ValueError, match=r"rng is one seed in .*: make keys of the full batch .*noise_keys\(seed"):
            microbatches(split, **options)
    assert microbatches(batch) == [batch]
    seeds, keys = {**batch, "rng": torch.arange(4)}, {**batch, "rng": tokens}
    assert microbatches(seeds, 2)[1]["rng"].tolist() == [2, 3]
    assert [part["rng"].shape for part in microbatches([keys, keys])] == [(4, 3)] * 2
    with pytest.raises(ValueError, match=r"batch's 'rng' is 0-d, and rows take tensors \[B, \.\.\.\]"):
        fnmodels.rows(batch)
