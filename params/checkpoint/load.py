"""Loading a Hugging Face checkpoint folder as (config, params).

Everything is checked before a tensor is read: the shapes that the config expects are compared with the headers, and one
error lists all differences.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from fnmodels import tree
from fnmodels.errors import memory_for
from fnmodels.models.common import storage
from fnmodels.models.common.family import traits_of
from fnmodels.models.common.registry import family_of
from fnmodels.tree import Tree
from params.compressed_ids import folder_token_map
from params.initialize import leaf_dtype
from params.io.safetensors_file import cast_buffer
from params.quantized.kept import KeptWeight
from params.quantized.weight import Found
from params.sharding import Sharding, plan_by_path

from . import tensor_map
from .header_checks import CheckedFolder, check_folder
from .hub import local_folder
from .load_gguf import is_gguf, load_gguf
from .read_leaf import Source, full_box, keep_leaf, read_leaf
from .tensor_map import StoredLeaf, dtype_class
from .value_checks import check_ties, refuse_non_finite, refuse_other_than_stated, refuse_wrong_numbers


@dataclass(frozen=True)
class LoadReport:
    """Bytes that one call of `load_pretrained` reads and maps.

    Args:
        read: Bytes that are read, including headers and compared copies.
        mapped: Bytes of leaves that are read only when they are used.
        files: Bytes of all files.
        unread: {beginning of names: number of tensors} of parts that are not read, with part="text" of a model that is
            not read as a whole.
    """

    read: int
    mapped: int
    files: int
    unread: dict[str, int] = field(default_factory=dict)


def load_pretrained(
    path: str | os.PathLike[str],
    *,
    family: Any = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    plan: Tree | None = None,
    copy: bool = False,
    check_finite: bool = False,
    drop: Collection[str] = (),
    head: Literal["none"] | None = None,
    part: str | None = None,
    ignore_fields: Collection[str] = (),
    keep_quantized: bool = False,
    revision: str | None = None,
    report: Callable[[LoadReport], object] | None = None,
) -> tuple[Any, Tree]:
    """Loads a Hugging Face checkpoint: config.json beside model.safetensors, or beside shards and their index.

    A leaf of several tensors, such as stacked experts, is always read into new memory; at most one tensor is held in
    addition to the result. A tied head is one leaf. Files without MTP heads are read without them, whatever config.json
    says. Compressed ids of tokens that files of DeepSeek V4.1 lack are made of tokenizer.json (`params.token_map`, the
    extra `text`). A vision-language model is read with its tower. A text model is read out of models that are not read
    as a whole (InternVL, Voxtral) with part="text", if config.json has it as an object of a type that is read. A head
    that such files lack is the embedding.

    Args:
        path: A folder; the files of diffusers are diffusion_pytorch_model.safetensors and its shards. Or a GGUF file
            (the extra `gguf`), which is read by dtype, device, check_finite and keep_quantized alone. Or "org/name", a
            model of the Hub (the extra `hub`), where nothing on this disk has that name: the files that are needed are
            downloaded into the cache of huggingface_hub, with its settings of the environment.
        family: The module that reads this checkpoint, in or outside of fnmodels; None finds that of its model_type.
        dtype: The dtype of the leaves, which are cast one by one. None keeps the dtype on disk. Quantized weights
            (`params.quantized`) are then dequantized to the dtype of their scales if it is that of the method's
            weights, else to the half precision that config.json names, and those of a GGUF file to fp32. A Leaf with
            keep_dtype is loaded in no dtype that is narrower than its own.
        device: Where the leaves go; None is the CPU.
        plan: Of `params.plan` with a DeviceMesh: leaves become DTensors, and each process reads only its shards, rows
            exactly, columns with small gaps between them. A plan for some pipeline stages loads the leaves that it
            names. Nothing is communicated: errors found in the headers are raised by all processes, errors found in
            values (a tied head that differs) only by the process that reads them.
        copy: False maps the files: nothing is read until it is used, and writing to a leaf never reaches the file. If
            the file is truncated later, using such a leaf kills the process (SIGBUS), and if it is rewritten in place
            the leaf may change. True reads everything into new memory, as does any cast or other device.
        check_finite: Whether everything is read and leaves with NaN or infinities are refused (also from a cast to
            fp16).
        drop: ("mtp",) leaves out the MTP heads (`fnmodels.mtp`), and the name of a part that is not read, such as
            ("audio",) of a Gemma 4 or ("mtp",) of a DeepSeek V4.1, that part; without it such files are refused. The
            returned config reflects it.
        head: "none" reads the model without its head, which the files may have or not, so that `forward` returns hidden
            states after the final norm. None: with the head that the files have.
        part: "text" or "vision" reads that part alone of a model of several, such as CLIP or LLaVA, as (its Config, its
            params); all headers are checked, and only its tensors are read. A text model is its own part "text". None:
            the full model.
        ignore_fields: Names of fields of config.json that no family knows, which is an error otherwise. They are
            recorded in what is saved. A field that is read cannot be ignored.
        keep_quantized: Whether quantized weights that F.linear or a layer with experts applies stay as the files have
            them (`params.quantized.kept.KeptWeight`) and are dequantized whenever they are used; outputs are those of
            the dequantized model. Other leaves, and those that share blocks or words of the file with others, are
            plain. With a plan the tensors of a kept weight are sharded; a head whose vocabulary is sharded is plain
            then.
        revision: Of a model of the Hub, its branch, tag or commit; None: its main branch.
        report: Called with a LoadReport (`report=print`); None: no report.

    Returns:
        The frozen Config, and the tree of parameters.

    Raises:
        CheckpointError: One of its subclasses in `fnmodels.errors` names the field, tensor or file, and what would be
            right.
        FileNotFoundError: A file is missing.
        TypeError: `dtype` is no floating dtype of 16 bits or more.
        ValueError: Options do not fit each other, or tensor or expert parallelism would cut a block of a kept weight.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype_class(dtype) == "floating"):
        raise TypeError(f"dtype must be None or a floating torch.dtype of 16 bits or more, not {dtype!r}.")
    if keep_quantized and plan is not None and check_finite:
        raise ValueError("check_finite=True needs kept weights in full, and a plan shards them: leave out one of them.")
    folder = local_folder(path, revision)
    if is_gguf(folder):
        others = {"family": family, "plan": plan, "drop": drop, "head": head, "part": part, "report": report}
        others["ignore_fields"] = ignore_fields
        if used := [name for name, value in others.items() if value]:
            raise ValueError(
                f"{folder}: a GGUF file is read without {' and '.join(used)}: fnmodels-convert {folder} FOLDER "
                "makes a folder of it, which is read with them."
            )
        return load_gguf(folder, dtype, device, check_finite, keep_quantized)
    with memory_for(folder), ExitStack() as stack:
        checked = check_folder(folder, stack, drop, family, head, part, ignore_fields)
        tensor_map.refuse_unread(
            checked.config, [checked.prefix + name for name in checked.leftovers], drop, part, folder
        )
        plan, placements = _placed(plan, checked)
        chosen = [parameter for parameter in checked.parameters if placements is None or parameter.path in placements]
        boxes = {
            parameter.path: placements[parameter.path].local_box() if placements else full_box(parameter)
            for parameter in chosen
        }
        share = next(iter(placements.values())).rank_and_count() if placements else (0, 1)
        source = Source(checked.found, {}, cast_buffer(), torch.device(device or _device(placements)), copy)
        refuse_other_than_stated(
            checked.config, checked.leftovers[share[0] :: share[1]], checked.prefix, checked.found, source.buffer
        )
        check_ties(checked.tied, checked.found, source.buffer, share)
        made: dict[str, tuple[Any, bool]] = {}
        lacking = [parameter for parameter in chosen if parameter.path in checked.of_tokenizer]
        table = folder_token_map(checked.config, folder) if lacking else None
        for stored_leaf in chosen:
            if table is not None and stored_leaf.path in checked.of_tokenizer:
                own = table[boxes[stored_leaf.path]]
                made[stored_leaf.path] = own.to(source.device, leaf_dtype(stored_leaf.leaf, dtype), copy=True), False
                continue
            target = _target(stored_leaf, dtype, checked.found)
            how = placements[stored_leaf.path] if placements else None
            kept = keep_leaf(stored_leaf, source, target, how) if keep_quantized else None
            made[stored_leaf.path] = (
                read_leaf(stored_leaf, boxes[stored_leaf.path], source, target) if kept is None else (kept, False)
            )
        flat = {path: leaf for path, (leaf, _) in made.items()}
        refuse_wrong_numbers(folder, chosen, flat)
        if check_finite:
            read = [parameter for parameter in chosen if parameter not in lacking]
            refuse_non_finite(folder, read, boxes, flat, checked.found)
        if report is not None:
            mapped = sum(leaf.nbytes for leaf, is_mapped in made.values() if is_mapped)
            sizes = (max((e.stop for e in file.entries.values()), default=0) for file in checked.files)
            report(LoadReport(checked.files[0].handles.read, mapped, sum(sizes), checked.unread))
    if placements is None:
        return checked.config, tree.unflatten(flat)
    return checked.config, tree.map_with_path(lambda path, how: _distributed(how, flat[path]), plan)


