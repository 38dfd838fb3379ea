"""`forbid_narrowing`: an error at the first operation that makes fp32 or less of fp64."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_TABLES = ("freqs_cis", "rotary_table", "query_temperature", "table_inputs")  # functions that make them


class forbid_narrowing(TorchDispatchMode):
    """Raises AssertionError where a tensor of the arguments is fp64 and one of the results is narrower.

    Single elements may be narrower, since torch's fused AdamW counts its steps in fp32, and so may be the tables that
    `prepare` makes, which are fp32 by design.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        narrow = torch.float64 in _dtypes((args, kwargs)) and _dtypes(out) - {torch.float64}
        if narrow and not _makes_a_table():
            raise AssertionError(f"{func} makes {sorted(map(str, narrow))} of float64.")
        return out


def _dtypes(values: Any) -> set[torch.dtype]:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return {leaf.dtype for leaf in tensors if leaf.numel() > 1}


def _makes_a_table() -> bool:
    frame: Any = sys._getframe()
    while frame and not frame.f_code.co_name.startswith(_TABLES):
        frame = frame.f_back
    return frame is not None
