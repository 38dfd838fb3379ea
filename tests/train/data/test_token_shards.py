"""Tests of token shards: ids read as written, and every kind of damage reported with the file's name."""

import io
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fnmodels.errors import UserError
from train.data import token_shards
from train.data.rows import Tokens, all_rows, pack_stream


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def _documents(tokens: Tokens) -> list[list[int]]:
    return [tokens.read(n, 0, int(length)).tolist() for n, length in enumerate(tokens.lengths)]


def _load(path: Path, vocab_size: int = 100, end: int | None = 0) -> Tokens:
    return token_shards.open_shards(path, vocab_size=vocab_size, end=end).tokens


@pytest.mark.parametrize("dtype", token_shards.DTYPES)
def test_documents_end_with_the_end_of_text_or_the_shard(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "b.npy", np.array([7, 8], dtype))
    np.save(tmp_path / "a.npy", np.array([1, 2, 0, 0, 3, 0], dtype))
    assert _documents(_load(tmp_path)) == [[1, 2, 0], [0], [3, 0], [7, 8]]
    assert _documents(_load(tmp_path, end=None)) == [[1, 2, 0, 0, 3, 0], [7, 8]]
    assert _documents(_load(tmp_path / "b.npy")) == [[7, 8]]
    assert all(isinstance(array, np.memmap) for array in _load(tmp_path).arrays)


def test_lengths_beside_a_shard_say_where_documents_end(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 0, 2, 3], np.uint16))
    np.save(tmp_path / "a.lengths.npy", np.array([3, 0, 1]))
    np.save(tmp_path / "b.npy", np.array([4, 0, 5], np.uint16))
    assert _documents(_load(tmp_path)) == [[1, 0, 2], [], [3], [4, 0], [5]]
    assert all_rows(pack_stream(_load(tmp_path), 4))["labels"].tolist() == [[0, 2, -100, -100], [0, -100, -100, -100]]


def test_ids_are_looked_through_once_and_again_when_the_file_has_changed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(token_shards, "CHUNK_IDS", 3)  # several looks at one file
    file, ids = tmp_path / "a.npy", np.arange(1, 11, dtype=np.uint16)
    np.save(file, ids)
    first = token_shards.open_shards(file, vocab_size=100, end=4)
    assert _documents(first.tokens) == [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10]]
    with monkeypatch.context() as patch:
        patch.setattr(token_shards, "_scan_documents", lambda *_: pytest.fail("looked through again"))
        assert token_shards.open_shards(file, vocab_size=100, end=4).fingerprint == first.fingerprint
    ids[9] = 11
    np.save(file, ids)
    other = token_shards.open_shards(file, vocab_size=100, end=4)
    assert other.tokens.read(1, 5, 6) == 11 and other.fingerprint != first.fingerprint
    assert token_shards.open_shards(file, vocab_size=100, end=5).fingerprint != other.fingerprint
    with pytest.raises(UserError, match=r"id number 9 is 11, .* has 11 entries"):  # of another model
        token_shards.open_shards(file, vocab_size=11, end=4)
    for lengths in ([3, 7], [4, 6], [10]):
        np.save(tmp_path / "a.lengths.npy", np.array(lengths))
        assert [len(ids) for ids in _documents(token_shards.open_shards(file, vocab_size=100, end=4).tokens)] == lengths
    (tmp_path / "a.lengths.npy").unlink()
    assert token_shards.open_shards(file, vocab_size=100, end=4).fingerprint == other.fingerprint


def test_a_part_is_held_out(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.tile(np.array([1, 2, 3, 0], np.uint16), 200))
    train, heldout = token_shards.split_heldout(_load(tmp_path))
    assert (len(train.lengths), len(heldout.lengths)) == (190, 10)
    assert sorted([*train.begins, *heldout.begins]) == list(range(0, 800, 4))
    few_train, few_heldout = token_shards.split_heldout(_load(tmp_path, end=None))
    assert few_train.lengths.tolist() == [720] and few_heldout.lengths.tolist() == [80]
    assert few_heldout.read(0, 0, 4).tolist() == [1, 2, 3, 0]


