"""Damaged folders: files that are missing, not regular, or not weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import params as P
from tests.params.checkpoint.damage.ways import (
    CONFIG,
    FILE,
    INDEX,
    SPECIAL,
    Damage,
    Do,
    deleted,
    in_turn,
    instead,
    link,
    linked_out,
    moved,
    nothing,
)


def cases() -> Iterator[Damage]:
    """Every case of this group."""
    for kind, table in _REFUSED.items():
        for what, (do, *words) in table.items():
            yield Damage(what, do, kind, tuple(words))
    for name in ("pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt"):
        yield Damage(f"{name} alone", moved(FILE, name), P.UnsupportedError, ("only pickled weights", name))
    for name in ("model-00001-of-00002.safetensors", "adapter_model.safetensors", "consolidated.safetensors"):
        yield Damage(f"{name} alone", moved(FILE, name), FileNotFoundError, (_NEITHER, f"though there is {name}"))
    for what, make in SPECIAL.items():
        words = (FILE, "is not a regular file")
        yield Damage(f"{what} for the weights", instead(make, FILE), P.UnsafePathError, words)
    for what, do in _GOOD.items():
        yield Damage(f"good: {what}", do)
    yield Damage("good: GPT-2 as it is", nothing, base="gpt2")


def _beside(*names: str) -> Do:
    def do(folder: Path) -> None:
        for name in names:
            (folder / name).write_bytes(b"other")

    return do


def _cut_short(folder: Path) -> None:
    (folder / ".saving-0123").mkdir()


def _linked(folder: Path) -> Path:
    (folder.parent / "link").symlink_to(folder)
    return folder.parent / "link"


def _second_name(folder: Path) -> None:
    (folder.parent / "other").hardlink_to(folder / FILE)


_NEITHER = f"neither {FILE} nor {INDEX}"
_REFUSED: dict[type[Exception], dict[str, tuple[Any, ...]]] = {
    FileNotFoundError: {
        "no folder": (lambda folder: folder / "gone", "no such checkpoint folder", "gone"),
        "an empty folder": (deleted("*"), "has no config.json"),
        "no weights": (deleted(FILE), _NEITHER),
        "weights that link to nothing": (instead(link("gone"), FILE), FILE, "'gone'"),
        "a save that was cut short": (in_turn(_cut_short, deleted(CONFIG)), "a save was cut short", ".saving-0123"),
    },
    NotADirectoryError: {"a file for the folder": (lambda folder: folder / FILE, "is a folder, not a file")},
    IsADirectoryError: {"a folder for the weights": (instead(Path.mkdir, FILE), FILE, "A folder stands")},
    P.UnsafePathError: {"weights that link out": (instead(linked_out, FILE), FILE, "is a link to", "elsewhere")},
}
_GOOD: dict[str, Do] = {
    "as it is": nothing,
    "other files beside it": _beside("README.md", "tokenizer.json", "pytorch_model.bin", "consolidated.safetensors"),
    "a link to the folder": _linked,
    "an odd name of the folder": lambda folder: folder.rename(folder.parent / "a b ü\n'"),
    "a file with another name for it": _second_name,
}
