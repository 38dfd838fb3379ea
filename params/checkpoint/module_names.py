"""Where transformers' modules in memory hold the parameters: adapters and state dicts name them so, not as files do."""

import re
from dataclasses import replace
from typing import Any

from fnmodels import tree
from fnmodels.models.common.family import field_of, function_of, traits_of
from fnmodels.models.common.registry import family_of, hf_names
from fnmodels.models.common.spec import Leaf
from fnmodels.models.common.storage import Stack, Stored, TensorSlice, disk_name, disk_names, renamed

_EXPERT = re.compile(r"(.*\.experts)\.0\..*")


def module_names(config: Any) -> dict[str, Stored]:
    """{path of a parameter: the name in memory of the tensor that holds it, or its slice of one}.

    As in transformers 5: experts' tensors are stacked, with gate and up in one, the family's `in_memory` replaces parts
    of names, and a decoder without a head has no first part ("model").
    """
    names, family = hf_names(config), family_of(config)
    leaves = tree.flatten(family.spec(config))
    patterns = {**traits_of(family).in_memory, **function_of(family, "in_memory")(config)}
    found: dict[str, Stored] = {}
    turned = traits_of(family).turned_in_memory
    for path, stored in names.items():
        found[path] = _stacked(path, stored, leaves)
        for pattern, replacement in patterns.items():
            found[path] = renamed(found[path], pattern, replacement)
        if turned and isinstance(one := found[path], TensorSlice) and one.batched:
            found[path] = replace(one, transposed=False)
        if "{leaf}" in (name := disk_names(found[path])[0]):
            found[path] = name.format(leaf=re.sub("_(proj|bias)$", "", path.rpartition(".")[2]))
    first = {name.partition(".")[0] for stored in found.values() for name in disk_names(stored)}
    if field_of(config, "head") == "none" and len(first) == 1:
        found = {path: renamed(stored, r"^\w+\.", "") for path, stored in found.items()}
    return found


def _stacked(path: str, stored: Stored, leaves: dict[str, Leaf]) -> Stored:
    """The tensor of all experts for one that files hold expert by expert."""
    match = _EXPERT.fullmatch(disk_name(stored.tensors[0])) if isinstance(stored, Stack) else None
    if match is None:
        return stored
    where, _, leaf = path.rpartition(".")
    if leaf == "down_proj" or f"{where}.gate_proj" not in leaves:
        return f"{match[1]}.{leaf}"
    inner = leaves[path].shape[1]
    start = inner if leaf == "up_proj" else 0
    return TensorSlice(f"{match[1]}.gate_up_proj", start, start + inner, 2 * inner, batched=True)
