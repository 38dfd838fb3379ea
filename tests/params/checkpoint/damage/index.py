"""Damaged shard indexes: the files and tensors that they name, and shards that disagree with them."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import params as P
from tests.params.checkpoint.damage.ways import (
    FILE,
    INDEX,
    NAME,
    SPECIAL,
    Damage,
    Do,
    deleted,
    in_bytes,
    in_json,
    in_turn,
    instead,
    link,
    linked_out,
    nothing,
    raw,
    shard,
    sparse,
)


def cases() -> Iterator[Damage]:
    """Every case of this group."""
    for what, name in _OUTSIDE.items():
        words = ("is not the bare name", repr(name))
        yield Damage(f"a shard's name with {what}", _pointed(name), P.UnsafePathError, words, "sharded")
    for name in ("", ".", "..", "pytorch_model.bin", "model.pt", "model.safetensors.pkl", "MODEL.SAFETENSORS"):
        words = (INDEX, repr(name), "only .safetensors files are read")
        yield Damage(f"the shard {name!r}", _pointed(name), P.IndexFileError, words, "sharded")
    for kind, table in _REFUSED.items():
        for what, (do, *words) in table.items():
            yield Damage(what, do, kind, tuple(words), "sharded")
    for what, make in SPECIAL.items():
        words = ("is not a regular file",)
        yield Damage(f"{what} for a shard", instead(make), P.UnsafePathError, ("model-0", *words), "sharded")
        yield Damage(f"{what} for the index", instead(make, INDEX), P.UnsafePathError, (INDEX, *words), "sharded")
    for what, do in _GOOD.items():
        yield Damage(f"good: {what}", do, base="sharded")
    yield Damage("good: an index of the single file", _of_single)


def _pointed(name: Any) -> Do:
    """The index maps NAME to another file."""
    return in_json(INDEX, lambda index: index["weight_map"].update({NAME: name}))


def _mapped(weight_map: Any) -> Do:
    return in_json(INDEX, lambda index: index.update(weight_map=weight_map))


def _many_shards() -> dict[str, str]:
    return {str(i): f"model-{i:06}-of-400000.safetensors" for i in range(400_000)}


def _other(folder: Path) -> str:
    """A shard without NAME."""
    shards = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    return min(shards - {shard(folder).name})


def _elsewhere(folder: Path) -> None:
    _pointed(_other(folder))(folder)


def _twice(folder: Path) -> None:
    path = folder / _other(folder)
    save_file(load_file(path) | {NAME: torch.ones(24, 16)}, path, {"format": "pt"})


def _swapped(folder: Path) -> None:
    one, two = shard(folder), folder / _other(folder)
    one.rename(folder / "x")
    two.rename(one)
    (folder / "x").rename(two)


def _copied(folder: Path) -> None:
    shutil.copy(folder / _other(folder), shard(folder))


def _cut(folder: Path) -> None:
    os.truncate(shard(folder), shard(folder).stat().st_size - 8)


def _emptied(folder: Path) -> None:
    os.truncate(shard(folder), 0)


def _in_capitals(folder: Path) -> None:
    shard(folder).rename(folder / shard(folder).name.upper())


def _with_single(folder: Path) -> None:
    content = {name: t for path in sorted(folder.glob("model-*")) for name, t in load_file(path).items()}
    save_file(content, folder / FILE, {"format": "pt"})


def _unnamed(folder: Path) -> None:
    shutil.copy(shard(folder), folder / _GONE)


def _with_others(folder: Path) -> None:
    for name in ("adapter_model.safetensors", "consolidated.00-of-02.safetensors", "vision.safetensors"):
        shutil.copy(shard(folder), folder / name)


def _of_single(folder: Path) -> None:
    weight_map = dict.fromkeys(load_file(folder / FILE), FILE)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _linked_inside(folder: Path) -> None:
    path = shard(folder)
    path.rename(folder / "weights.safetensors")
    path.symlink_to("weights.safetensors")


def _hub_cache(folder: Path) -> Path:
    cache = folder.parent / "models--a--b"
    snapshot, blobs = cache / "snapshots" / "0123abc", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in list(folder.iterdir()):
        shutil.move(path, blobs / f"sha-{path.name}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"sha-{path.name}")
    return snapshot


def _false_cache(folder: Path) -> Path:
    """A link into a `blobs` folder of another cache entry."""
    snapshot, blobs = _hub_cache(folder), folder.parent / "blobs"
    blobs.mkdir()
    path = shard(snapshot)
    shutil.move(path.resolve(), blobs / path.name)
    path.unlink()
    path.symlink_to(blobs / path.name)
    return snapshot


_OUTSIDE = {
    "a parent": "../model.safetensors",
    "an absolute path": "/etc/passwd.safetensors",
    "a folder": "a/b.safetensors",
    "dots inside": "a/../../model.safetensors",
    "the folder itself": "./model-00001-of-00004.safetensors",
    "a backslash": "..\\model.safetensors",
    "a drive": "C:\\model.safetensors",
    "a NUL": "model\0.safetensors",
    "a line end": "model\n.safetensors",
    "half a character": "\ud800.safetensors",
}
_FIRST = "model-00001-of-00007.safetensors"
_MAP, _GONE = (INDEX, "must have a 'weight_map'"), "model-00099-of-00004.safetensors"
_REFUSED: dict[type[Exception], dict[str, tuple[Any, ...]]] = {
    P.IndexFileError: {
        **{f"the index is {text}": (raw(text.encode(), INDEX), *_MAP) for text in ("[]", "null", '"x"', "1", "{}")},
        **{f"a shard's name is {value}": (_pointed(value), *_MAP) for value in (3, None, ["x"], {})},
        **{f"the weight_map is {value}": (_mapped(value), *_MAP) for value in ([], None, "x", 1)},
        "an empty weight_map": (_mapped({}), INDEX, "is empty"),
        "a tensor not in the index": (
            in_json(INDEX, lambda index: index["weight_map"].pop(NAME)),
            *(INDEX, NAME, "but not in the index"),
        ),
        "a tensor in the index alone": (
            in_json(INDEX, lambda index: index["weight_map"].update(x=index["weight_map"][NAME])),
            *(INDEX, "'x': not in model-0"),
        ),
        "400,000 tensors that are not there": (
            in_json(INDEX, lambda index: index["weight_map"].update(dict.fromkeys(map(str, range(400_000)), _FIRST))),
            *(INDEX, f"'0': not in {_FIRST}", "and 399,980 more"),
        ),
        "400,000 shards that are not there": (
            in_json(INDEX, lambda index: index.update(weight_map=_many_shards())),  # made where it is needed
            *(INDEX, "names 400,000 files; at most 10,000 are read"),
        ),
        "a shard that the index does not name": (_unnamed, "does not name", repr(_GONE), "left from another save"),
        "a tensor under another shard": (_elsewhere, INDEX, NAME, "2 differences"),
        "a tensor in two shards": (_twice, INDEX, NAME, "but the index says"),
        "two shards swapped": (_swapped, INDEX, NAME, "disagree"),
        "a shard that is another's copy": (_copied, INDEX, NAME, "disagree"),
        "one file, and shards that nothing names": (
            in_turn(_with_single, deleted(INDEX)),
            *(FILE, "'model-00001-of-", "left from another save"),
        ),
        "a single file beside the shards": (_with_single, "has both", FILE, INDEX),
    },
    P.FormatError: {
        "an empty index": (raw(b"", INDEX), INDEX, "not valid JSON"),
        "an index cut short": (in_bytes(lambda data: data[:-100], INDEX), INDEX, "not valid JSON"),
        "an index that is not UTF-8": (in_bytes(lambda data: data + b"\xff", INDEX), INDEX, "not valid JSON"),
        "a tensor twice in the index": (
            raw(b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', INDEX),
            *(INDEX, "'a' is there twice"),
        ),
        "an index that is nested": (raw(b'{"a":' + b"[" * 100_000, INDEX), INDEX, "nested too deeply"),
        "an index of 1 TB": (instead(sparse(10**12), INDEX), INDEX, "1,000,000,000,000 bytes"),
        "a shard cut short": (_cut, "model-0", "truncated"),
        "an empty shard": (_emptied, "model-0", "has 0 bytes"),
    },
    P.UnsafePathError: {
        "a shard that links out": (instead(linked_out), "model-0", "is a link to", "elsewhere"),
        "an index that links out": (instead(linked_out, INDEX), INDEX, "is a link to", "elsewhere"),
        "a link into the blobs of another cache": (_false_cache, "model-0", "is a link to", "outside"),
    },
    FileNotFoundError: {
        "a shard that is not there": (_pointed(_GONE), "1 of", _GONE),
        "all shards deleted": (deleted("model-*.safetensors"), "are not there", "model-0"),
        "a shard's name in capitals": (_in_capitals, "1 of", "model-0"),
        "a shard that links to nothing": (instead(link("gone")), "1 of", "model-0"),
        "an index that links to nothing": (instead(link("gone"), INDEX), INDEX, "'gone'"),
        "shards without an index": (deleted(INDEX), f"neither {FILE} nor {INDEX}", "though there is model-0"),
    },
    IsADirectoryError: {
        "a folder for a shard": (instead(Path.mkdir), "model-0", "A folder stands where a file belongs"),
        "a folder for the index": (instead(Path.mkdir, INDEX), INDEX, "A folder stands where a file belongs"),
    },
    OSError: {
        "a shard's name of 300 letters": (_pointed("a" * 300 + ".safetensors"), "name too long"),
        "a shard that links to itself": (instead(lambda path: path.symlink_to(path)), "symbolic link"),
    },
}
_GOOD: dict[str, Do] = {
    "shards": nothing,
    "files of other names beside it": _with_others,
    "a total size that is off": in_json(INDEX, lambda index: index["metadata"].update(total_size=1)),
    "an index without metadata": in_json(INDEX, lambda index: index.pop("metadata")),
    "an index in another order": in_json(INDEX, lambda i: i.update(weight_map=dict(reversed(i["weight_map"].items())))),
    "a link inside the folder": _linked_inside,
    "the layout of the hub's cache": _hub_cache,
}
