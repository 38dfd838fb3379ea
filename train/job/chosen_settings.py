"""The settings of a run: from the command line, else of the run that is resumed, else the defaults."""

import datetime
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from fnmodels.errors import UserError
from params.io.files import plain_file
from train.checkpoint import saved_steps
from train.checkpoint.saved_steps import Checkpoint
from train.command_line import check_installed

from . import run_folder
from .recipe import resolved, unused_settings
from .settings import (
    RunSettings,
    absolute_paths,
    changeable,
    code_in,
    family_module,
    fixed_settings,
    flag,
    from_json,
    imports,
    read_toml,
    types_of,
)

Json = dict[str, Any]
S = TypeVar("S", bound=RunSettings)


@dataclass(frozen=True)
class Options:
    """The parsed command line. flags: by the names of settings; config: a TOML file; mesh_flags: beside --mesh.

    program: the command, for the line that says how to resume.
    """

    program: str
    run: Path
    flags: Mapping[str, Any]
    config: Path | None = None
    resume: bool = False
    mesh: str | None = None
    mesh_flags: Mapping[str, Any] = field(default_factory=dict)
    limit: datetime.timedelta | None = None  # how long processes wait for one that hangs


def with_derived(defaults: S, settings: S) -> S:
    """The defaults, with those that follow from how `settings` choose the model, the optimizer and the dtype."""
    kept = ("init", "lora", "optimizer", "dtype")
    chosen = replace(defaults, **{name: getattr(settings, name) for name in kept if hasattr(settings, name)})
    followed = resolved(chosen)
    return replace(followed, **{name: getattr(defaults, name) for name in kept[:3] if hasattr(defaults, name)})


def recorded_identity(saved: Checkpoint, kind: type[RunSettings]) -> Json:
    """The identity of the run that saved the step. UserError where it is missing or of another version."""
    recorded, tokens, types = saved.progress.get("run"), saved.progress.get("tokens"), types_of(kind)
    path = saved.path / saved_steps.PROGRESS
    if "run" not in saved.progress and (earlier := from_flags(saved.progress, kind)) is not None:
        return earlier
    if not isinstance(recorded, dict) or not isinstance(recorded.get("settings"), dict) or type(tokens) is not int:
        raise UserError(f"{path} does not say which run saved the step, so it cannot be resumed: name another --run")
    # A setting of a later version that nothing is by default was not given.
    needed = {name for name in types.keys() - changeable(kind) if getattr(kind(), name) is not None}
    wrong = sorted(from_json(recorded["settings"], kind).keys() ^ (recorded["settings"].keys() | needed))
    if wrong:
        raise UserError(
            f"{path} is of a version with other settings ({', '.join(wrong)}), so it cannot be resumed here: "
            "name another --run"
        )
    return recorded


def from_flags(progress: Json, kind: type[RunSettings]) -> Json | None:
    """The identity of a run whose steps recorded its flags, as those of this kind did; None where it has others."""
    recorded = from_json({name: value for name, value in progress.items() if name not in ("data", "init")}, kind)
    if not {"steps", "seed", "learning_rate", "data", "init"} <= progress.keys() or recorded.keys() - progress.keys():
        return None
    files = {name: progress[name] for name in ("data", "init")}
    return {"settings": fixed_settings(resolved(replace(kind(), **recorded)))} | files


def overrides_of(options: Options, kind: type[RunSettings]) -> dict[str, tuple[Any, str]]:
    """{setting: (value, the flag or file entry that gave it)} of the command line; flags override the file."""
    file = read_toml(options.config, kind) if options.config else {}
    places = {name: (value, f"{name} = {value} in {options.config}") for name, value in file.items()}
    for name, value in options.flags.items():
        value = absolute_paths(name, value, Path(), kind)
        places[name] = value, f"{flag(name)} {value}"
    return places


