"""Properties that a setting's declaration implies: its flag, its JSON, its absolute paths, the code that it names."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from params.checkpoint.gguf_folder import converted
from params.checkpoint.hub import is_hub_name, local_folder
from params.checkpoint.load_gguf import is_gguf
from params.imported import imported_family
from train.data import sources
from train.imported import Imported, absolute, is_import_path

from .language import Settings
from .runs import GROUPS, RunSettings, changeable, types_of
from .types import CHECKPOINT, DATA, FAMILY, FILE, SettingType

FLAG_ONLY = frozenset({"track", "mirror"})  # sends data elsewhere, which no file, perhaps a stranger's, may switch on


def fixed_settings(settings: RunSettings) -> dict[str, Any]:
    """The settings that affect the run's results, as JSON."""
    values = json.loads(json.dumps(asdict(settings)))
    return {name: value for name, value in values.items() if name not in changeable(type(settings))}


def from_json(values: Mapping[str, Any], kind: type[RunSettings] = Settings) -> dict[str, Any]:
    """The settings among `values`, as `fixed_settings` wrote them; invalid values are ignored."""
    found, types, default = {}, types_of(kind), kind()
    for name in values.keys() & (types.keys() - FLAG_ONLY):
        value = values[name]
        try:
            found[name] = None if value is None and getattr(default, name) is None else types[name].check(value)
        except ValueError:
            continue
    return found


def absolute_paths(name: str, value: Any, base: Path, kind: type[RunSettings] = Settings) -> Any:
    """`value` with absolute paths, where the setting names files; relative ones are resolved against `base`.

    A model of the Hub is downloaded, and a GGUF file converted into the cache folder.
    """
    setting_type = types_of(kind)[name]
    if setting_type is DATA:
        return sources.absolute_paths(value, base)
    if setting_type is CHECKPOINT and is_hub_name(value):
        return str(local_folder(value))  # with the commit in it: a run that resumes reads the same files
    if is_import_path(value) and is_importable(setting_type):
        return absolute(value, base)
    if setting_type is FAMILY:
        return os.path.realpath(base / value) if value.endswith(".py") else value
    if setting_type is CHECKPOINT and is_gguf(base / value) and (base / value).exists():
        return str(converted(Path(os.path.realpath(base / value))))
    return os.path.realpath(base / value) if setting_type in (CHECKPOINT, FILE) else value


def is_importable(setting_type: SettingType) -> bool:
    """Whether the setting may name a function of the user's own."""
    return setting_type.accepts("module:name") and not setting_type.accepts("a text")


def may_name_code(setting_type: SettingType) -> bool:
    """Whether the setting may name code of the user's own, a function or a family."""
    return setting_type in (DATA, FAMILY) or is_importable(setting_type)


def code_in(setting_type: SettingType, value: Any) -> tuple[str, ...]:
    """The paths of the user's own functions and family in a setting's value."""
    if setting_type is DATA:
        return tuple(item for item in sources.streamed(value) if not sources.is_url(item))
    if setting_type is FAMILY:
        return () if value is None else (value,)
    return (value,) if is_importable(setting_type) and is_import_path(value) else ()


def imports(settings: RunSettings) -> dict[str, Imported]:
    """{setting: the function of the user's own that it names}, without those of --data."""
    types = types_of(type(settings))
    values = {name: getattr(settings, name) for name, kind in types.items() if is_importable(kind)}
    return {name: Imported(value, flag(name)) for name, value in values.items() if is_import_path(value)}


def family_module(settings: RunSettings) -> Any:
    """The module of --family, None without it. UserError where it is no family."""
    where = getattr(settings, "family", None)
    return None if where is None else imported_family(where)


def flag(name: str) -> str:
    """The command-line flag of a setting."""
    return f"--{name.replace('_', '-')}"


def as_flag(value: Any) -> str:
    """The text of a value on the command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def sorted_by_group(kind: type[RunSettings]) -> list[str]:
    """The names of a task's settings, group by group."""
    return [entry.name for entry in sorted(fields(kind), key=lambda entry: GROUPS.index(entry.metadata["group"]))]
