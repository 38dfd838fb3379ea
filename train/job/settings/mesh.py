"""The flags of parallelism beside --mesh, which are no settings: a run may be resumed with others."""

from dataclasses import replace

from .types import STRING, SettingType, choice, integer

# {flag of parallelism beside --mesh: (mesh dimension, type or None for a switch, help)}. Like the mesh, they do not
# affect the results of a run.
MESH_FLAGS: dict[str, tuple[str, SettingType | None, str]] = {
    "context": (
        "cp",
        choice("gather", "ulysses", "ring"),
        "how attention gets the keys and values of other ranks' positions (default gather)",
    ),
    "order": (
        "cp",
        choice("mask", "head_tail"),
        "how positions are distributed over ranks (default mask, balanced by the masks; with ulysses, and for models "
        "with recurrent layers: contiguous)",
    ),
    "schedule": (
        "pp",
        replace(STRING, description="a name", metavar="NAME"),
        "pipeline schedule, 1F1B (default), GPipe, ...",
    ),
    "virtual": ("pp", integer(1), "stages per process of an interleaved schedule (default 2)"),
    "microbatches": ("pp", integer(1), "number of microbatches per step (default: one row each)"),
    "sequence": ("tp", None, "shard the sequence dimension between its sublayers too (sequence parallelism)"),
}
