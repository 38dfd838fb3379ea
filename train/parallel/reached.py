"""Trainable parameters that a loss depends on over a mesh, where those gathered together have gradients together.

A gathered parameter that the loss does not use has a gradient of zeros, so weight decay would silently shrink it. Hooks
on the gathered tensors tell the two apart. They are set, and ranks exchange what they saw, until a call has reached
every parameter: as a rule the first one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fnmodels import tree
from fnmodels.tree import Tree
from train.batch import Entries
from train.gradients import Sums

from .agreement import everyone
from .mesh import whole_groups
from .placement import Placed


@dataclass(eq=False)
class Reached:
    """The paths of the parameters that had a gradient in this call; `every`: a call has reached every parameter."""

    paths: set[str] = field(default_factory=set)
    every: bool = False

    def watch(self, path: str, x: Tensor) -> None:
        """Notes the path when x gets a gradient; nothing once a call has reached every parameter."""

        def note(grad: Tensor | None) -> None:
            if grad is not None:
                self.paths.add(path)

        if not self.every and x.requires_grad:
            x.register_hook(note)


def with_unreached(run: Callable[..., Sums], reached: Reached, placed: Placed) -> Callable[..., Sums]:
    """`run`, a `train.gradients.gradient_sums` of parameters that `reached` watches, with `unreached` of all ranks."""
    trainable = {path for path, trains in tree.flatten(placed.trains).items() if trains}
    groups = whole_groups(placed.devices)

    def missing() -> frozenset[str]:
        """The trainable parameters of all ranks that no rank's loss has reached in this call."""
        if reached.every:
            return frozenset()
        of_ranks = everyone((trainable, reached.paths), groups)
        held, seen = (set().union(*sets) for sets in zip(*of_ranks, strict=True))
        reached.every = held == seen
        return frozenset(held - seen)

    def sums(params: Tree, parts: Sequence[Entries], *, divide: bool = True) -> Sums:
        reached.paths.clear()
        found = run(params, parts, divide=divide)
        found.unreached = missing()
        return found

    return sums