def _distributed(how: Sharding, leaf: Any) -> Any:
    return leaf if isinstance(leaf, KeptWeight) else how.distribute(leaf)


def _placed(plan: Tree | None, checked: CheckedFolder) -> tuple[Tree, dict[str, Sharding] | None]:
    """(the plan restricted to what is loaded, {path: Sharding} of it). ValueError where it is for another model."""
    if plan is None:
        return None, None
    leaves = {parameter.path: parameter.leaf for parameter in checked.parameters}
    tops = {path.partition(".")[0] for path in leaves}
    left_out = traits_of(family_of(checked.config)).optional.keys() - tops
    plan = {name: how for name, how in plan.items() if name not in left_out}
    if (text := getattr(checked.config, "text", None)) is not None and "text" in plan:
        of_text = traits_of(family_of(text)).optional
        kept = [name for name in plan["text"] if name not in of_text or getattr(text, of_text[name])]
        plan = {**plan, "text": {name: plan["text"][name] for name in kept}}
    return plan, plan_by_path(plan, leaves)


def _device(placements: dict[str, Sharding] | None) -> str:
    mesh = next(iter(placements.values())).mesh if placements else None
    return "cpu" if mesh is None else mesh.device_type


def _target(parameter: StoredLeaf, dtype: torch.dtype | None, found: Found) -> torch.dtype | None:
    if dtype is None and parameter.leaf.keep_dtype:  # e.g. a selection bias: bf16 would round small updates away
        return torch.promote_types(found[storage.disk_names(parameter.stored)[0]][1].dtype, parameter.leaf.dtype)
    return None if dtype is None else leaf_dtype(parameter.leaf, dtype)
