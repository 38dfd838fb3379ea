"""compile="auto": whether the steps of a generation are compiled, decided before its first token.

A step without a compiler spends `OVERHEAD` on Python and on launching operations; compiled code spends nearly nothing.
Compiled products of one row read weights at the memory's bandwidth, the libraries' do not: `ONE_ROW` for each weight.
Compiling a step takes `COMPILING`, once for a model, its sizes and a machine, and loading it `LOADING`.
benchmarks/small.py and benchmarks/generate.py measure all four.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fnmodels
from fnmodels import Cache, tree
from fnmodels.cache import DecodingStep
from fnmodels.cache.compiled import BLOCK
from fnmodels.cache.saved import saved_step
from fnmodels.models.common.family import DecoderConfig
from fnmodels.options import is_invariant
from fnmodels.tree import Tree

from .prompts import activations
from .requests import Request, capacity_of

OVERHEAD = 0.2e-3, 0.13e-3  # seconds of a step, and of each of its layers
ONE_ROW = 0.2e-9  # seconds of a step of one row, for each weight
COMPILING = 8.0, 3.0  # seconds, and of each layer
LOADING = 0.1  # seconds


@dataclass(frozen=True)
class CompileChoice:
    """The way in which steps run ("none", "step" or "graph"), the reason, and the compiled step."""

    how: str
    reason: str
    step: DecodingStep | None = None


def roomy(capacity: int) -> int:
    """The capacity that requests of about this length share, so that they share compiled code too.

    It is up to a quarter more and a block, which stays empty: steps that read the last block need code of their own.
    """
    size, needed = 4 * BLOCK, capacity + BLOCK
    while size * 7 // 4 < needed:
        size *= 2
    return next(size * quarters // 4 for quarters in (4, 5, 6, 7) if size * quarters // 4 >= needed)


def choose(
    how: str | DecodingStep,
    params: Tree,
    config: DecoderConfig,
    cache: Cache,
    steps: int,
    options: Mapping[str, Any],
) -> CompileChoice:
    """The way to run so many steps on such a cache. how: `compile` of `serve`; options: of `fnmodels.forward`."""
    if callable(how):
        return CompileChoice("step", "the caller gave it", how)
    if how == "graph":
        return CompileChoice(how, "the caller asked for it", fnmodels.cache.captured_step(config, **options))
    if how == "step":
        saved = saved_step(config, params, **options)
        return CompileChoice(how, "the caller asked for it", saved or fnmodels.compiled_step(config, **options))
    if how == "none":
        return CompileChoice("none", "the caller asked for it")
    return _automatic(params, config, cache, steps, options)


def _automatic(
    params: Tree, config: DecoderConfig, cache: Cache, steps: int, options: Mapping[str, Any]
) -> CompileChoice:
    if is_invariant(options.get("kernel", "auto")):
        return CompileChoice("none", 'kernel="invariant" has the bits of training, and compiled code rounds otherwise')
    step = saved_step(config, params, **options)
    if step is None:
        return CompileChoice("none", "no file holds steps with these options, parameters, device or torch")
    layers = config.num_hidden_layers
    gain = steps * saved_per_step(params, config, cache)
    if gain <= LOADING:
        return CompileChoice("none", f"compiled code would save {gain:.2f} s in {steps} steps")
    ready = step.is_ready(cache)
    cost = LOADING if ready else COMPILING[0] + COMPILING[1] * layers
    what = "loading the compiled step" if ready else "compiling a step"
    compares = f"{what} takes about {cost:.1f} s and saves {gain:.1f} s in {steps} steps"
    return CompileChoice("step", compares, step) if gain > cost else CompileChoice("none", compares)


def saved_per_step(params: Tree, config: DecoderConfig, cache: Cache) -> float:
    """About how many seconds compiled code saves in a step on a cache of these sizes."""
    saved = OVERHEAD[0] + OVERHEAD[1] * config.num_hidden_layers
    if len(next(tensor for entry in cache.layers for tensor in entry.values())) > 1:
        return saved
    read = {path: leaf for path, leaf in tree.flatten(params).items() if leaf.ndim == 2}  # experts are read in part
    if not config.tie_word_embeddings:
        read.pop("embed_tokens", None)
    return saved + ONE_ROW * sum(leaf.numel() for leaf in read.values())


def steps_of(requests: Sequence[Request], slots: int) -> int:
    """About how many steps these requests take."""
    sizes = [request.max_new for request in requests]
    return max([*sizes, sum(sizes) // max(1, slots)], default=0)


def explain_compile(
    params: Tree,
    config: DecoderConfig,
    *,
    rows: int = 1,
    prompt: int = 1,
    max_new: int,
    dtype: Any = None,
    kv_dtype: Any = None,
    **options: Any,
) -> str:
    """Explains in one sentence what compile="auto" chooses for `rows` prompts of this many tokens.

    Args:
        params: of the model.
        config: of the model.
        rows: prompts that are answered at once.
        prompt: tokens of each.
        max_new: tokens of each answer.
        dtype: as for `generate`.
        kv_dtype: as for `generate`.
        options: as for `fnmodels.forward`.
    """
    capacity = roomy(capacity_of([Request([0] * prompt, max_new)]))
    cache = fnmodels.init_cache(config, rows, capacity, dtype=activations(params, dtype)[0], kv_dtype=kv_dtype)
    choice = choose("auto", params, config, cache, max_new, options)
    return f"{choice.how}: {choice.reason}."
