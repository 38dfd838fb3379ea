"""Parameter initialization from a family's spec: random values, meta tensors, and the number of parameters."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.models.common.family import DecoderConfig, field_of
from fnmodels.models.common.heads import LABELLED
from fnmodels.models.common.registry import family_of
from fnmodels.models.common.spec import Constant, InTurn, Leaf, LogUniform, Parts, Sinusoids, Uniform
from fnmodels.tree import Tree
from params.sharding import Sharding, plan_by_path

BLOCK = 1 << 20  # elements drawn by one generator; changing it changes what every seed draws


def leaf_dtype(leaf: Leaf, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a leaf is made or loaded for a model in `dtype` (None: as the spec declares)."""
    if dtype is None:
        return leaf.dtype
    return torch.promote_types(dtype, leaf.dtype) if leaf.keep_dtype else dtype


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype must be None or a floating torch.dtype, not {dtype!r}.")


def init(
    config: DecoderConfig,
    seed: int | Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    plan: Tree | None = None,
) -> Tree:
    """Fresh parameters, each leaf drawn by generators seeded by (seed, path), on the CPU and in fp32.

    So a leaf has the same values whatever else is drawn, in what order, on which device and by which rank.

    Args:
        config: The model's config.
        seed: An int, or a 0-d integer tensor, which torch.func.vmap may map: vmap(lambda seed: init(config,
            seed))(seeds) stacks the parameters of each seed. With a plan it is an int.
        dtype: Of the leaves; None keeps the dtypes of the spec (fp32).
        device: Where the leaves go.
        plan: Of `params.plan` with a DeviceMesh: leaves become DTensors, and each rank draws only its shard, equal to
            that slice of the leaf on one process. A plan for some pipeline stages draws the leaves that it names.

    Returns:
        The tree of parameters.

    Raises:
        TypeError: The seed is no integer, or the dtype is not floating.
    """
    _check_dtype(dtype)
    leaves = tree.flatten(family_of(config).spec(config))
    if isinstance(seed, Tensor):
        if seed.ndim or seed.is_floating_point() or seed.dtype == torch.bool or plan is not None:
            raise TypeError(
                f"seed must be an int or a 0-d integer tensor, without a plan, not {seed.dtype!s} "
                f"{list(seed.shape)}{'' if plan is None else ' with a plan'}."
            )

        def drawn_by(path: str, leaf: Leaf) -> Tensor:
            return _DrawnBySeed.apply(lambda n: draw(leaf, n, path).to(device, leaf_dtype(leaf, dtype)), seed)

        return tree.unflatten({path: drawn_by(path, leaf) for path, leaf in leaves.items()})
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise TypeError(f"seed must be an int or a 0-d integer tensor, not {seed!r}.")
    if plan is None:
        made = {path: draw(leaf, seed, path).to(device, leaf_dtype(leaf, dtype)) for path, leaf in leaves.items()}
        return tree.unflatten(made)
    shardings = plan_by_path(plan, leaves)
    paths = iter(shardings)

    def drawn(how: Sharding) -> Tensor:
        path = next(paths)
        leaf = leaves[path]
        return how.distribute(draw(leaf, seed, path, how.local_box()).to(device, leaf_dtype(leaf, dtype)))

    return tree.map(drawn, plan)


class _DrawnBySeed(torch.autograd.Function):
    """make(seed) for each of the seeds, a tensor of any shape, in front of the result's dimensions."""

    @staticmethod
    def forward(make: Callable[[int], Tensor], seeds: Tensor) -> Tensor:
        if not seeds.ndim:
            return make(int(seeds))
        return torch.stack([_DrawnBySeed.forward(make, seed) for seed in seeds])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], make: Callable[[int], Tensor], seeds: Tensor) -> tuple[Tensor, int]:
        return _DrawnBySeed.apply(make, seeds.movedim(in_dims[1], 0)), 0

    @staticmethod
    def jvp(ctx: Any, *tangents: None) -> None:
        """Seeds are integers, so the values have no tangent."""


