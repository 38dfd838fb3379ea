"""Stochastic rounding: bf16 parameters that accumulate updates smaller than their last bit, without an fp32 copy."""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.ops.torch_internals import traced_as_constant, transformed
from fnmodels.tree import Tree

from .base import InPlace, Optimizer, apply_updates, count_up_, first_step, with_paths, with_traits
from .cache_chunks import cache_chunks
from .wrappers import around, widened

_LOW = 16  # bits that fp32 has below bf16's last one
_WORD = 0xFFFFFFFF
_FACTOR = 0x846CA68B - (1 << 32)  # lowbias32's second factor as an int32


def with_stochastic_rounding(optimizer: Optimizer, *, seed: int = 0) -> Optimizer:
    """Updates bf16 parameters in fp32 and rounds the result up or down at random, so that its mean is exact.

    An update of 1/100 of the distance between two neighbors in bf16 moves one parameter in a hundred by the whole
    distance, where rounding to nearest would move none (arXiv 2010.06192). Compared with `with_master` it saves the
    fp32 copy, 4 of 14 bytes per parameter with AdamW, at the price of noise; moments are fp32 here too, since bf16
    would lose their small changes. Parameters of other dtypes are updated without rounding.

    The random number is a function of (seed, number of the update, path, index), so a resumed run repeats it, and no
    global generator is touched. State: {inner, step}. The pure update is as in `with_master`. In place, fp32 parameters
    exist temporarily.

    The derivative of the pure update is that without rounding, as the mean is: rounding itself has none.

    Args:
        optimizer: The optimizer that computes the updates, in fp32.
        seed: Of the rounding.

    Returns:
        The optimizer around the other, for parameters that are not sharded.
    """

    def init(params: Tree) -> Tree:
        return {"inner": optimizer.init(tree.map(widened, params)), "step": first_step(params)}

    def update(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        wide, step = tree.map(widened, params), opt_state["step"] + 1
        changes, inner = optimizer.update(tree.map(widened, grads), opt_state["inner"], wide)
        old, new = tree.flatten(params), tree.flatten(apply_updates(wide, changes))

        def rounded(path: str, change: Tensor) -> Tensor:
            if old[path].dtype != torch.bfloat16:
                return change
            return _rounded(new[path], draw(seed, step, path, new[path])) - old[path].float()

        return with_paths(rounded, changes), {"inner": inner, "step": step}

    def bind(opt_state: Tree, params: Tree) -> InPlace:
        step, old = opt_state["step"], tree.flatten(params)

        @torch.no_grad()
        def run(grads: Sequence[Tensor | None], skip: Tensor | None) -> None:
            assert optimizer.bind is not None
            trained = {path for path, grad in zip(old, grads, strict=True) if grad is not None}
            wide = with_paths(lambda path, leaf: widened(leaf) if path in trained else leaf, params)
            run_inner = optimizer.bind(opt_state["inner"], wide)  # on these copies, which exist during this update
            run_inner([None if grad is None else widened(grad) for grad in grads], skip)
            new = tree.flatten(wide)
            for path in trained:
                if old[path].dtype == torch.bfloat16:  # a skipped value is representable, so rounding keeps it
                    key = key_of(seed, step + 1, path)
                    for first, (into, wide_part) in cache_chunks(old[path], new[path]):
                        into.copy_(stochastic_round(wide_part, noise(key ^ first, indices(into))))
            count_up_(step, skip)

        return run

    made = around(optimizer, init, update, bind, lambda inner: with_stochastic_rounding(inner, seed=seed))
    # random numbers depend on the index within the full leaf, which a shard does not know
    return with_traits(made, elementwise=False, for_shards=None)


def _rounded(wide: Tensor, bits: Tensor) -> Tensor:
    """`stochastic_round` as fp32, with the derivative of `wide` where one may be taken."""
    rounded = stochastic_round(wide, bits).float()
    return rounded + (wide - wide.detach()) if transformed() or wide.requires_grad else rounded


def stochastic_round(wide: Tensor, bits: Tensor) -> Tensor:
    """Rounds fp32 to one of its two neighbors in bf16, chosen by random bits.

    Args:
        wide: An fp32 tensor. Representable values, infinities and NaN do not change.
        bits: Even integers in 0..2^16-1 of the same shape; uniform ones make the mean of the result `wide`.

    Returns:
        The tensor in bf16.

    Raises:
        ValueError: `wide` is not fp32.
    """
    if wide.dtype != torch.float32:
        raise ValueError(f"Stochastic rounding is from float32 to bfloat16; the tensor is {wide.dtype}.")
    # The fp32 bits below bf16's are the distance from the neighbor towards 0.
    moved = (wide.view(torch.int32) + bits.to(torch.int32)).bitwise_and_(~((1 << _LOW) - 1))
    # A NaN whose payload ends in ones would become a number, so 0 x it is added; of the clamped value, for 0 x inf is
    # NaN. isnan and where would take ten times as long.
    return moved.view(torch.float32).add_(wide.clamp(-1, 1), alpha=0.0).to(torch.bfloat16)


def draw(seed: int, step: Tensor, path: str, like: Tensor) -> Tensor:
    """Even integers in 0..2^16-1, int32, of the shape of `like`: a hash of (seed, step, path, index).

    A hash instead of a generator: it is pure, does not wait for the device, and gives the same on every device.
    """
    return noise(key_of(seed, step, path), indices(like))


def key_of(seed: int, step: Tensor, path: str) -> Tensor:
    """The part of the hash of `draw` that all elements of a leaf share, 0-d int32."""
    mixed = _mix(_mix(step.to(torch.int64)) ^ _hash_of_leaf(seed, path))
    return (mixed & 0x7FFFFFFF).to(torch.int32)


@traced_as_constant
def _hash_of_leaf(seed: int, path: str) -> int:
    """A hash of seed and path: if the seed were added to the step, the next seed would repeat draws a step later."""
    return zlib.crc32(f"{seed} {path}".encode())


def indices(like: Tensor) -> Tensor:
    """0, 1, ... in the shape of `like`, int32."""
    return torch.arange(like.numel(), dtype=torch.int32, device=like.device).reshape(like.shape)


def noise(key: Tensor, index: Tensor) -> Tensor:
    """The numbers of `draw` for these indices. Of a part that begins at `first` (`cache_chunks`), key ^ first."""
    # Half a mix suffices here, in place and in int32, whose products wrap: 2 ns per parameter where _mix takes 35.
    x = (index ^ key.to(index.device)).mul_(0x7FEB352D)
    x ^= (x >> 15).bitwise_and_(0x1FFFF)  # int32 shifts copy the sign
    return x.mul_(_FACTOR).bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def _mix(x: Tensor) -> Tensor:
    """A mixing hash of 32 bits held in int64, where products with a factor of 31 bits do not overflow (lowbias32)."""
    x = x & _WORD
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * _FACTOR) & _WORD
    return x ^ (x >> 16)