def test_not_more_is_held_out_than_can_be_evaluated(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(token_shards, "MAX_HELDOUT_TOKENS", 9)
    np.save(tmp_path / "a.npy", np.tile(np.array([1, 2, 3, 0], np.uint16), 200))
    assert len(token_shards.split_heldout(_load(tmp_path))[1].lengths) == 2


def _save(name: str, array: np.ndarray) -> Callable[[Path], object]:
    return lambda path: np.save(path / name, array)


def _cut(path: Path) -> None:
    np.save(path / "a.npy", np.arange(50, dtype=np.uint16))
    (path / "a.npy").write_bytes((path / "a.npy").read_bytes()[:-10])


def _longer(path: Path) -> None:
    np.save(path / "a.npy", np.arange(50, dtype=np.uint16))
    (path / "a.npy").write_bytes((path / "a.npy").read_bytes() + b"\0")


def _pickled(path: Path) -> None:
    np.save(path / "a.npy", np.array([{"a": 1}], object), allow_pickle=True)


def _lengths(*lengths: float) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        np.save(path / "a.npy", np.arange(5, dtype=np.uint16))
        np.save(path / "a.lengths.npy", np.array(lengths))

    return make


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (_cut, r"a\.npy is cut short: 50 elements of uint16 make it 228 bytes long, and it has 218"),
    "longer": (_longer, r"a\.npy has more bytes than its header says"),
    "beginning": (lambda path: (path / "a.npy").write_bytes(b"\x93NUMPY"), r"a\.npy is not an \.npy file, or its"),
    "empty file": (lambda path: (path / "a.npy").write_bytes(b""), r"a\.npy is not an \.npy file, or its"),
    "float": (
        _save("a.npy", np.zeros(3)),
        r"a\.npy holds float64 of shape \(3,\): a shard is a 1-D array of uint8, uint16",
    ),
    "wide": (_save("a.npy", np.zeros(3, np.uint64)), r"a\.npy holds uint64"),
    "big endian": (_save("a.npy", np.zeros(3, ">u2")), r"a\.npy holds >u2"),
    "pickled": (_pickled, r"a\.npy holds object"),
    "table": (_save("a.npy", np.zeros((3, 2), np.uint16)), r"a\.npy holds uint16 of shape \(3, 2\)"),
    "no ids": (_save("a.npy", np.zeros(0, np.uint16)), r"a\.npy holds no ids"),
    "beyond": (_save("a.npy", np.array([1, 99, 100], np.uint16)), r"a\.npy: id number 2 is 100, .* has 100 entries"),
    "negative": (_save("a.npy", np.array([1, -1], np.int32)), r"a\.npy: id number 1 is -1"),
    "lengths alone": (_save("a.lengths.npy", np.ones(1)), r"a\.lengths\.npy has no shard: there is no a\.npy"),
    "lengths wrong": (_lengths(3, 1), r"a\.lengths\.npy: the lengths add up to 4, and the shard has 5 ids"),
    "lengths negative": (_lengths(6, -1), r"a\.lengths\.npy: length number 0 is 6, and the shard has 5 ids"),
    "lengths whose sum wraps around": (
        _lengths(np.uint64(2**64 - 500), np.uint64(505)),
        r"a\.lengths\.npy: length number 0 is 18446744073709551116",
    ),
    "lengths broken": (_lengths(2.5, 2.5), r"a\.lengths\.npy holds float64"),
    "nothing": (lambda path: None, "there is no shard"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named(tmp_path: Path, name: str) -> None:
    make, message = BROKEN[name]
    make(tmp_path)
    with pytest.raises(UserError, match=message):
        _load(tmp_path)


@settings(max_examples=300)
@given(st.integers(0, 130), st.binary(min_size=1, max_size=4))
def test_a_damaged_beginning_is_a_sentence(place: int, noise: bytes) -> None:
    """A UserError, or the same ids where the damage changes none."""
    with io.BytesIO() as made:
        np.save(made, np.arange(50, dtype=np.uint16))
        good = made.getvalue()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "a.npy")
        file.write_bytes((good[:place] + noise + good[place + len(noise) :])[: len(good)])
        with suppress(UserError):
            found = token_shards._memmap(file)
            assert found.shape == (50,) and found.dtype.name in token_shards.DTYPES


def test_shards_are_known_by_their_names(tmp_path: Path) -> None:
    assert not token_shards.is_shards(tmp_path) and not token_shards.is_shards(tmp_path / "a.txt")
    np.save(tmp_path / "a.npy", np.zeros(3, np.uint16))
    (tmp_path / "meta.json").write_text("{}")
    assert token_shards.is_shards(tmp_path) and token_shards.is_shards(tmp_path / "a.npy")
    (tmp_path / "run").mkdir()
    assert token_shards.is_shards(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    assert not token_shards.is_shards(tmp_path)