def new_head(
    config: DecoderConfig, params: Tree, *, head: str, num_labels: int, seed: int = 0, plan: Tree | None = None
) -> tuple[DecoderConfig, Tree]:
    """The same model with a new head (`fnmodels.models.common.heads`), drawn as by `init`.

    A value model for PPO is `new_head(config, params, head="tokens", num_labels=1)`, a reward model has the head
    "classification".

    Args:
        config: The model's config.
        params: Its parameters; leaves other than the head's are returned as they are, not copied. So are parts before
            the outputs, such as poolers, of a head of the same kind.
        head: "classification", "tokens", "question_answering" or another head of the family.
        num_labels: The number of outputs of the head.
        seed: Of the new head's leaves.
        plan: For the result, of DTensors; None: plain tensors.

    Returns:
        The config with the head, and the tree of parameters.
    """
    fields: Any = {"head": head, "num_labels": num_labels}
    made = replace(config, **fields)
    kept, leaves = tree.flatten(params), tree.flatten(family_of(made).spec(made))
    like, shardings = kept["embed_tokens"], {} if plan is None else tree.flatten(plan)

    def drawn(path: str) -> Tensor:
        if plan is None:
            return draw(leaves[path], seed, path).to(like)
        local = draw(leaves[path], seed, path, shardings[path].local_box())
        return shardings[path].distribute(local.to(like.to_local()))

    wanted = leaves if plan is None else shardings
    new = wanted.keys() - kept.keys() | _outputs(made, leaves)
    if field_of(config, "head") != head:  # of one name in two heads, for other uses
        new |= {path for path in wanted if path.startswith("head.")}
    new &= wanted.keys()
    return made, tree.unflatten({path: drawn(path) if path in new else kept[path] for path in wanted})


def _outputs(config: DecoderConfig, leaves: dict[str, Leaf]) -> set[str]:
    """The paths of the leaves whose shape follows the number of labels."""
    if field_of(config, "head") not in LABELLED:
        return set()
    more: Any = {"num_labels": field_of(config, "num_labels") + 1, "problem_type": ""}
    others = tree.flatten(family_of(config).spec(replace(config, **more)))
    return {path for path, leaf in leaves.items() if leaf.shape != others[path].shape}


def draw(leaf: Leaf, seed: int, path: str, box: tuple[slice, ...] | None = None) -> Tensor:
    """The initial values of one leaf, or of its shard `box` (a slice per dimension), fp32 on the CPU.

    Each generator draws full rows of the leaf, at most BLOCK elements, so that a shard costs little more than its size.
    """
    box = tuple(slice(0, n) for n in leaf.shape) if box is None else box
    shape = tuple(s.stop - s.start for s in box)
    if isinstance(leaf.init, Constant):
        return torch.full(shape, leaf.init.value)
    if isinstance(leaf.init, Parts):
        return torch.tensor(leaf.init.values).repeat_interleave(leaf.shape[0] // len(leaf.init.values))[box]
    if isinstance(leaf.init, Sinusoids):
        return _sinusoids(leaf.shape, leaf.init.longest)[box].clone()
    if isinstance(leaf.init, InTurn):
        return (torch.arange(math.prod(leaf.shape)).view(leaf.shape)[box] % leaf.init.count).float()
    out = torch.empty(shape)
    rows, first = max(1, BLOCK // max(1, math.prod(leaf.shape[1:]))), box[0]
    for block in range(first.start // rows, -(-first.stop // rows)):
        start, stop = block * rows, min((block + 1) * rows, leaf.shape[0])
        name = f"{seed}/{path}/{block}" if block else f"{seed}/{path}"
        digest = hashlib.sha256(name.encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        drawn = torch.empty(stop - start, *leaf.shape[1:])
        if isinstance(leaf.init, LogUniform):
            drawn.uniform_(leaf.init.low, leaf.init.high, generator=generator).log_()
        elif isinstance(leaf.init, Uniform):
            drawn.uniform_(leaf.init.low, leaf.init.high, generator=generator)
        else:
            drawn.normal_(0.0, leaf.init.std, generator=generator)
        low, high = max(start, first.start), min(stop, first.stop)
        out[low - first.start : high - first.start] = drawn[low - start : high - start][(slice(None), *box[1:])]
    return out


def _sinusoids(shape: tuple[int, ...], longest: float) -> Tensor:
    """fp32 [positions, D] of `Sinusoids`, from angles in fp64."""
    half = shape[1] // 2
    rates = torch.exp(-math.log(longest) / (half - 1) * torch.arange(half, dtype=torch.float64))
    angles = torch.arange(shape[0], dtype=torch.float64)[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), dim=1).float()


def abstract(config: DecoderConfig, *, dtype: torch.dtype | None = None) -> Tree:
    """The parameter tree on the meta device: shapes and dtypes without memory.

    Args:
        config: The model's config.
        dtype: Of the leaves; None keeps the dtypes of the spec (fp32).

    Returns:
        The tree of meta tensors.
    """
    _check_dtype(dtype)
    spec = family_of(config).spec(config)
    return tree.map(lambda leaf: torch.empty(leaf.shape, dtype=leaf_dtype(leaf, dtype), device="meta"), spec)


def count(config: DecoderConfig) -> int:
    """The number of parameters of a model.

    Args:
        config: The model's config.

    Returns:
        The number of elements of all leaves; a tied head counts once.
    """
    return sum(math.prod(leaf.shape) for leaf in tree.leaves(family_of(config).spec(config)))
