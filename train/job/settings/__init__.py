"""All settings of a run as one frozen dataclass, from which the flags, the TOML keys and their validation are derived.

A flag overrides the file, and the file overrides the default. A resumed run's own values are its defaults, and those
that affect its results must not be changed.

runs, language   the settings of every run, and those of a language model
types            how a value is parsed from a flag or a TOML file, and which values are valid; lora_flag: that of --lora
access, toml     flags, JSON and TOML of settings
mesh             the flags of parallelism beside --mesh
"""

from .access import (
    absolute_paths,
    as_flag,
    code_in,
    family_module,
    fixed_settings,
    flag,
    from_json,
    imports,
    may_name_code,
)
from .language import DEFAULT, MODEL_SIZES, SETTING_TYPES, SIZES, Settings
from .mesh import MESH_FLAGS
from .runs import GROUPS, RunSettings, changeable, types_of
from .toml import read_toml, to_toml

__all__ = [
    "DEFAULT",
    "GROUPS",
    "MESH_FLAGS",
    "MODEL_SIZES",
    "RunSettings",
    "SETTING_TYPES",
    "SIZES",
    "Settings",
    "absolute_paths",
    "as_flag",
    "changeable",
    "code_in",
    "family_module",
    "fixed_settings",
    "flag",
    "from_json",
    "imports",
    "may_name_code",
    "read_toml",
    "to_toml",
    "types_of",
]
