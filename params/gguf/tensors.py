"""Tensors of a GGUF file under their names in Hugging Face's files: where each is, and its values or its blocks."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .architecture import Architecture, Change, To, rows
from .blocks import dequantized
from .header import GgufFile
from .rotary_factors import LONG_FACTORS, ROPE_FACTORS

# {rope_type: the tensors that became fields of config.json}
_IN_CONFIG = {"llama3": (ROPE_FACTORS,), "proportional": (ROPE_FACTORS,), "longrope": tuple(LONG_FACTORS.values())}
_MATRICES = ("ffn_gate_inp_shexp.weight", "token_types.weight")


@dataclass(frozen=True)
class Stored:
    """A tensor of the model under its name in Hugging Face's files.

    Attributes:
        names: of tensors of the file.
        expert: the part of them which it is; None for all of them.
        heads: of rows to be brought into the order of halves; 0 for none.
        change: what makes one tensor of theirs; `rows` where blocks of the file may stay.
    """

    names: tuple[str, ...]
    expert: int | None = None
    heads: int = 0
    change: Change = rows


def stored_tensors(file: GgufFile, architecture: Architecture, values: Mapping[str, Any]) -> dict[str, Stored]:
    """{name in Hugging Face's files: where it is} of every tensor but those that became fields of config.json.

    Args:
        file: whose header is checked.
        architecture: of the file.
        values: of `config_values`.
    """
    heads = {}
    if architecture.interleaved:
        heads = {"attn_q": values["num_attention_heads"], "attn_k": values["num_key_value_heads"]}
    sized = architecture.sized(values)
    layer_names, other_names = {**architecture.layer, **sized}, {**architecture.top, **sized}
    order = {name.removesuffix(".weight"): i for i, name in enumerate(layer_names)}
    scaling = values.get("rope_scaling") or values.get("rope_parameters", {}).get("full_attention", {})
    in_config = _IN_CONFIG.get(str(scaling.get("rope_type", scaling.get("type"))), ())
    found: dict[str, Stored] = {}
    for name in sorted(file.tensors, key=lambda name: order.get(_split(name)[1], -1)):
        if name in in_config:
            continue
        tensor = file.tensors[name]
        layer, module, end = _split(name)
        names = other_names if layer is None else layer_names
        path, change = _target(names, module, end)
        if layer is not None:
            path = f"{architecture.root}.{layer}.{path}"
        if architecture.norm_offset and change is rows and f"{module}{end}".endswith("_norm.weight"):
            change = _Less(architecture.norm_offset)
        if "{}" in path:
            found |= {path.format(expert): Stored((name,), expert) for expert in range(tensor.shape[0])}
            continue
        turned = module in heads and tensor.shape[0] % (2 * heads[module]) == 0
        before = found[path].names if path in found else ()
        found[path] = Stored((*before, name), None, heads[module] if turned else 0, change)
    return found


def _target(names: Mapping[str, str | To], module: str, end: str) -> tuple[str, Change]:
    """(name in Hugging Face's files, change) of a tensor: of its full name, or of its module."""
    whole = names.get(f"{module}{end}")
    target = whole if whole is not None else names.get(module, module)
    path, change = target if isinstance(target, To) else (target, rows)
    return (path if whole is not None else f"{path}{end}"), change


@dataclass(frozen=True)
class _Less:
    offset: float

    def __call__(self, tensors: Any) -> Tensor:
        return rows(tensors) - self.offset


def shape_of(file: GgufFile, stored: Stored) -> tuple[int, ...]:
    """The shape of a tensor of the model."""
    parts = [torch.empty(_part_shape(file, name, stored.expert), device="meta") for name in stored.names]
    return tuple(stored.change(parts).shape)


def _part_shape(file: GgufFile, name: str, expert: int | None) -> tuple[int, ...]:
    """The shape of a tensor of the file, or of one expert. Matrices of one row are vectors in files."""
    shape = file.tensors[name].shape[0 if expert is None else 1 :]
    return (1, *shape) if name.endswith(_MATRICES) and len(shape) == 1 else shape


def value_of(file: GgufFile, stored: Stored) -> Tensor:
    """The tensor in fp32."""
    parts = [
        dequantized(file.read(name, stored.expert), file.tensors[name].kind, _part_shape(file, name, stored.expert))
        for name in stored.names
    ]
    return _in_order(stored.change(parts).contiguous(), stored)


def blocks_of(file: GgufFile, stored: Stored) -> Tensor:
    """The rows of a matrix as the file has them, uint8 [..., rows, bytes]; `kind_in_blocks` says of which these are."""
    parts = []
    for name in stored.names:
        data = torch.frombuffer(file.read(name, stored.expert), dtype=torch.uint8)
        parts.append(data.view(*_part_shape(file, name, stored.expert)[:-1], -1))
    return _in_order(rows(parts), stored)


def kind_in_blocks(file: GgufFile, stored: Stored) -> int | None:
    """The ggml type of a tensor whose rows `blocks_of` gives; None where values are made of them."""
    kinds = {file.tensors[name].kind for name in stored.names}
    return kinds.pop() if len(kinds) == 1 and stored.change is rows else None


def _in_order(tensor: Tensor, stored: Stored) -> Tensor:
    return _halves(tensor, stored.heads) if stored.heads else tensor


def _split(name: str) -> tuple[int | None, str, str]:
    """(layer or None, module, ".weight" or ".bias") of a tensor's name."""
    match = re.fullmatch(r"(?:blk\.(\d{1,4})\.)?([a-z0-9_.]+?)(\.weight|\.bias|)", name)
    if match is None:
        return None, name, ""
    return None if match[1] is None else int(match[1]), match[2], match[3]


def _halves(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head, of which neighbours are rotated together, with the first ones before the second ones."""
    return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
