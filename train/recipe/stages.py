"""A recipe file: stages in order, each of which is a command of this package with its flags.

title = "A tiny chat"
folder = "runs/tiny_chat"

[pretraining]
command = "train"
steps = 600

[chat]
command = "train"
init = "{pretraining}"               # the folder of an earlier stage
data = "{here}/chats.jsonl"          # beside the recipe
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fnmodels.errors import UserError
from fnmodels.files import read_text
from params.io.files import is_deep
from train.command_line import suggestion
from train.data.sources import streamed
from train.imported import is_import_path

LIMIT = 50_000  # bytes of a recipe
# {command of a stage: its module}; runs have --run and --resume, the others read a checkpoint and print
RUNS = {"train": "train", "rl": "train.rl"}
READERS = {"eval": "train.eval", "sample": "train.sample"}
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_PLACE = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class Stage:
    """A stage.

    Attributes:
        name: Its name, and that of its folder.
        command: Of RUNS or READERS.
        flags: Its flags, without --run, --resume and --out.
        checkpoint: What a reader reads.
    """

    name: str
    command: str
    flags: tuple[str, ...]
    checkpoint: str | None = None

    @property
    def module(self) -> str:
        return {**RUNS, **READERS}[self.command]

    @property
    def shown(self) -> list[str]:
        """The command as a user would type it, without the folder of its results."""
        return ["python", "-m", self.module, *([self.checkpoint] if self.checkpoint else []), *self.flags]


@dataclass(frozen=True)
class Recipe:
    """The stages of a recipe, in order, and the folder that holds their folders."""

    path: Path
    title: str
    folder: Path
    stages: tuple[Stage, ...]


def read_recipe(path: Path, folder: Path | None = None) -> Recipe:
    """The recipe in a TOML file.

    Args:
        path: The file.
        folder: In place of the folder that the file names.

    Returns:
        The recipe.

    Raises:
        UserError: The file is no recipe, or names code, which no file may run.
    """
    values = _read(path)
    title, named = values.pop("title", path.stem), values.pop("folder", None)
    if not isinstance(title, str) or not (named is None or isinstance(named, str)):
        raise UserError(f"{path}: title and folder are texts")
    if folder is None and not named:
        raise UserError(f"{path}: there is no folder, in which the stages put what they make")
    place = folder or Path(str(named))
    known = {"here": str(path.resolve().parent)}
    stages = []
    for name, table in values.items():
        stages.append(_stage(path, name, table, known))
        known[name] = str(place / name)
    if not stages:
        raise UserError(f"{path}: there is no stage, a table such as [pretraining]")
    return Recipe(path, title, place, tuple(stages))


def _read(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(read_text(path, LIMIT, follow=True))
        deep = is_deep(values)
    except OSError as error:
        raise UserError(f"{path}: the recipe cannot be read ({error.strerror})") from error
    except RecursionError:
        deep = True
    except ValueError as error:
        raise UserError(f"{path} is not TOML: {error}") from error
    if deep:
        raise UserError(f"{path} is not TOML that can be read: it is nested too deeply")
    return values


def _stage(path: Path, name: str, table: object, known: Mapping[str, str]) -> Stage:
    if not isinstance(table, dict):
        raise UserError(f"{path}: {name} stands outside of a stage: only title and folder may")
    if not _NAME.fullmatch(name) or name in known:
        raise UserError(f"{path}: a stage is called {name!r}: letters, digits and _ make a name, and here is none")
    command = table.get("command")
    commands = {**RUNS, **READERS}
    if command not in commands:
        raise UserError(f"{path}: [{name}] has the command {command!r}, which is none of {', '.join(commands)}")
    checkpoint = table.get("checkpoint")
    if (command in READERS) != isinstance(checkpoint, str):
        what = "needs a checkpoint" if command in READERS else "makes a checkpoint, and its source is init"
        raise UserError(f"{path}: [{name}] {what}")
    flags = list[str]()
    for key, value in table.items():
        if key in ("run", "resume", "out", "config"):
            raise UserError(f"{path}: [{name}] has {key}, which the recipe itself gives to its commands")
        if key not in ("command", "checkpoint"):
            flags += _flags(path, name, key, value, known)
    where = None if checkpoint is None else _filled(path, name, str(checkpoint), known)
    return Stage(name, str(command), tuple(flags), where)


def _flags(path: Path, stage: str, key: str, value: Any, known: Mapping[str, str]) -> list[str]:
    """A key of a stage as flags: a list repeats the flag, true is a switch."""
    flag = f"--{key.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else []
    found = list[str]()
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, str | int | float):
            raise UserError(
                f"{path}: [{stage}] {key} is {item!r:.40}: a number, a text, true or a list of them is a flag"
            )
        text = _filled(path, stage, item, known) if isinstance(item, str) else str(item)
        if _names_code(key, text):
            raise UserError(
                f"{path}: [{stage}] {key} names code, {text}, which no file may run: give the stage's command by hand"
            )
        found += [f"{flag}={text}"]
    return found


def _names_code(key: str, text: str) -> bool:
    if key == "data":
        return any(is_import_path(item) for item in streamed(text))
    return key not in ("prompt", "system", "stop") and is_import_path(text)


def _filled(path: Path, stage: str, text: str, known: Mapping[str, str]) -> str:
    """`text` with the folders that it names in braces."""

    def folder(match: re.Match[str]) -> str:
        if match[1] not in known:
            raise UserError(
                f"{path}: [{stage}] names {match[0]}, which is no stage before it{suggestion(match[1], list(known))}"
            )
        return known[match[1]]

    return _PLACE.sub(folder, text)
