"""`Cache` and `Slots`: what a model holds of the tokens before, as a value."""

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.inputs.values import has_values
from fnmodels.ops.slots import Entry
from fnmodels.ops.torch_internals import versions


@tree.pytree
@dataclass(frozen=True)
class Slots:
    """The tokens in the C slots of each row.

    Args:
        positions: int64 [B, C], those of masks, which count tokens.
        segments: int64 [B, C], the document of each token; 0 is an empty slot.
        spans: int64 [B, C], the image that a token belongs to, of those whose tokens see each other, from 1; 0 for
            others; None where there were none.
        ring: Whether a token at position p stands in slot p % C; else tokens stand in the order of their arrival.
        highest: int64 [B, C], of a model with rotary positions of several axes, the highest on any axis of the token's
            document up to this token; text goes on after it.
        tokens: int64 [B, C], of a model that embeds n-grams, the ids; -1 of a token that was a vector.
    """

    positions: Tensor
    segments: Tensor
    spans: Tensor | None
    ring: bool = tree.static()
    highest: Tensor | None = None
    tokens: Tensor | None = None

    @property
    def occupied(self) -> Tensor:
        """bool [B, C]."""
        return self.segments > 0

    def index_of(self, positions: Tensor, segments: Tensor) -> Tensor:
        """The slot of each new token.

        Args:
            positions: int64 [B, S].
            segments: int64 [B, S].

        Returns:
            int64 [B, S]; C for a token that is not written.
        """
        room, valid = self.segments.shape[1], segments > 0
        if self.ring:  # only the last tokens of a row, so that one slot is written once
            newest = positions.where(valid, -1).amax(dim=1, keepdim=True)
            return (positions % room).where(valid & (positions > newest - room), room)
        index = self.occupied.sum(dim=1, keepdim=True) + valid.cumsum(dim=1) - 1
        return index.where(valid & (index < room), room)


@tree.pytree
@dataclass(frozen=True)
class Cache:
    """The cache of generation, a value: `decode_` writes into it and returns a new one; every use of the old one
    raises.

    Attention layers hold k [B, C, G, H] and v [B, C, G, Hv], latent attention latent [B, C, rank] and rope [B, C, R].
    With kv_dtype=torch.int8 all of these are int8, with scales k_scale [B, C, G] and so on. Recurrent layers hold what
    their blocks keep, without slots. Layers with cross attention also hold memory_k and memory_v [B, K, G, H].

    Args:
        layers: Per layer a dict of tensors, batch first.
        slots: Per kind of layer with slots, what stands in them.
        kinds: The kind of each layer.
        length: What length-dependent rotary scalings read, the same for an entire generation, so that all keys have one
            base.
        memory: Of a decoder that attends to an encoder, where the encoder's tokens stand, see `fnmodels.cache.encode`.
    """

    layers: tuple[Entry, ...]
    slots: dict[str, Slots]
    kinds: tuple[str, ...] = tree.static()
    length: int = tree.static()
    memory: Slots | None = None

    def __repr__(self) -> str:
        """The sizes, not the tensors: Cache(rows=2, layers=4 (full), length=64, 0.1 MB)."""
        held = [leaf for leaf in tree.leaves(self.layers) if isinstance(leaf, Tensor)]
        rows, size = len(held[0]) if held else 0, sum(leaf.nbytes for leaf in held)
        kinds = ", ".join(dict.fromkeys(self.kinds))
        return f"Cache(rows={rows}, layers={len(self.layers)} ({kinds}), length={self.length}, {size / 1e6:.1f} MB)"

    def __getattr__(self, name: str) -> NoReturn:
        # Python calls this only for missing attributes: a field that `decode_` deleted, or a typo.
        if name in {field.name for field in fields(self)}:
            raise RuntimeError(
                "This cache was used up by decode_, which writes into its tensors: continue with the cache that it "
                "returned, or use decode, which leaves its argument as it is."
            )
        raise AttributeError(f"A Cache has layers, slots, kinds, length and memory, no {name!r}.")


def consume(cache: Cache) -> None:
    """Empties a cache whose tensors go to its successor."""
    vars(cache).clear()


class Facts(NamedTuple):
    """Facts about a cache, valid until its tensors are written to.

    clean: see `is_clean`. looked: whether `known_rows.rows_of` has looked for rows. rows: what it found. steps:
    `next_steps.NextSteps` of these rows. choices: `step_plan.Choices` of these steps.
    """

    clean: bool = False
    looked: bool = False
    rows: Any = None
    steps: Any = None
    choices: Any = None


_NOTHING = Facts()


def facts_of(cache: Cache) -> Facts:
    """The facts noted on a cache; none where torch does not count writes, as in inference mode."""
    if torch.compiler.is_compiling():
        return _NOTHING
    noted: tuple[list[int], Facts] | None = vars(cache).get("_facts")
    return _NOTHING if noted is None or noted[0] != versions(_tensors(cache)) else noted[1]


def with_facts(cache: Cache, facts: Facts) -> Cache:
    """The cache, with the facts noted on it."""
    if not torch.compiler.is_compiling() and (writes := versions(_tensors(cache))) is not None:
        object.__setattr__(cache, "_facts", (writes, facts))
    return cache


def known_clean(cache: Cache) -> Cache:
    """Marks a cache whose empty slots hold finite values, as `is_clean` finds out; only where memory is plain."""
    return with_facts(cache, facts_of(cache)._replace(clean=True)) if is_plain(cache) else cache


def is_plain(cache: Cache, *, before: Cache | None = None) -> bool:
    """Whether the memory of all layers is plain. before: a cache of which this is known, for tensors that it shares."""
    if torch.compiler.is_compiling():
        return False
    same = before is not None and all(map(operator.is_, _of_layers(before), _of_layers(cache)))
    return same or all(map(has_values, _of_layers(cache)))


def is_clean(cache: Cache) -> bool:
    """Whether empty slots are known to be finite: the library made this cache, and nothing else wrote into it.

    A masked key has weight 0, and 0 times NaN is NaN, so other caches have their empty slots set to zero in each call.
    """
    return facts_of(cache).clean


def _of_layers(cache: Cache) -> Iterator[Tensor]:
    """The tensors of the layers; `tree.leaves`, which checks keys, takes ten times as long in each step."""
    return itertools.chain.from_iterable(map(dict.values, cache.layers))


def _tensors(cache: Cache) -> Iterator[Tensor]:
    """The tensors of the layers, and those of the slots that say which tokens they hold."""
    slots = [tensor for slots in cache.slots.values() for tensor in (slots.positions, slots.segments)]
    return itertools.chain(slots, _of_layers(cache))