def choose_settings(
    path: Path, overrides: Mapping[str, tuple[Any, str]], recorded: Json | None, defaults: S, *, step: int | None
) -> S:
    """Settings from the command line, else the recorded run, else the defaults. UserError where they conflict.

    step: that of the run which is resumed, with which they must agree; None: nothing is saved.
    """
    before = settings_before(path, recorded, type(defaults))
    if step is not None:
        prolonged = is_prolonged(overrides, before, step)
        check_unchanged(path, overrides, before, changeable(type(defaults)) | ({"steps"} if prolonged else set()))
    check_given_again(path, overrides, before, type(defaults))
    values = {name: value for name, value in before.items() if value is not None}
    settings = replace(defaults, **values | {name: value for name, (value, _) in overrides.items()})
    reason, replaced = settings.replaced
    for name in replaced:
        if name in overrides:
            raise UserError(f"{overrides[name][1]} {reason}")
    settings = without_unused(settings, overrides)
    check_machine(settings)
    return resolved(settings)


def is_prolonged(overrides: Mapping[str, tuple[Any, str]], before: Json, step: int) -> bool:
    """Whether a finished run gets more steps, which is printed with what that means."""
    steps = overrides.get("steps", (step, ""))[0]
    if step != before.get("steps") or steps <= step:
        return False
    print(f"prolonged from {step:,} to {steps:,} steps: from here on its rates are those of a run of {steps:,} steps")
    return True


def settings_before(path: Path, recorded: Json | None, kind: type[RunSettings]) -> Json:
    """The settings of the run in the folder: the recorded ones, and of settings.toml those that may change."""
    values = (recorded or {}).get("settings")
    before = from_json(values, kind) if isinstance(values, dict) else {}
    if recorded and os.path.lexists(path / run_folder.SETTINGS):
        kept = read_toml(plain_file(path, run_folder.SETTINGS), kind)
        before |= {name: value for name, value in kept.items() if name in changeable(kind)}
    return before


def check_unchanged(
    path: Path, overrides: Mapping[str, tuple[Any, str]], before: Json, may_change: frozenset[str]
) -> None:
    """UserError where the command line differs from the run that it resumes."""
    for name, (value, place) in overrides.items():
        if name not in may_change and value != before.get(name):
            was = "it was not given" if before.get(name) is None else f"it was {before[name]}"
            longer = f"continue training in another --run with --init {path}"
            other = longer if name == "steps" else "name another --run"
            raise UserError(f"{place} differs from the run in {path}: {was}; leave it out, or {other}")


def check_given_again(
    path: Path, overrides: Mapping[str, tuple[Any, str]], before: Json, kind: type[RunSettings]
) -> None:
    """UserError where the run in the folder names code that the command line does not."""
    for name, value in before.items():
        if name not in overrides and code_in(types_of(kind)[name], value):
            code = f"{flag(name)} {value}"
            raise UserError(f"the run in {path} was trained with {code}, code that a folder may not run: give it again")


def without_unused(settings: S, overrides: Mapping[str, tuple[Any, str]]) -> S:
    """The settings without hyperparameters of other optimizers. UserError where the command line gives one."""
    unused = unused_settings(settings)
    for name in [name for name in unused if name in overrides]:
        raise UserError(
            f"{overrides[name][1]} is of another optimizer than --optimizer {settings.optimizer}: leave it out"
        )
    cleared: Json = dict.fromkeys(unused)
    return replace(settings, **cleared)


def check_machine(settings: RunSettings) -> None:
    """UserError for microbatches without rows, and for packages or compilers that are missing."""
    name, rows = settings.rows
    if settings.accumulate > rows:
        raise UserError(
            f"--accumulate {settings.accumulate} splits a batch into more microbatches than it has rows: "
            f"{flag(name)} is {rows}"
        )
    if settings.compile == "step" and settings.remat != "none":
        raise UserError(
            f"--compile step makes one graph of forward and backward pass, which recomputes nothing: leave --remat "
            f"{settings.remat} out, or take --compile block"
        )
    for function in imports(settings).values():
        _ = function.function  # before anything is read or written
    family_module(settings)
    if settings.track is not None:
        check_installed((settings.track,))
    compilers = (os.environ.get("CXX", "c++"), "g++", "clang++")
    if settings.compile != "none" and not any(map(shutil.which, compilers)):
        raise UserError(f"--compile {settings.compile} needs a C++ compiler, and there is no {' or '.join(compilers)}")
