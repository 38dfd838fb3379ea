"""The stacks of layers that a pipeline runs one after the other: one, or an encoder and then its decoder.

Layers are numbered over all stacks. A stage that begins a stack embeds its inputs, and the one that begins a decoder
has first made the memory of the encoder's hidden states, which all stages after it pass on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fnmodels import family_of
from fnmodels.models.common.family import stored_layers
from fnmodels.models.common.registry import stack_configs
from fnmodels.tree import Tree


@dataclass(frozen=True)
class Stack:
    """Layers lo <= i < hi of the model. name: its entry of params, inputs, masks and tables; "": all of them."""

    name: str
    config: Any
    lo: int
    hi: int

    def part(self, tree: Tree) -> Tree:
        """The stack's own part of inputs, masks or tables."""
        return tree[self.name] if self.name else tree

    def within(self, lo: int, hi: int) -> range:
        """The model's layers lo <= i < hi that are of this stack, by their number in it."""
        return range(max(lo, self.lo) - self.lo, max(min(hi, self.hi), self.lo) - self.lo)

    def stored(self, lo: int, hi: int) -> tuple[int, ...]:
        """The layers in params of `within`; passes of a loop have the same ones."""
        stored = stored_layers(self.config, family_of(self.config).kinds(self.config))
        return tuple(dict.fromkeys(stored[index] for index in self.within(lo, hi)))


def stacks_of(config: Any) -> tuple[Stack, ...]:
    """The stacks of a model, in the order in which they run."""
    found: list[Stack] = []
    for name, own in (stack_configs(config) or {"": config}).items():
        lo = found[-1].hi if found else 0
        found.append(Stack(name, own, lo, lo + len(family_of(own).kinds(own))))
    return tuple(found)


def numbered(layers: Mapping[Any, Tree] | Sequence[Tree]) -> dict[int, Tree]:
    """{number: layer} of a list, or of a dict whose keys are numbers or strings of them."""
    pairs = layers.items() if isinstance(layers, Mapping) else enumerate(layers)
    return {int(index): layer for index, layer in pairs}


def layers_of(params: Tree, stack: Stack) -> dict[int, Tree]:
    """{number in the stack: layer} of those that the params have; they may be a stage's share."""
    return numbered(stack.part(params).get("layers", {})) if not stack.name or stack.name in params else {}
