"""Parameter trees: initialization, sharding plans, LoRA, and loading and saving of Hugging Face checkpoints.

Import it as `import params as P`, so that the name `params` stays free for your own tree.
"""

from pathlib import Path
from runpy import run_path

run_path(str(Path(__file__).parents[1] / "fnmodels" / "_shadowing.py"))["require"](__file__, "fnmodels")

from fnmodels.errors import (
    CheckpointError,
    ConfigError,
    FormatError,
    IndexFileError,
    MismatchError,
    UnsafePathError,
    UnsupportedError,
)
from fnmodels.models.common.spec import Constant, Leaf, Normal
from fnmodels.tree import flatten, unflatten
from params import lora
from params.checkpoint.config import load_config
from params.checkpoint.export import export
from params.checkpoint.load import LoadReport, load_pretrained
from params.checkpoint.manifest import verify
from params.checkpoint.save import recover, save_pretrained
from params.initialize import abstract, count, init
from params.sharding import Rules, Sharding, describe, plan

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Constant",
    "FormatError",
    "IndexFileError",
    "Leaf",
    "LoadReport",
    "MismatchError",
    "Normal",
    "Rules",
    "Sharding",
    "UnsafePathError",
    "UnsupportedError",
    "abstract",
    "count",
    "export",
    "describe",
    "flatten",
    "init",
    "load_config",
    "load_pretrained",
    "lora",
    "plan",
    "recover",
    "save_pretrained",
    "unflatten",
    "verify",
]
