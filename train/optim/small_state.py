"""Optimizer states in 16 or 8 bits: the moments of AdamW in a half or a quarter of their memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels import tree
from fnmodels.ops.float8 import scale_of
from fnmodels.tree import Tree

from .base import InPlace, Optimizer, count_up_, updates_tree, with_replaced, with_traits
from .cache_chunks import cache_chunks
from .stochastic_rounding import indices, key_of, noise, stochastic_round
from .wrappers import around

_MIN_ELEMENTS = 4096  # smaller leaves, norms and biases, keep their states: they take no memory
_BLOCK = 256  # elements that share a scale: 4 bytes more for 256
_FORMAT = torch.float8_e4m3fn
_LOW = 20  # bits that fp32 has below the last one of _FORMAT


def with_small_state(optimizer: Optimizer, *, bits: int = 8, seed: int = 0) -> Optimizer:
    """Keeps the states of large fp32 parameters in few bits; the update itself is computed in fp32, leaf by leaf.

    States named ..._sq, which are squares, are kept as their roots, which halves the range of their exponents. States
    are rounded up or down at random, so that the mean is exact: a moment that decays by 1/1000 in a step would never
    leave its value if it were rounded to nearest. The random number is a function of (seed, number of the update,
    state, path, index), so a resumed run repeats it. State: {inner, scales}, an empty dict in scales where there are
    none.

    Args:
        optimizer: One that treats elements independently (adamw, lion, sgd), for parameters that are not sharded. Wrap
            the result in `with_master` for bf16 parameters.
        bits: 16: bf16. 8: float8 (e4m3) with a scale for each block of 256 elements (the idea is that of arXiv
            2110.02861).
        seed: Of the rounding.

    Returns:
        The optimizer around the other.

    Raises:
        ValueError: `bits` is another number, or the optimizer's elements depend on each other.
    """
    if bits not in (8, 16):
        raise ValueError(f"bits is {bits!r}; a state takes 8 or 16 bits.")
    if not optimizer.traits.elementwise or optimizer.bind is None:
        raise ValueError(
            "with_small_state is for optimizers that treat elements independently: adamw, lion and sgd, inside of "
            "other wrappers."
        )
    form = _Form(bits, seed)

    def init(params: Tree) -> Tree:
        inner = optimizer.init(params)
        if not isinstance(inner, dict) or "step" not in inner:
            raise ValueError(
                "with_small_state packs the moments of one optimizer, such as adamw; put it inside of the groups of a "
                "partition, and inside of with_ema, with_master and chain."
            )
        return _packed(form, inner, params)

    def update(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        updates, new = optimizer.update(grads, _unpacked(form, opt_state, params), params)
        return updates, _packed(form, new, params)

    def bind(opt_state: Tree, params: Tree) -> InPlace:
        leaves, step = _small_leaves(opt_state, params), opt_state["inner"]["step"]

        @torch.no_grad()
        def run(grads: Sequence[Tensor | None], skip: Tensor | None) -> None:
            index_of = _Indices()
            for leaf, grad in zip(leaves, grads, strict=True):
                if grad is not None:
                    _update_leaf(optimizer, form, leaf, grad, step, skip, index_of)
            count_up_(step, skip)

        return run

    made = around(optimizer, init, update, bind, lambda inner: with_small_state(inner, bits=bits, seed=seed))
    # random numbers depend on the index within the full leaf, which a shard does not know
    return with_traits(made, elementwise=False, per_leaf=True, for_shards=None)


@dataclass(frozen=True)
class _Form:
    """The form of kept states: `bits` bits, rounded by random numbers of this seed."""

    bits: int
    seed: int

    def key(self, name: str, path: str, step: Tensor) -> Tensor:
        return key_of(self.seed, step, f"{name} {path}")

    def write(self, name: str, wide: Tensor, key: Tensor, index: Tensor) -> tuple[Tensor, Tensor | None]:
        """(a part of the state `name` in `bits` bits, its scales); key, index: as in `noise`."""
        if wide.requires_grad:
            raise ValueError(
                "with_small_state keeps states as rounded codes, which have no derivative: where a gradient goes "
                "through an update, take the optimizer inside of it."
            )
        value = wide.sqrt() if name.endswith("_sq") else wide
        random = noise(key, index)
        return (stochastic_round(value, random), None) if self.bits == 16 else to_blocks(value, random)

    def read(self, name: str, state: Tensor, scales: Tensor | None) -> Tensor:
        value = state.float() if scales is None else from_blocks(state, scales)
        return value.square_() if name.endswith("_sq") else value


def _is_small(param: Tensor, state: Tensor) -> bool:
    """Whether a state in its optimizer's dtype is to be kept small."""
    return param.dtype == state.dtype == torch.float32 and param.numel() >= _MIN_ELEMENTS


def _packed(form: _Form, inner: Tree, params: Tree) -> Tree:
    """{inner, scales} from the state of the optimizer inside."""
    flat, scales, states = tree.flatten(params), {}, {"step": inner["step"]}
    for name, values in inner.items():
        if name == "step":
            continue
        made = {
            path: form.write(name, state, form.key(name, path, inner["step"]), indices(state))
            if _is_small(flat[path], state)
            else (state, None)
            for path, state in tree.flatten(values).items()
        }
        states[name] = with_replaced(values, {path: state for path, (state, _) in made.items()})
        scales[name] = updates_tree(values, {path: scale for path, (_, scale) in made.items() if scale is not None})
    return {"inner": states, "scales": scales}


