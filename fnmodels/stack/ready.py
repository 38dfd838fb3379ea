"""Masks and rotary tables in the form that layers read: made once for all layers, and noted for calls to come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fnmodels.inputs.mask import Mask, MaskLike, attention_part, with_attention
from fnmodels.inputs.order import Segments
from fnmodels.models.common.family import DecoderConfig, Family, LayerKind
from fnmodels.models.common.registry import family_of
from fnmodels.ops.attention.checks import layout_at_hand
from fnmodels.ops.attention.sdpa import ByIndex
from fnmodels.ops.attention.select import materialize
from fnmodels.ops.rotary import Rotation, is_rotating, laid_out
from fnmodels.ops.torch_internals import quiet, traced, versions
from fnmodels.options import USUAL, ForwardOptions
from fnmodels.stack.plan import StackPlan, parts_of

_NOTE = "_ready"
Batch = tuple[Mapping[str, MaskLike], Mapping[str, Any], Tensor | None]


class Ready(NamedTuple):
    """A batch as a call with the usual options has found it: masks and tables as its layers read them, no padding.

    It is noted on the mask that all its layers share, and holds until a tensor that it was made from is written to.
    Writes that torch does not count, through `.data` or a numpy array of the same memory, are not seen.
    parts: those of the family. x: sizes [B, S], dtype and device. raw: the table of each kind as it was given. read:
    the tensors of all these and of the mask; writes: their `versions`.
    """

    plan: StackPlan
    parts: tuple[Any, ...]
    x: tuple[Any, ...]
    valid: Tensor | None
    raw: Mapping[str, Tensor]
    read: tuple[Tensor, ...]
    writes: list[int]
    masks: Mapping[str, MaskLike]
    tables: Mapping[str, Any]

    def is_of(self, x: Tensor, valid: Tensor | None, masks: Mapping[str, Any], freqs_cis: Mapping[str, Any]) -> bool:
        """Whether it is of a call with these arguments, of which the first mask has the note."""
        if valid is not self.valid or self.x != (x.shape[:2], x.dtype, x.device) or versions(self.read) != self.writes:
            return False
        mask = next(iter(masks.values()))
        for kind, table in self.raw.items():
            if masks.get(kind) is not mask or freqs_cis.get(kind) is not table or table.requires_grad:
                return False
        return True


def noted(masks: Mapping[str, Any], config: DecoderConfig, family: Family) -> Ready | None:
    """The note of an earlier call on the first mask, if it is of this config; for eager calls outside of transforms.

    Tracers of torch.fx and of torch.jit get none: the tables are inputs of what they trace.
    """
    if torch.jit.is_tracing() or traced():  # type: ignore[attr-defined]
        return None
    mask = next(iter(masks.values()), None) if isinstance(masks, dict) else None
    ready: Ready | None = getattr(mask, _NOTE, None)
    if ready is None or ready.parts != parts_of(family):
        return None
    return ready if ready.plan.config is config or ready.plan.config == config else None


def note_ready(x: Tensor, batch: Batch, made: tuple[Any, Any], plan: StackPlan, options: ForwardOptions) -> None:
    """Notes on the mask of a batch the masks and tables made of it, where they are small and constant.

    batch: its masks, its tables and valid. made: {choice: {kind: mask}} and {kind: table}, as layers read them.
    """
    (masks, freqs_cis, valid), (of_choices, tables) = batch, made
    mask = next(iter(masks.values()), None)
    if options is not USUAL or plan.taps or type(mask) is not Mask or not quiet() or torch.is_inference_mode_enabled():
        return
    (ready,), raw = of_choices.values(), {kind: freqs_cis[kind] for kind in plan.used}
    read = mask.q_positions, mask.q_segments, *raw.values(), *(() if valid is None else (valid,))
    alike = all(masks[kind] is mask and isinstance(ready[kind], ByIndex) for kind in plan.used)
    constant = alike and all(isinstance(t, Tensor) and not t.requires_grad for t in read)
    if constant and (writes := versions(read)) is not None:
        of_x, parts = (x.shape[:2], x.dtype, x.device), parts_of(family_of(plan.config))
        object.__setattr__(mask, _NOTE, Ready(plan, parts, of_x, valid, raw, read, writes, ready, tables))


def ready_tables(freqs_cis: Mapping[str, Tensor], used: Sequence[str], options: ForwardOptions) -> Mapping[str, Any]:
    """{kind: its table}, laid out once for all layers where blocks run as they are in eager mode."""
    if options.layer_fn is not None or torch.compiler.is_compiling():
        return freqs_cis
    tables: dict[str, Any] = {}
    made: dict[int, Rotation] = {}  # by the identity of the table
    for kind in used:
        table = tables[kind] = freqs_cis[kind]
        if is_rotating(table):
            if id(table) not in made:
                made[id(table)] = laid_out(table)
            tables[kind] = made[id(table)]
    return tables


def ready_masks(
    masks: Mapping[str, MaskLike],
    kinds: Sequence[str],
    kernel: Any,
    options: ForwardOptions,
    plan: StackPlan,
    x: Tensor,
) -> dict[str, MaskLike]:
    """{kind: mask in the form the kernel reads}, converted once per distinct mask instead of once per layer."""
    ready: dict[str, MaskLike] = {}
    layout, finds = options.layout, kernel == "auto" and options.layer_fn is None and options.layout is None
    made: list[str] = []  # kinds with masks of their own; compared by `is`, since a compiled graph would guard an id()
    for kind in kinds:
        mask = ready[kind] = masks[kind]
        parsed = LayerKind.parse(kind)
        if isinstance(mask, Segments) or parsed.indexed or parsed.compresses:
            continue  # no kernel reads what depends on order; a choice of keys needs positions, as keys of windows do
        twin = next((other for other in made if masks[other] is mask), None)
        if twin is None:
            part, device, dtype = attention_part(mask), x.device, x.dtype
            if finds and isinstance(part, Mask):  # blocks that layer_fn compiles would be compiled again for each batch
                layout = layout_at_hand(part)
            how: Any = {"device": device, "dtype": dtype, "asks": plan.asks, "checked": options.checked or finds}
            ready[kind] = with_attention(mask, materialize(part, kernel, layout, **how))
            made.append(kind)
        else:
            ready[kind] = ready[twin]
    return ready
