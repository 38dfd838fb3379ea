"""Models of transformers in float64: for what float32 is too coarse to compare."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from fnmodels.ops.rotary import Rope, frequencies

_EXACT = ("default", "linear", "llama3", "yarn")  # kinds of ropes whose frequencies do not depend on a length


class KeepsDoubles(TorchFunctionMode):
    """What a model computes in float32 "for accuracy" from float64 tensors stays float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = (args[0], *(torch.float64 if a is torch.float32 else a for a in args[1:]))
            kwargs = {key: torch.float64 if a is torch.float32 else a for key, a in kwargs.items()}
        if func is torch.full and any(
            isinstance(a, float) for a in args[1:]
        ):  # with the lowest number of float64, in XGLM
            kwargs = {"dtype": torch.float64} | kwargs
        return func(*args, **kwargs)


def doubled(model: Any) -> Any:
    """Parameters in float64; rotary tables remain float32."""
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # with a padding_idx, torch gives that row no gradient
        if hasattr(module, "reorder_and_upcast_attn"):
            module.reorder_and_upcast_attn = False  # GPT-2's form for half precision, which insists on float32
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    return model


def with_exact_frequencies(model: Any, config: Any) -> Any:
    """Frequencies of rotary tables in float64: a rounding of the table to float32 grows beyond 1e-6 in some models."""
    ropes = [rope for rope in vars(config).values() if isinstance(rope, Rope) and rope.kind in _EXACT]
    exact = [frequencies(rope, rope.dim(config.head_dim)) for rope in ropes]
    tables = [(m, name) for m in model.modules() for name in dict(m.named_buffers(recurse=False))]
    for module, name in tables:
        rounded = getattr(module, name)
        for one in exact if name.endswith("inv_freq") else ():  # some modules have a table for each type of layer
            if one.shape == rounded.shape and torch.allclose(one, rounded.double(), rtol=1e-6, atol=0):
                setattr(module, name, one)
    return model


def with_rounded_tables(model: Any) -> Any:
    """The tables of rotary modules rounded to float32 once, as `fnmodels.prepare` makes them."""
    for module in model.modules():
        if any(name.endswith("inv_freq") for name in dict(module.named_buffers(recurse=False))):
            module.register_forward_hook(lambda module, inputs, tables: tree_map(_rounded, tables))
    return model


def _rounded(table: Any) -> Any:
    narrow = {torch.float64: "float32", torch.complex128: "complex64"}
    if not isinstance(table, Tensor) or table.dtype not in narrow:
        return table
    values = table.numpy()  # whose casts KeepsDoubles does not see
    return torch.from_numpy(values.astype(narrow[table.dtype]).astype(values.dtype))