def _unpacked(form: _Form, opt_state: Tree, params: Tree) -> Tree:
    """The inverse of `_packed`: the state of the optimizer inside, in its dtypes."""
    wide: dict[str, dict[str, Tensor]] = {}
    for leaf in _small_leaves(opt_state, params):
        for name, state in leaf.states.items():
            is_packed = state.dtype != leaf.param.dtype
            read = form.read(name, state, leaf.scales.get(name)) if is_packed else state
            wide.setdefault(name, {})[leaf.path] = read
    return {
        name: values if name == "step" else with_replaced(values, wide.get(name, {}))
        for name, values in opt_state["inner"].items()
    }


class _SmallLeaf(NamedTuple):
    """A parameter with its entries of each state and of the scales."""

    path: str
    param: Tensor
    names: list[str]  # of all states, also of those in which it has no entry
    states: dict[str, Tensor]
    scales: dict[str, Tensor]


def _small_leaves(opt_state: Tree, params: Tree) -> list[_SmallLeaf]:
    names = [name for name in opt_state["inner"] if name != "step"]
    states = {name: tree.flatten(opt_state["inner"][name]) for name in names}
    scales = {name: tree.flatten(opt_state["scales"][name]) for name in names}

    def at(path: str, values: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: flat[path] for name, flat in values.items() if path in flat}

    return [_SmallLeaf(path, p, names, at(path, states), at(path, scales)) for path, p in tree.flatten(params).items()]


class _Indices:
    """`indices` of parts of leaves, most of which have one size, during one update."""

    def __init__(self) -> None:
        self._known: dict[int, Tensor] = {}

    def __call__(self, part: Tensor) -> Tensor:
        if part.ndim != 1 or not part.is_cpu:  # a full leaf
            return indices(part)
        if part.numel() not in self._known:
            self._known[part.numel()] = indices(part)
        return self._known[part.numel()]


def _update_leaf(
    optimizer: Optimizer,
    form: _Form,
    leaf: _SmallLeaf,
    grad: Tensor,
    step: Tensor,
    skip: Tensor | None,
    index_of: _Indices,
) -> None:
    """The update of one leaf in place, in parts that stay in cache. step: the number of updates before this one."""

    def copy(into: Tensor, value: Tensor) -> None:
        into.copy_(value if skip is None else torch.where(skip, into, value))

    path, states = leaf.path, leaf.states
    keys = {name: form.key(name, path, step + 1) for name in states if states[name].dtype != leaf.param.dtype}
    for first, (param, part, *parts) in cache_chunks(leaf.param, grad, *states.values()):
        kept, blocks = dict(zip(states, parts, strict=True)), _blocks_of(first, param)
        scales = {name: leaf.scales[name][blocks] for name in keys if name in leaf.scales}
        wide = {
            name: form.read(name, state, scales.get(name)) if name in keys else state for name, state in kept.items()
        }
        state = {name: _alone(path, wide[name]) if name in wide else {} for name in leaf.names}
        optimizer.apply_(_alone(path, part), {"step": step.clone(), **state}, _alone(path, param), skip=skip)
        for name in keys:
            codes, scale = form.write(name, wide[name], keys[name] ^ first, index_of(param))
            copy(kept[name], codes)
            if scale is not None:
                copy(scales[name], scale)


def _alone(path: str, leaf: Tensor) -> Tree:
    """The tree that has this leaf only, at `path`."""
    node: Tree = leaf
    for key in reversed(path.split(".")):
        node = {key: node}
    return node


def to_blocks(value: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """(float8 codes as uint8 in the shape of `value`, scales [blocks, 1]); random: as `bits` of `stochastic_round`.

    A block with a NaN is NaN: its scale is.
    """
    blocks = _blocks(value)
    largest = torch.maximum(blocks.amax(-1, keepdim=True), -blocks.amin(-1, keepdim=True))
    scales = torch.where(largest.isnan(), largest, scale_of(largest, _FORMAT))
    most = torch.finfo(_FORMAT).max
    scaled = _unblocked((blocks / scales).clamp_(-most, most), value)
    moved = scaled.view(torch.int32).add_(random << (_LOW - 16)).bitwise_and_(~((1 << _LOW) - 1))
    return moved.view(torch.float32).clamp_(-most, most).to(_FORMAT).view(torch.uint8), scales


def from_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """The fp32 values of a result of `to_blocks`."""
    # Shifted by 7 bits, below the sign, e4m3 is fp16 of 2^-8 times the value, subnormal values included. Torch converts
    # fp16 by an instruction, and e4m3 element by element, which takes ten times as long.
    halves = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    return _unblocked(_blocks(halves.view(torch.float16).float().mul_(2.0**8)) * scales, codes)


def _blocks_of(first: int, part: Tensor) -> slice:
    """The blocks of a part of a leaf that begins at the index `first`."""
    return slice(first // _BLOCK, -(-(first + part.numel()) // _BLOCK))


def _blocks(x: Tensor) -> Tensor:
    more = -x.numel() % _BLOCK
    flat = x.flatten()
    return (F.pad(flat, (0, more)) if more else flat).view(-1, _BLOCK)


def _unblocked(blocks: Tensor, like: Tensor) -> Tensor:
    return blocks.flatten()[: like.numel()].view(like.shape)
