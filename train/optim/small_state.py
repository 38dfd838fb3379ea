"""Optimizer states in 16 or 8 bits: the moments of AdamW in a half or a quarter of their memory."""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels import tree
from fnmodels.ops.float8 import scale_of
from fnmodels.tree import Tree

from .base import Optimizer, remake, updates_tree, with_replaced
from .cache_chunks import cache_chunks
from .stochastic_rounding import indices, key_of, noise, stochastic_round
from .wrappers import around

_MIN_ELEMENTS = 4096  # smaller leaves, norms and biases, keep their states: they take no memory
_BLOCK = 256  # elements that share a scale: 4 bytes more for 256
_FORMAT = torch.float8_e4m3fn
_LOW = 20  # bits that fp32 has below the last one of _FORMAT


def with_small_state(optimizer: Optimizer, *, bits: int = 8, seed: int = 0) -> Optimizer:
    """Keeps the states of large fp32 parameters in `bits` bits; the update itself is computed in fp32, leaf by leaf.

    16: bf16. 8: float8 (e4m3) with a scale for each block of 256 elements. States named ..._sq, which are squares, are
    kept as their roots, which halves the range of their exponents. Both round up or down at random, so that the mean is
    exact: a moment that decays by 1/1000 in a step would never leave its value if it were rounded to nearest. The
    random number is a function of (seed, number of the update, state, path, index), so a resumed run repeats it.

    The optimizer must treat elements independently (adamw, lion, sgd), and parameters may not be sharded. Wrap it in
    `with_master` for bf16 parameters. State: {inner, scales}, None in scales where there are none.
    """
    if bits not in (8, 16):
        raise ValueError(f"bits is {bits!r}; a state takes 8 or 16 bits.")
    if not optimizer.elementwise or optimizer.apply_ is None:
        raise ValueError(
            "with_small_state is for optimizers that treat elements independently: adamw, lion and sgd, inside of "
            "other wrappers."
        )
    inner_apply = optimizer.apply_

    def small(param: Tensor, state: Tensor) -> bool:
        return param.dtype == state.dtype == torch.float32 and param.numel() >= _MIN_ELEMENTS

    def stored(name: str, wide: Tensor, key: Tensor, index: Tensor) -> tuple[Tensor, Tensor | None]:
        """(a part of a state in `bits` bits, its scales); key, index: as in `noise`."""
        value = wide.sqrt() if name.endswith("_sq") else wide
        random = noise(key, index)
        return (stochastic_round(value, random), None) if bits == 16 else to_blocks(value, random)

    def key(name: str, path: str, step: Tensor) -> Tensor:
        return key_of(seed, step, f"{name} {path}")

    def read(name: str, state: Tensor, scales: Tensor | None) -> Tensor:
        value = state.float() if scales is None else from_blocks(state, scales)
        return value.square_() if name.endswith("_sq") else value

    def wide_states(opt_state: Tree, params: Tree) -> Iterator[tuple[str, str, Tensor, bool]]:
        """(name, path, state in its own dtype, whether it is kept small)."""
        flat = tree.flatten(params)
        for name, values in opt_state["inner"].items():
            scales = tree.flatten(opt_state["scales"].get(name))
            for path, state in tree.flatten(values).items() if name != "step" else ():
                kept = state.dtype != flat[path].dtype
                yield name, path, read(name, state, scales.get(path)) if kept else state, kept

    def packed(inner: Tree, params: Tree) -> Tree:
        flat, scales, states = tree.flatten(params), {}, {"step": inner["step"]}
        for name, values in inner.items():
            if name == "step":
                continue
            made = {
                path: stored(name, state, key(name, path, inner["step"]), indices(state))
                if small(flat[path], state)
                else (state, None)
                for path, state in tree.flatten(values).items()
            }
            states[name] = with_replaced(values, {path: state for path, (state, _) in made.items()})
            scales[name] = updates_tree(values, {path: scale for path, (_, scale) in made.items() if scale is not None})
        return {"inner": states, "scales": scales}

    def init(params: Tree) -> Tree:
        inner = optimizer.init(params)
        if not isinstance(inner, dict) or "step" not in inner:
            raise ValueError(
                "with_small_state packs the moments of one optimizer, such as adamw; put it inside of the groups of a "
                "partition, and inside of with_ema, with_master and chain."
            )
        return packed(inner, params)

    def update(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        wide: dict[str, dict[str, Tensor]] = {}
        for name, path, state, _ in wide_states(opt_state, params):
            wide.setdefault(name, {})[path] = state
        inner = {
            name: values if name == "step" else with_replaced(values, wide.get(name, {}))
            for name, values in opt_state["inner"].items()
        }
        updates, new = optimizer.update(grads, inner, params)
        return updates, packed(new, params)

    @torch.no_grad()
    def apply_(grads: Tree, opt_state: Tree, params: Tree, *, skip: Tensor | None = None) -> None:
        step, flat, given = opt_state["inner"]["step"], tree.flatten(params), tree.flatten(grads)
        names = [name for name in opt_state["inner"] if name != "step"]
        states = {name: tree.flatten(opt_state["inner"][name]) for name in names}
        scales = {name: tree.flatten(opt_state["scales"][name]) for name in names}

        known: dict[int, Tensor] = {}  # most parts have one size

        def index_like(part: Tensor) -> Tensor:
            if part.ndim != 1 or not part.is_cpu:  # a whole leaf
                return indices(part)
            if part.numel() not in known:
                known[part.numel()] = indices(part)
            return known[part.numel()]

        def write(into: Tensor, value: Tensor) -> None:
            into.copy_(value if skip is None else torch.where(skip, into, value))

        for path, grad in given.items():
            own = {name: values[path] for name, values in states.items() if path in values}
            kept = {name: key(name, path, step + 1) for name in own if own[name].dtype != flat[path].dtype}
            for first, (param, part, *parts) in cache_chunks(flat[path], grad, *own.values()):
                held, blocks = dict(zip(own, parts, strict=True)), _blocks_of(first, param)
                held_scales = {name: scales[name][path][blocks] for name in kept if path in scales[name]}
                wide = {
                    name: read(name, held[name], held_scales.get(name)) if name in kept else held[name] for name in own
                }
                one = {
                    "step": step.clone(),
                    **{name: _alone(path, wide[name]) if name in wide else {} for name in names},
                }
                inner_apply(_alone(path, part), one, _alone(path, param), skip=skip)
                for name in kept:
                    state, scale = stored(name, wide[name], kept[name] ^ first, index_like(param))
                    write(held[name], state)
                    if scale is not None:
                        write(held_scales[name], scale)
        step.add_(1 if skip is None else (~skip).to(step))

    remade = None
    if optimizer.remake is not None:
        remade = lambda **values: with_small_state(remake(optimizer, **values), bits=bits, seed=seed)  # noqa: E731
    # random numbers depend on the index within the full leaf, which a shard does not know
    made = around(optimizer, init, update, apply_)
    return replace(made, elementwise=False, per_leaf=True, remake=remade)


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
