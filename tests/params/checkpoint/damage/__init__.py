"""A corpus of damaged, malicious, borderline and unusual but valid checkpoints.

Each is a small change to a good tiny checkpoint, with the error that reading it must give and words of the message; no
error where it must load. `benchmarks/dev/damaged.py` reads the same corpus with other libraries.
"""

from dataclasses import replace
from pathlib import Path

import params as P
from tests.params.checkpoint.damage import config, files, format, index, tensors
from tests.params.checkpoint.damage.ways import BASES, Damage
from tests.support.cases import generic_params

__all__ = ["BASES", "Damage", "corpus", "make_bases"]


def corpus() -> tuple[Damage, ...]:
    """The full corpus, {"group/name": Damage}, with the groups format, index, config, tensors and files."""
    groups = {"format": format, "index": index, "config": config, "tensors": tensors, "files": files}
    found = tuple(replace(one, name=f"{name}/{one.name}") for name, group in groups.items() for one in group.cases())
    assert len({damage.name for damage in found}) == len(found)
    return found


def make_bases(folder: Path) -> None:
    """Write the valid base checkpoints, each in a folder of its name, without our manifest."""
    for name, (made, limit) in BASES.items():
        P.save_pretrained(folder / name, made, generic_params(made), max_shard_size=limit)
        (folder / name / "fnmodels_manifest.json").unlink()
