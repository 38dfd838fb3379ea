"""`SavedStep`: a decoding step as machine code in a file, which later processes load in milliseconds.

torch.export takes the graph of `prepare_step` and `decode_`, and AOTInductor compiles it once per model, number of
rows and capacity. A call of it passes tensors to a shared library: neither Python nor the dispatcher has a part in it.
The files stand in $XDG_CACHE_HOME/fnmodels, or below ~/.cache, where this user alone may write; their names have the
digest of all that the code depends on.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.files import (
    WRITING,
    cache_folder,
    check_file,
    private_folder,
    read_bytes,
    remove_abandoned,
    replace_file,
)
from fnmodels.inputs.values import has_values
from fnmodels.models.common.family import DecoderConfig
from fnmodels.ops.cpu.machine import machine
from fnmodels.ops.torch_compilation import compile_to_file, has_compiler_to_files, load_compiled
from fnmodels.options import ForwardOptions
from fnmodels.run_params import RunParams
from fnmodels.tree import Tree

from .captured import finite
from .compiled import BLOCK
from .prepare import prepare_step
from .step import logits_at, step_on
from .value import Cache, consume, known_clean

Code = Callable[[list[Tensor]], list[Tensor]]
PLAIN = ("kernel", "experts")  # options that are strings
_LOADED = 16  # files that a process holds at most
_codes: dict[Path, Code] = {}


@dataclass(frozen=True)
class SavedStep:
    """A `DecodingStep` for one token per row on the CPU, whose code is read from a file or compiled into it.

    It computes what `fnmodels.compiled_step` does, up to the rounding of fused code, and does not check values either.
    """

    config: DecoderConfig
    options: ForwardOptions
    params: Tree
    leaves: list[Tensor]  # of params

    def file(self, cache: Cache, *, all_slots: bool = False) -> Path:
        """Path of the code for these sizes, which need not exist. all_slots: that of steps that read all slots."""
        return cache_folder() / f"step-{_digest(self, cache, all_slots or _most_blocks(cache) is None)}.pt2"

    def is_ready(self, cache: Cache) -> bool:
        """Whether the code for these sizes was compiled before, by this process or another."""
        return self.file(cache).is_file()

    @torch.no_grad()
    def __call__(
        self,
        params: Tree,
        tokens: Tensor,
        cache: Cache,
        *,
        segment_ids: Tensor | None = None,
        length: int | Tensor | None = None,
    ) -> tuple[Tensor, Cache]:
        """(logits [B, 1, V], cache) of tokens [B, 1]; the cache that it is given is used up.

        params: those of `saved_step`. ValueError for others, and for several tokens per row.
        """
        if params is not self.params or tokens.shape[1] != 1:
            raise ValueError("A saved step is of the params that it was made of, and of one token per row.")
        cache = finite(cache)
        ids = torch.ones_like(tokens) if segment_ids is None else segment_ids
        size = torch.as_tensor(cache.length if length is None else length).expand(tokens.shape[0]).contiguous()
        blocks = _blocks(cache, ids)
        given = [*self.leaves, tokens.contiguous(), ids.contiguous(), size, *_tensors(cache)]
        given = given if blocks is None else [*given, blocks]
        known = vars(cache).get("_code", (None, None))
        code: Code = known[1] if known[0] == (blocks is None) else self._code(cache, given, blocks)
        results = code(given)
        after = known_clean(_rebuilt(cache, results[1:]))
        consume(cache)
        object.__setattr__(after, "_code", (blocks is None, code))  # its sizes are the same
        return results[0], after

    def _code(self, cache: Cache, given: list[Tensor], blocks: Tensor | None) -> Code:
        file = self.file(cache, all_slots=blocks is None)
        if file not in _codes:
            while len(_codes) >= _LOADED:
                del _codes[next(iter(_codes))]
            _codes[file] = _loaded(file) or _compiled(
                file, self, cache, given, None if blocks is None else _most_blocks(cache)
            )
        return _codes[file]


def saved_step(config: DecoderConfig, params: Tree, **options: Any) -> SavedStep | None:
    """The step of a model; None where no file can hold it.

    That is under options beside `PLAIN`, with parameters that are not plain tensors on the CPU, such as packed or
    sharded ones, and with a torch that cannot compile to files.
    """
    given = ForwardOptions(**{name: value for name, value in options.items() if name in PLAIN})
    others = [name for name, value in options.items() if name not in PLAIN and value is not None]
    if others or given.invariant or not isinstance(given.kernel, str) or not isinstance(given.experts, str):
        return None
    if isinstance(params, RunParams) or not has_compiler_to_files():
        return None
    leaves = tree.leaves(params)
    if not all(has_values(leaf) and leaf.is_cpu and leaf.layout is torch.strided for leaf in leaves):
        return None
    return SavedStep(config, given, params, leaves)


def _tensors(cache: Cache) -> list[Tensor]:
    return [*tree.leaves(cache.layers), *tree.leaves(cache.slots), *tree.leaves(cache.memory)]


def _rebuilt(cache: Cache, leaves: Iterable[Tensor]) -> Cache:
    """The cache with other tensors, in the order of `_tensors`; that of a step ends before the memory."""
    rest = iter(leaves)
    layers = tuple({name: next(rest) for name in entry} for entry in cache.layers)
    slots = tree.map(lambda _: next(rest), cache.slots)
    memory = tree.map(lambda kept: next(rest, kept), cache.memory)
    return Cache(layers, slots, cache.kinds, cache.length, memory)


def _blocks(cache: Cache, ids: Tensor) -> Tensor | None:
    """An empty tensor [blocks, 0]: how many blocks of slots the fullest row fills after the step, at least 2.

    None: all slots are read, as in rings, in small caches, and where the last block is begun.
    """
    most = _most_blocks(cache)
    if most is None:
        return None
    held = next(slots.segments for slots in cache.slots.values() if not slots.ring)
    filled = max((held.count_nonzero(1) + (ids[:, 0] > 0)).tolist())
    blocks = max(2, -(-filled // BLOCK))
    return torch.empty(blocks, 0) if blocks <= most else None


def _most_blocks(cache: Cache) -> int | None:
    """The blocks of slots that are read at most by steps that do not read all: those before the last one."""
    rooms = {slots.segments.shape[1] for slots in cache.slots.values() if not slots.ring}
    room = rooms.pop() if len(rooms) == 1 else 0
    return (room - 1) // BLOCK if room > 3 * BLOCK else None


def _compiled(file: Path, step: SavedStep, like: Cache, given: list[Tensor], most: int | None) -> Code:
    """The code of a step with tensors as these, written to the file. most: see `_most_blocks`; None: all are read."""
    config = step.config

    def graph(*flat: Tensor) -> tuple[Tensor, ...]:
        rest = iter(flat)
        params = tree.map(lambda _: next(rest), step.params)
        tokens, ids, length = next(rest), next(rest), next(rest)
        cache = _rebuilt(like, rest)
        filled = None if most is None else flat[-1].shape[0] * BLOCK
        prepared = prepare_step(config, tokens, cache, segment_ids=ids, length=length)
        x, after = step_on(params, prepared, cache, config, step.options, inplace=True, clean=True, filled=filled)
        logits = logits_at(params, x, prepared[0], config, "all", None)
        return (logits, *tree.leaves(after.layers), *tree.leaves(after.slots))

    private_folder(file.parent)
    remove_abandoned(file.parent)
    unfinished = file.with_name(f"{WRITING}{os.getpid()}-{file.name}")
    compile_to_file(graph, given, unfinished, sizes_of_last=None if most is None else (2, most))
    replace_file(unfinished, file)
    return load_compiled(file)


def _loaded(file: Path) -> Code | None:
    """The code in a file; None if there is none, or a damaged one, which is removed."""
    if not file.is_file():
        return None
    check_file(file)
    try:
        with zipfile.ZipFile(io.BytesIO(read_bytes(file))) as package:
            damaged = package.testzip()
        if damaged is None:
            return load_compiled(file)
    except (RuntimeError, zipfile.BadZipFile, NotImplementedError, EOFError, OSError):
        pass
    file.unlink(missing_ok=True)
    return None


def _digest(step: SavedStep, cache: Cache, all_slots: bool) -> str:
    """Digest of all that the code depends on: model, sizes, our code, torch, the processor, the number of threads."""
    sizes = [(list(t.shape), _strides(t), str(t.dtype)) for t in (*step.leaves, *_tensors(cache))]
    structure = repr(tree.structure((step.params, cache)))
    facts = [repr(step.config), repr(step.options), structure, cache.kinds, cache.length, all_slots, sizes]
    return hashlib.sha256(json.dumps([_surroundings(), torch.get_num_threads(), facts]).encode()).hexdigest()[:32]


def _strides(t: Tensor) -> list[int]:
    """The strides, where they say something: a dimension of size 1 may have any."""
    return [stride if size > 1 else 0 for size, stride in zip(t.shape, t.stride(), strict=True)]


@functools.cache
def _surroundings() -> list[Any]:
    """The processor, torch, and the code of this package."""
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    code = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    return [machine(), torch.backends.cpu.get_cpu_capability(), code]
