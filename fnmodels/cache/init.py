"""`init_cache`: an empty cache, whose shapes are those that the family's blocks keep."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.inputs.mask import Mask, MaskLike, attention_part
from fnmodels.inputs.rules import reach_of
from fnmodels.models.common.carried import left_like, stream_shape
from fnmodels.models.common.context import Context
from fnmodels.models.common.family import (
    DecoderConfig,
    LayerKind,
    field_of,
    function_of,
    stored_layers,
    traits_of,
)
from fnmodels.models.common.registry import family_of, stack_configs, text_config
from fnmodels.ops.slots import QUANTIZABLE, SLOTTED, WINDOWED, Entry
from fnmodels.options import ForwardOptions
from fnmodels.tree import Tree

from .value import Cache, Slots, known_clean


def init_cache(
    config: DecoderConfig,
    batch: int,
    capacity: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    rings: bool = True,
    length: int | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Cache:
    """An empty cache of rows with room for tokens.

    Args:
        config: The model's config; of a model with images, the full one or its text's.
        batch: The number of rows.
        capacity: The number of tokens of each row, prompt and answer.
        dtype: Of the model's activations.
        device: Of the tensors; None: torch's default device.
        rings: Whether kinds of layers that see only the last tokens (a window, a chunk) hold no more than these, which
            needs one document per row.
        length: What length-dependent rotary scalings read for the entire generation; None: the capacity.
        kv_dtype: torch.int8 stores keys, values and latents as int8 with one scale per slot and head, about half the
            memory of bf16, for decoding without gradients; None: `dtype`.

    Returns:
        The cache.

    Raises:
        ValueError: A size is below 1, tokens of the model see later ones, or kv_dtype is another or the model has
            neither keys nor latents.
    """
    for name, size in (("batch", batch), ("capacity", capacity)):
        if size < 1:
            raise ValueError(f"{name} is {size}; a cache has at least one row and one slot.")
    config = text_config(config)
    family = family_of(config)
    if stack_configs(config):
        raise ValueError(
            "A model of an encoder and a decoder has its cache from fnmodels.cache.encode, which fills it."
        )
    first = torch.zeros(1, 1, dtype=torch.long)
    masks = family.attention_masks(config, first, first + 1)
    entries = _entries(config, dtype)
    if kv_dtype is not None:
        entries = tuple(map(_quantized, entries))
        if kv_dtype is not torch.int8 or not any(name in entry for entry in entries for name in QUANTIZABLE):
            raise ValueError(
                f"kv_dtype is {kv_dtype}; it is None or torch.int8, for models whose layers keep keys and values."
            )
    slots: dict[str, Slots] = {}
    layers: list[Entry] = []
    for kind, entry in zip(family.kinds(config), entries, strict=True):
        if kind not in slots and any(tokens and name not in WINDOWED for name, (_, _, tokens) in entry.items()):
            found = _empty_slots(kind, masks[kind], batch, capacity, rings, device)
            if field_of(config, "mrope_section"):
                found = replace(found, highest=found.positions.clone())
            if field_of(config, "ngram_size"):
                found = replace(found, tokens=found.positions.clone())
            slots[kind] = found
        layers.append({})
        for name, (shape, kept, tokens) in entry.items():
            of_windows = (max(capacity // tokens, 1),) if tokens else ()
            room = (slots[kind].segments.shape[1],) if tokens and name not in WINDOWED else of_windows
            layers[-1][name] = _empty_entry(batch, room, shape, kept, device)
    if field_of(config, "ngram_size") and not slots:
        raise ValueError("This model embeds n-grams, and no layer of it keeps the tokens before: it has no cache.")
    kinds = family.kinds(config)
    return known_clean(Cache(tuple(layers), slots, kinds, capacity if length is None else length))


def _empty_entry(
    batch: int,
    room: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> Tensor:
    """Zeros [B, *room, *shape]. The slots of one head of keys are neighbours in memory: a query reads them as one run,
    1.1 times as fast as slots of all heads in fp32 and twice as fast in bf16."""
    by_head = bool(room) and len(shape) >= 2
    entry = torch.empty(
        batch, *([shape[0], *room, *shape[1:]] if by_head else [*room, *shape]), dtype=dtype, device=device
    )
    return entry.zero_().transpose(1, 2) if by_head else entry.zero_()


def _empty_slots(
    kind: str, mask: MaskLike, batch: int, capacity: int, rings: bool, device: torch.device | str | None
) -> Slots:
    mask = attention_part(mask)
    if not isinstance(mask, Mask) or (mask.kv_spans is None and mask.rule.visible((0, 0))[1] > 0):
        what = mask.rule if isinstance(mask, Mask) else type(mask).__name__
        raise ValueError(f"Layers of kind {kind!r} have the mask {what}, under which tokens see later ones: no cache.")
    reach = reach_of(mask.rule) if rings else math.inf
    ring = reach < capacity
    empty = torch.zeros(batch, int(min(reach, capacity)), dtype=torch.long, device=device)
    return Slots(empty, empty.clone(), None if mask.kv_spans is None else empty.clone(), ring)


class _Recorder(Context):
    """Records what a layer puts into its entry, and leaves out the experts."""

    def state(self) -> None:
        return None

    def extend(self, new: Entry) -> Entry:
        self._put(new)
        return new

    def moe(self, layer: Tree, x: Tensor | tuple[Tensor, Tensor], route: Any, **_: Any) -> Tensor:
        return x[1] if isinstance(x, tuple) else x


Shape = tuple[tuple[int, ...], torch.dtype, int]  # without batch and slots; dtype; tokens of a slot, 0: no slots


def _entries(config: DecoderConfig, dtype: torch.dtype) -> tuple[dict[str, Shape], ...]:
    """The tensors of each layer's entry, by running the block on a batch of no rows, once for equal layers.

    That costs little at any width, and ten times less than the meta device, whose operations are Python.
    """
    family = family_of(config)
    first = torch.zeros(0, 1, dtype=torch.long, device="cpu")
    masks = family.attention_masks(config, first, first + 1)
    tables = family.freqs_cis(config, first, length=1)
    options = ForwardOptions(context=_Recorder)
    more: dict[str, Any] = {}
    if width := field_of(config, "hidden_size_per_layer_input"):
        more["layer_input"] = torch.empty(0, 1, width, dtype=dtype, device="cpu")
    if traits_of(family).reads_ids:
        before = first[..., None].expand(0, 1, max(field_of(config, "ngram_size") - 1, 0))
        given = {"token_ids": first, "preceding": before}
        more["shared"] = function_of(family, "shared")({}, given, config=config)
    elif function_of(family, "shared") is not None:  # no biases, and a memory without rows
        memory = torch.empty(0, 1, field_of(config, "memory_size") or config.hidden_size, dtype=dtype, device="cpu")
        seen = torch.ones(0, 1, 1, 1, dtype=torch.bool, device="cpu")
        more["shared"] = {"memory": memory, "memory_mask": seen, "positions": (first, first)}
    found: dict[Any, dict[str, Shape]] = {}
    lent: dict[str, Entry] = {}
    chosen: Tensor | None = None
    entries: list[dict[str, Shape]] = []
    kinds, layers = family.kinds(config), family.spec(config)["layers"]
    for index, (kind, layer) in enumerate(zip(kinds, (layers[i] for i in stored_layers(config, kinds)), strict=True)):
        if LayerKind.parse(kind).source:  # reads another layer's entry
            entries.append({})
            continue
        key = kind, tuple((path, leaf.shape) for path, leaf in tree.flatten(layer).items())
        if key not in found:
            weights = tree.map(lambda leaf: _abstract(leaf, dtype), layer)
            x = torch.empty(0, 1, *stream_shape(config, index), dtype=dtype, device="cpu")
            aux: dict[str, Any]
            statics: dict[str, Any] = {"config": config, "kind": kind, "options": options}
            beside: dict[str, Any] = {}
            if LayerKind.parse(kind).joins:
                beside["left"] = torch.empty_like(left_like(config, index, x), device="cpu")
            if lender := LayerKind.parse(kind).beside:
                beside["kv"] = lent[lender]
            if LayerKind.parse(kind).shares_choice:
                beside["choices"] = chosen
            with torch.autocast("cpu", enabled=False):  # which would change the dtypes here, and not on other devices
                _, aux = family.block(weights, x, masks[kind], tables[kind], **statics, **more, **beside, cache={})
            lent |= {LayerKind.parse(kind).stem: aux["kv"]} if "kv" in aux else {}
            chosen = aux.get("chosen", chosen)
            found[key] = {name: _shape(name, t) for name, t in aux.get("cache", {}).items()}
        entries.append(found[key])
    return tuple(entries)


def _shape(name: str, recorded: Tensor) -> Shape:
    """(shape per slot or row, dtype, tokens of a slot) of an entry's tensor; windows have tokens in dimension 1."""
    tokens = 1 if name in SLOTTED else recorded.shape[1] if name in WINDOWED else 0
    return tuple(recorded.shape[2 if tokens else 1 :]), recorded.dtype, tokens


def _quantized(entry: dict[str, Shape]) -> dict[str, Shape]:
    """The entry with int8 tensors and their scales, see `fnmodels.ops.slots`."""
    found = dict(entry)
    for name in QUANTIZABLE:
        if name in entry:
            shape = entry[name][0]
            found |= {name: (shape, torch.int8, 1), f"{name}_scale": (shape[:-1], torch.float32, 1)}
    return found


def _abstract(leaf: Any, dtype: torch.dtype) -> Tensor:
    kept = torch.promote_types(dtype, leaf.dtype) if leaf.keep_dtype else dtype
    return torch.zeros((), dtype=kept, device="cpu").expand(leaf.shape)  # without memory of its own
