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
from .stochastic_rounding import draw, stochastic_round
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

    def stored(name: str, path: str, wide: Tensor, step: Tensor) -> tuple[Tensor, Tensor | None]:
        value = wide.sqrt() if name.endswith("_sq") else wide
        noise = draw(seed, step, f"{name} {path}", value)
        return (stochastic_round(value, noise), None) if bits == 16 else to_blocks(value, noise)

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
                path: stored(name, path, state, inner["step"]) if small(flat[path], state) else (state, None)
                for path, state in tree.flatten(values).items()
            }
            states[name] = with_replaced(values, {path: state for path, (state, _) in made.items()})
            scales[name] = updates_tree(values, {path: scale for path, (_, scale) in made.items() if scale is not None})
        return {"inner": states, "scales": scales}

    def init(params: Tree) -> Tree:
        return packed(optimizer.init(params), params)

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

        def write(into: Tensor, value: Tensor) -> None:
            into.copy_(value if skip is None else torch.where(skip, into, value))

        for path, grad in given.items():
            own = {name: values[path] for name, values in states.items() if path in values}
            kept = [name for name, state in own.items() if state.dtype != flat[path].dtype]
            wide = {name: read(name, own[name], scales[name].get(path)) if name in kept else own[name] for name in own}
            one = {"step": step.clone(), **{name: _alone(path, wide[name]) if name in wide else {} for name in names}}
            inner_apply(_alone(path, grad), one, _alone(path, flat[path]), skip=skip)
            for name in kept:
                state, scale = stored(name, path, wide[name], step + 1)
                write(own[name], state)
                if scale is not None:
                    write(scales[name][path], scale)
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


def to_blocks(value: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """(float8 codes as uint8 in the shape of `value`, scales [blocks, 1]); noise: as in `stochastic_round`."""
    blocks = _blocks(value)
    scales = scale_of(blocks.abs().amax(-1, keepdim=True), _FORMAT)
    most = torch.finfo(_FORMAT).max
    scaled = _unblocked(blocks / scales, value).clamp_(-most, most)
    moved = (scaled.view(torch.int32) + (noise << (_LOW - 16))) & ~((1 << _LOW) - 1)
    return moved.view(torch.float32).clamp_(-most, most).to(_FORMAT).view(torch.uint8), scales


def from_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """The fp32 values of a result of `to_blocks`."""
    return _unblocked(_blocks(codes.view(_FORMAT).float()) * scales, codes)


def _blocks(x: Tensor) -> Tensor:
    more = -x.numel() % _BLOCK
    flat = x.flatten()
    return (F.pad(flat, (0, more)) if more else flat).view(-1, _BLOCK)


def _unblocked(blocks: Tensor, like: Tensor) -> Tensor:
    return blocks.flatten()[: like.numel()].view(like.shape)
