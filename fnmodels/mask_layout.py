"""The layout of the masks of one call, made where the host can read their tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fnmodels.inputs.layout import Layout, layout
from fnmodels.inputs.mask import Mask, MaskLike, attention_part
from fnmodels.inputs.values import has_values, unwrapped
from fnmodels.ops.torch_internals import undisturbed


def readable_layout(masks: Mapping[str, MaskLike]) -> Layout | None:
    """`fnmodels.layout`, or None where the host cannot read the masks: in a graph, under vmap, on meta."""
    if torch.compiler.is_compiling():
        return None
    bare: dict[str, MaskLike] = {}
    seen: dict[int, Tensor] = {}  # so that a tensor is unwrapped once, and stays one tensor
    for kind, mask in masks.items():
        part = attention_part(mask)
        if not isinstance(part, Mask):
            continue
        tensors = part.q_positions, part.q_segments, part.kv_positions, part.kv_segments
        for tensor in tensors:
            if id(tensor) not in seen:
                seen[id(tensor)] = value = unwrapped(tensor)
                if not has_values(value):
                    return None
        q_positions, q_segments, kv_positions, kv_segments = (seen[id(tensor)] for tensor in tensors)
        bare[kind] = Mask(q_positions, q_segments, kv_positions, kv_segments, None, None, part.rule)
    return undisturbed(layout, bare)
