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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fnmodels.errors import UserError
from train.command_line import suggestion
from train.data.sources import streamed
from train.imported import is_import_path
from train.job.settings.access import FLAG_ONLY
from train.job.settings.toml import toml_values

# {command of a stage: its module}; runs have --run and --resume, the others read a checkpoint and print
RUNS = {"train": "train", "rl": "train.rl"}
READERS = {"eval": "train.eval", "sample": "train.sample"}
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_CHANGE = re.compile(r"(\w+)\.([\w-]+)=(.*)", re.DOTALL)
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


def read_recipe(path: Path, folder: Path | None = None, changes: Sequence[str] = ()) -> Recipe:
    """The recipe in a TOML file.

    Args:
        path: The file.
        folder: In place of the folder that the file names.
        changes: Of the command line, "stage.key=value" each: in place of what the file has. They may name code.

    Returns:
        The recipe.

    Raises:
        UserError: The file is no recipe, or names code, which no file may run.
    """
    values = toml_values(path, "recipe")
    title, named = values.pop("title", path.stem), values.pop("folder", None)
    if not isinstance(title, str) or not (named is None or isinstance(named, str)):
        raise UserError(f"{path}: title and folder are texts")
    if folder is None and not named:
        raise UserError(f"{path}: there is no folder, in which the stages put what they make")
    place = folder or Path(str(named))
    known = {"here": str(path.resolve().parent)}
    stages, changed = [], _changes(changes, values)
    for name, table in values.items():
        stages.append(_stage(path, name, table, known, changed.get(name, {})))
        if stages[-1].command in RUNS:
            known[name] = str(place / name)
    if not stages:
        raise UserError(f"{path}: there is no stage, a table such as [pretraining]")
    return Recipe(path, title, place, tuple(stages))


def _changes(changes: Sequence[str], stages: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """{stage: {key: value}} of "stage.key=value". UserError for another form, or where there is no such stage."""
    found: dict[str, dict[str, Any]] = {}
    for change in changes:
        match = _CHANGE.fullmatch(change)
        if match is None:
            raise UserError(f"--set {change}: a change is written as STAGE.KEY=VALUE")
        stage, key, value = match.groups()
        if stage not in stages:
            raise UserError(f"--set {change}: there is no stage {stage}{suggestion(stage, list(stages))}")
        found.setdefault(stage, {})[key.replace("-", "_")] = {"true": True, "false": False}.get(value, value)
    return found


def _stage(path: Path, name: str, table: object, known: Mapping[str, str], changes: Mapping[str, Any]) -> Stage:
    if not isinstance(table, dict):
        raise UserError(f"{path}: {name} stands outside of a stage: only title and folder may")
    table = {**table, **changes}
    if not _NAME.fullmatch(name) or name == "here":
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
        if key not in ("command", "checkpoint"):
            _check_key(path, name, key, value, trusted=key in changes)
            flags += _flags(path, name, key, value, known, trusted=key in changes)
    where = None if checkpoint is None else _filled(path, name, str(checkpoint), known)
    return Stage(name, str(command), tuple(flags), where)


def _check_key(path: Path, stage: str, key: str, value: object, *, trusted: bool) -> None:
    """UserError for a key that is not a stage's; trusted: the command line gives it."""
    if key in ("run", "resume", "out", "config"):
        raise UserError(f"{path}: [{stage}] has {key}, which the recipe itself gives to its commands")
    if key in FLAG_ONLY and not trusted:
        raise UserError(
            f"{path}: [{stage}] has {key}, which sends data elsewhere and no file may switch on: give --set "
            f"{stage}.{key}={value}"
        )


def _flags(path: Path, stage: str, key: str, value: Any, known: Mapping[str, str], *, trusted: bool) -> list[str]:
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
        if not trusted and _names_code(key, text):
            raise UserError(
                f"{path}: [{stage}] {key} names code, {text}, which no file may run: give --set {stage}.{key}={text}"
            )
        found += [f"{flag}={text}"]
    return found


def _names_code(key: str, text: str) -> bool:
    if key == "family":
        return True
    if key == "data":
        return any(is_import_path(item) for item in streamed(text))
    return key not in ("prompt", "system", "stop") and is_import_path(text)


def _filled(path: Path, stage: str, text: str, known: Mapping[str, str]) -> str:
    """`text` with the folders that it names in braces."""

    def folder(match: re.Match[str]) -> str:
        if match[1] not in known:
            raise UserError(
                f"{path}: [{stage}] names {match[0]}, which is no stage before it that makes a checkpoint"
                f"{suggestion(match[1], list(known))}"
            )
        return known[match[1]]

    return _PLACE.sub(folder, text)
