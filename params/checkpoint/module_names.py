"""Names of parameters in transformers' modules in memory, which adapters and state dicts use, and files do not."""

import re
from dataclasses import replace
from typing import Any

from fnmodels import tree
from fnmodels.models.common.family import field_of, function_of, traits_of
from fnmodels.models.common.registry import family_of, hf_names
from fnmodels.models.common.spec import Leaf
from fnmodels.models.common.storage import Stored, TensorSlice, disk_names, fuse, renamed

from .tensor_map import stacked


def module_names(config: Any) -> dict[str, Stored]:
    """{path of a parameter: the name in memory of the tensor that holds it, or its slice of one}.

    As in transformers 5: experts' tensors are stacked, with gate and up in one, the family's `in_memory` replaces parts
    of names, and a decoder without a head has no first part ("model").
    """
    names, family = hf_names(config), family_of(config)
    leaves = tree.flatten(family.spec(config))
    patterns = {**traits_of(family).in_memory, **function_of(family, "in_memory")(config)}
    stored_names: dict[str, Stored] = {}
    turned, forms = traits_of(family).turned_in_memory, function_of(family, "in_memory_forms")(config)
    for path, stored in names.items():
        if path in forms:
            stored_names[path] = forms[path]
            continue
        stored_names[path] = stacked(path, stored, leaves)
        for pattern, replacement in patterns.items():
            stored_names[path] = renamed(stored_names[path], pattern, replacement)
        if turned and isinstance(stored_slice := stored_names[path], TensorSlice) and stored_slice.batched:
            stored_names[path] = replace(stored_slice, transposed=False)
        if "{leaf}" in (name := disk_names(stored_names[path])[0]):
            stored_names[path] = name.format(leaf=re.sub("_(proj|bias)$", "", path.rpartition(".")[2]))
    stored_names |= _joined_convolutions(stored_names, leaves)
    first = {name.partition(".")[0] for stored in stored_names.values() for name in disk_names(stored)}
    if field_of(config, "head") == "none" and len(first) == 1:
        stored_names = {path: renamed(stored, r"^\w+\.", "") for path, stored in stored_names.items()}
    return stored_names


def _joined_convolutions(names: dict[str, Stored], leaves: dict[str, Leaf]) -> dict[str, Stored]:
    """{path: rows of `conv1d`} of the convolutions of q, k and v, which files have apart."""
    found: dict[str, Stored] = {}
    for path, stored in names.items():
        if isinstance(stored, str) and stored.endswith(".q_conv1d.weight"):
            paths = [f"{path.removesuffix('q_conv')}{name}_conv" for name in "qkv"]
            rows = {each: leaves[each].shape[0] for each in paths}
            found |= fuse(stored.replace(".q_conv1d.", ".conv1d."), rows)
    return found
