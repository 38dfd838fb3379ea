"""Forms of linear weights for decoding: oneDNN's own layout with the same numbers, and int8 and int4 with scales.

Decoding one token reads every weight once, so that it takes the time of reading them. Each form is a node of the tree
in a weight's place, which F.linear alone accepts; norms, routers, experts and embeddings stay tensors. The forms are
derived from params and neither trained nor saved: `params.save_pretrained` refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels import tree
from fnmodels.models.common.family import DecoderConfig
from fnmodels.models.common.registry import family_of
from fnmodels.ops.cpu.onednn import dense
from fnmodels.ops.invariant.rows import LEAST_ROWS, rows_are_invariant
from fnmodels.ops.linear import linear
from fnmodels.ops.torch_internals import int4_layout, int4_linear, int8_linear, onednn_layout, onednn_linear
from fnmodels.tree import Tree, static

from .lora import is_linear, map_leaves

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # weights of the same input
GROUP = 32  # inputs that share a scale in int4


class LinearOnly:
    """A weight [out, in] that F.linear applies; torch raises for every other function of it, naming its class.

    invariant: whether the form has the products of kernel="invariant".
    """

    invariant: ClassVar[bool] = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is not F.linear or isinstance(args[0], LinearOnly):
            return NotImplemented
        return args[1].linear(args[0], *args[2:], **(kwargs or {}))

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        _check_gradients(x)
        return self.product(x.reshape(-1, x.shape[-1]), bias).unflatten(0, x.shape[:-1])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return torch.bfloat16

    def product(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """rows [n, in] and bias [out] -> [n, out]; each form has its own."""
        raise NotImplementedError


@tree.pytree
@dataclass(frozen=True, eq=False)
class PackedWeight(LinearOnly):
    """A weight in oneDNN's layout, which torch shows as an opaque tensor [out, in]."""

    layout: Tensor
    invariant: ClassVar[bool] = True

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    def product(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling():
            from fnmodels.ops.cpu.linear_op import packed_linear  # here, for it imports dynamo

            return packed_linear(rows, self.layout, bias)
        if not rows_are_invariant() or len(rows) != 1:
            return onednn_linear(dense(rows), self.layout, bias)
        return onednn_linear(rows.expand(LEAST_ROWS, -1), self.layout, bias)[:1]

    def linear_gelu(self, x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
        """`fnmodels.ops.linear.linear_gelu` with this weight."""
        _check_gradients(x)
        rows = dense(x.reshape(-1, x.shape[-1]))
        return onednn_linear(rows, self.layout, bias, approximate).unflatten(0, x.shape[:-1])


@tree.pytree
@dataclass(frozen=True, eq=False)
class Joined(LinearOnly):
    """Some outputs of a weight in oneDNN's layout that several weights of the same input are: rows start to stop.

    Each of them holds the whole layout, which is one tensor. `fnmodels.ops.linear.linears` multiplies by it once; its
    results are views of the whole product. A product with one of them alone is the whole one too, as are those with
    copies of them, whose layouts are no longer one tensor.
    """

    layout: Tensor
    start: int = static()
    stop: int = static()
    invariant: ClassVar[bool] = True

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    def product(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return _plus(PackedWeight(self.layout).product(rows, None)[:, self.start : self.stop], bias)

    def linears(self, x: Tensor, given: list[tuple[Any, Tensor | None]]) -> tuple[Tensor, ...] | None:
        """The products of x with weights and biases, or None if these are not all of one layout."""
        if not all(isinstance(weight, Joined) and weight.layout is self.layout for weight, _ in given):
            return None
        form: Any = PackedWeight(self.layout)
        whole = linear(x, form)
        return tuple(_plus(whole[..., weight.start : weight.stop], bias) for weight, bias in given)


@tree.pytree
@dataclass(frozen=True, eq=False)
class Int8(LinearOnly):
    """codes int8 [out, in] times scales bf16 [out]."""

    codes: Tensor
    scales: Tensor

    def product(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling() and rows.shape[0] == 1:  # a loop that reads the codes once, as `ops.linear`'s
            # as_strided makes a buffer of it: Inductor would compute the norm before it anew for each output
            row = _bf16(rows).float().flatten().contiguous().as_strided((rows.shape[1],), (1,))
            sums = (row * self.codes.float()).sum(-1) * self.scales.float()
            return _plus(sums.to(rows.dtype)[None], bias)
        return _plus(int8_linear(_bf16(rows), self.codes, self.scales), bias)


@tree.pytree
@dataclass(frozen=True, eq=False)
class Int4(LinearOnly):
    """codes of 4 bits in torch's layout, and bf16 [in / GROUP, out, 2]: the scale of each group, and its middle."""

    codes: Tensor
    scales: Tensor
    group: int = static(default=GROUP)

    def product(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return _plus(int4_linear(_bf16(rows), self.codes, self.group, self.scales), bias)


def _check_gradients(x: Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError("A weight in a form for decoding has no gradient: compute under torch.no_grad().")


def _plus(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out + bias


def _bf16(rows: Tensor) -> Tensor:
    if rows.dtype is not torch.bfloat16:
        raise ValueError(
            f"Quantized weights take bf16 activations, and these are {rows.dtype}: "
            "params.quantize makes all other leaves bf16, and caches need dtype=torch.bfloat16."
        )
    return rows


def packed(params: Tree, *, skip: tuple[str, ...] = ()) -> Tree:
    """Puts linear weights into oneDNN's layout, for faster decoding on a CPU; nothing else changes.

    Weights are packed that are fp32 on a CPU. Others stay as they are, as do what latent attention reads apart
    (kv_b_proj), and patch_proj, which may be a convolution's. Queries, keys and values of an attention are one product,
    and so are gate and up projections, where all of them are packed, read the same input and have no convolution.
    Results are those of oneDNN's products: equal to unpacked ones with kernel="invariant", and up to rounding
    otherwise.

    Args:
        params: The tree of parameters.
        skip: Shell patterns of paths that stay as they are.

    Returns:
        The tree with packed weights.
    """
    leaves: dict[str, Any] = {}
    map_leaves(leaves.__setitem__, params)
    weights = {path: leaf.detach() for path, leaf in leaves.items() if _is_fp32(leaf) and _chosen(path, leaf, skip)}
    forms: dict[str, LinearOnly] = {}
    for first, *others in SAME_INPUT:
        for path in weights:
            parent = path.removesuffix(first)
            group = [path, *(parent + name for name in others)]
            if parent != path and weights.keys() >= set(group) and not _differ(parent, group, leaves):
                forms |= _joined({member: weights[member] for member in group})
    forms |= {path: PackedWeight(onednn_layout(weight)) for path, weight in weights.items() if path not in forms}
    return map_leaves(lambda path, leaf: forms.get(path, leaf), params)


def _is_fp32(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_cpu and leaf.dtype is torch.float32


def _differ(parent: str, group: list[str], given: Mapping[str, Any]) -> bool:
    """Whether the group's inputs differ, or its products are made one by one: before convolutions, between limits."""
    if len({given[path].shape[1] for path in group}) > 1 or parent.endswith(("cross_attention.", "pooler.attention.")):
        return True
    limits = {f"{path.removesuffix('_proj')}_limits.input_min" for path in group}
    return not given.keys().isdisjoint(limits | {f"{parent}q_conv", f"{parent}k_conv"})


def _joined(weights: Mapping[str, Tensor]) -> dict[str, LinearOnly]:
    layout = onednn_layout(torch.cat([*weights.values()]))
    stops = [*accumulate(len(weight) for weight in weights.values())]
    starts = [0, *stops[:-1]]
    return {path: Joined(layout, *span) for path, *span in zip(weights, starts, stops, strict=True)}


def quantize(params: Tree, config: DecoderConfig, *, kind: str, skip: tuple[str, ...] = ("lm_head",)) -> Tree:
    """Quantizes linear weights to 8 or 4 bits for decoding on a CPU; all other leaves become bf16.

    Args:
        params: The tree of parameters, on a CPU.
        config: The model's config, whose family fixes the dtype of some leaves.
        kind: "int8": a scale per output, symmetric, of multiples of 16 inputs. "int4": a scale and an offset per output
            and group of 32 inputs.
        skip: Shell patterns of paths that stay bf16.

    Returns:
        The tree with quantized weights.

    Raises:
        ValueError: `kind` is another word, params are not on a CPU, or a width does not fit the form.
    """
    forms: dict[str, Callable[[str, Tensor], LinearOnly]] = {"int8": _int8, "int4": _int4}
    if kind not in forms:
        raise ValueError(f"kind is {kind!r}; it is one of {', '.join(forms)}.")
    leaves = tree.flatten(family_of(config).spec(config))
    fixed = {path: leaf.dtype for path, leaf in leaves.items() if leaf.keep_dtype}

    def form(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_cpu:
            raise ValueError(f"{path} is no tensor on a CPU: merge adapters, and quantize before other forms.")
        if _chosen(path, leaf, skip):
            return forms[kind](path, leaf.detach().float())
        return leaf.detach().to(fixed.get(path, torch.bfloat16)) if leaf.is_floating_point() else leaf

    return map_leaves(form, params)


def _chosen(path: str, leaf: Tensor, skip: tuple[str, ...]) -> bool:
    named = is_linear(path, leaf) and not path.endswith(("kv_b_proj", "patch_proj"))
    return named and not any(fnmatchcase(path, pattern) for pattern in skip)


def _int8(path: str, weight: Tensor) -> Int8:
    if weight.shape[1] % 16:  # torch's product reads beyond such rows
        raise ValueError(
            f"{path} is {list(weight.shape)}, but int8 takes multiples of 16 inputs: leave it out by skip=."
        )
    scales = (weight.abs().amax(1) / 127).clamp(min=1e-12).bfloat16()
    codes = (weight / scales.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    return Int8(codes, scales)


def _int4(path: str, weight: Tensor) -> Int4:
    rows, width = weight.shape
    if width % GROUP or rows % 16:
        raise ValueError(
            f"{path} is {[rows, width]}, but int4 takes multiples of 16 outputs and {GROUP} inputs: leave it out by "
            "skip=, or take int8."
        )
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / 15).clamp(min=1e-8).bfloat16()
    middle = (low + 8 * scale.float()).bfloat16()
    codes = ((groups - middle.float()[..., None]) / scale.float()[..., None] + 8).round().clamp(0, 15)
    return Int4(int4_layout(codes.flatten(1).int()), torch.stack((scale, middle), -1).transpose(0, 1).contiguous())
