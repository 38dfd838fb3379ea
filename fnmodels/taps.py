"""`tap_names`: what can be read and edited in a model, with shapes, found by running its blocks on zeros."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fnmodels.models.common.carried import left_like, stream_shape
from fnmodels.models.common.context import Context
from fnmodels.models.common.family import (
    DecoderConfig,
    LayerKind,
    field_of,
    function_of,
    is_routed,
    stored_layers,
    traits_of,
)
from fnmodels.models.common.registry import family_of, stack_configs
from fnmodels.ops.moe.layer import KEPT
from fnmodels.ops.norm_taps import watched_norms
from fnmodels.options import ForwardOptions
from fnmodels.tree import Tree, flatten
from fnmodels.tree import map as map_tree

ENDS = ("embed", "hidden")  # taps outside of layers, of `fnmodels.hidden`
FINAL = ("final.norm", "final.norm.scale")  # those of `fnmodels.forward`, `prefill` and `decode`
AROUND = ("input", "output")  # taps of a layer outside of its block
_FEW = 1_000_000  # parameters that are zeros on the CPU, whose operations take a tenth of the meta device's time
_SIZES = ((2, 3), (5, 7))  # of batch and sequence: a dimension that differs between them is one of these


def tap_names(config: DecoderConfig) -> dict[str, str]:
    """The taps of a model: what can be read by `taps` and edited by `edits` of `forward`.

    All can be edited but "counts". attention.scores and attention.pattern need kernel="math"; the names of norms, such
    as "input_layernorm" (the output) and "input_layernorm.scale" (what multiplies x before the weight), eager mode.

    Args:
        config: The model's config.

    Returns:
        {name: shape} in the order of the computation; "[B, S, 4, 16]" has 4 heads of 16. T and I of a diffusion model
        are the tokens of texts and of latents, K keys of tokens and of windows of them.
    """
    _check_one_stack(config)
    shapes = {"embed": f"[B, S, {config.hidden_size}]"}
    for index, names in enumerate(_names_of_layers(config)):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in names.items()}
    ends = {"hidden": config.hidden_size}
    if _has_final_norm(config):
        ends |= {"final.norm.scale": 1, "final.norm": config.hidden_size}
    return shapes | {name: f"[B, S, {width}]" for name, width in ends.items()}


def _has_final_norm(config: DecoderConfig) -> bool:
    """Whether there is a last norm of every token; that of CLIP's vision tower is of pooled features."""
    family = family_of(config)
    spec = {path: leaf for path, leaf in family.spec(config).items() if path != "layers"}
    if "norm" not in spec or traits_of(family).inputs != "patches":
        return "norm" in spec
    weights = map_tree(lambda leaf: torch.empty(leaf.shape, device="meta"), spec)
    norms: list[str] = []

    def tap(name: str, value: Tensor) -> Tensor:
        norms.append(name)
        return value

    with watched_norms({"norm": weights["norm"]}, tap):
        family.unembed(weights, torch.empty(1, 1, config.hidden_size, device="meta"), config=config)
    return bool(norms)


def _check_one_stack(config: DecoderConfig) -> None:
    """ValueError for a model of several stacks, each of which has taps of its own."""
    family = family_of(config)
    parts = [*stack_configs(config)]
    parts += family.towers(config) if hasattr(family, "towers") else []
    if parts:
        raise ValueError(
            f"A model of type {config.model_type!r} runs as several, each with taps of its own: tap_names of "
            f"{' or '.join(f'config.{part}' for part in parts)}."
        )


def _names_of_layers(config: DecoderConfig) -> tuple[dict[str, str], ...]:
    """{tap: shape} of each layer."""
    small, large = (_shapes_of_layers(config, *size) for size in _SIZES)
    letters = dict(zip(zip(*_SIZES, strict=True), "BS", strict=True))
    if function_of(family_of(config), "example_inputs") is not None:  # half of the tokens are texts
        counts = [tokens for _, tokens in _SIZES]
        letters |= {(counts[0] // 2, counts[1] // 2): "T", (-(-counts[0] // 2), -(-counts[1] // 2)): "I"}
    both = zip(small, large, strict=True)
    return tuple({name: _lettered(shape, b[name], letters) for name, shape in a.items()} for a, b in both)


def _lettered(one: torch.Size, two: torch.Size, letters: Mapping[tuple[int, int], str]) -> str:
    pairs = zip(one, two, strict=True)
    sizes = (letters.get(pair, str(pair[0]) if pair[0] == pair[1] else "K") for pair in pairs)
    return f"[{', '.join(sizes)}]"


class _Recorder(Context):
    """Puts the shape of every tap into `shapes`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.shapes: dict[str, torch.Size] = self.tensors["shapes"]

    def wants(self, name: str) -> bool:
        return True

    def wants_any(self, names: tuple[str, ...]) -> bool:
        return True

    def norms(self, layer: Tree) -> AbstractContextManager[None]:
        """All of the layer's norms."""
        names = {name: leaf for name, leaf in flatten(layer).items() if "norm" in name and not name.endswith("_bias")}
        return watched_norms(names, self.tap)

    def tap(self, name: str, value: Tensor) -> Tensor:
        self.shapes[name] = value.shape
        return value


@torch.no_grad()
def _shapes_of_layers(config: DecoderConfig, batch: int, tokens: int) -> tuple[dict[str, torch.Size], ...]:
    family: Any = family_of(config)
    few = sum(math.prod(leaf.shape) for leaf in flatten(family.spec(config)).values()) < _FEW
    device = "cpu" if few else "meta"
    positions = torch.arange(tokens, device=device).expand(batch, tokens)
    if traits_of(family).inputs == "patches":  # (row, column, rows, columns): an image of one patch
        positions = torch.tensor([0, 0, 1, 1], device=device).expand(batch, tokens, 4)
    given: dict[str, Any] = {"positions": positions}
    if traits_of(family).reads_ids:
        given["token_ids"] = ids = torch.zeros(batch, tokens, dtype=torch.long, device=device)
        given["preceding"] = ids[..., None].expand(batch, tokens, max(field_of(config, "ngram_size") - 1, 0))
    if (example := function_of(family, "example_inputs")) is not None:
        given = example(config, positions)
        positions = given["positions"]
    ids = torch.ones(batch, tokens, dtype=torch.long, device=device)
    masks = family.attention_masks(config, positions, ids)
    tables = family.freqs_cis(config, positions, length=tokens)
    options = ForwardOptions("math", context=_Recorder)
    x = torch.zeros(batch, tokens, config.hidden_size, device=device)
    width = field_of(config, "hidden_size_per_layer_input")
    common: dict[str, Any] = {}
    if (shared := function_of(family, "shared")) is not None:
        spec = {path: leaf for path, leaf in family.spec(config).items() if path != "layers"}
        weights = map_tree(lambda leaf: torch.zeros(leaf.shape, device=device), spec)
        memory = x.new_zeros(batch, tokens, field_of(config, "memory_size") or config.hidden_size)
        given |= {"memory": memory, "memory_mask": next(iter(masks.values()))}
        common = {"shared": shared(weights, given, config=config)}
    seen: dict[Any, dict[str, torch.Size]] = {}
    lent: dict[str, Any] = {}
    chosen: Tensor | None = None
    layer_shapes: list[dict[str, torch.Size]] = []
    kinds, layers = family.kinds(config), family.spec(config)["layers"]
    for kind, layer in zip(kinds, (layers[i] for i in stored_layers(config, kinds)), strict=True):
        key = kind, tuple((path, leaf.shape) for path, leaf in flatten(layer).items())
        if key not in seen:
            weights = map_tree(lambda leaf: torch.zeros(leaf.shape, device=device), layer)
            more: dict[str, Any] = {"valid": torch.ones_like(ids, dtype=torch.bool)} if is_routed(family, kind) else {}
            more |= {"layer_input": torch.zeros(batch, tokens, width, device=device)} if width else {}
            more |= {"kv": lent[lender]} if (lender := LayerKind.parse(kind).lender) else {}
            more |= {"choices": chosen} if LayerKind.parse(kind).shares_choice else {}
            if LayerKind.parse(kind).joins:
                more["left"] = torch.zeros_like(left_like(config, len(layer_shapes), x), device=device)
            before = torch.zeros(batch, tokens, *stream_shape(config, len(layer_shapes)), device=device)
            shapes: dict[str, torch.Size] = {"input": x.shape}
            how: dict[str, Any] = {"config": config, "kind": kind, "options": options, "shapes": shapes}
            _, aux = family.block(weights, before, masks[kind], tables[kind], **how, **more, **common)
            shapes |= {name: aux[name].shape for name in (*KEPT, "choices") if name in aux}
            seen[key] = shapes | {"output": x.shape}
            lent |= {LayerKind.parse(kind).stem: aux["kv"]} if "kv" in aux else {}
            chosen = aux.get("chosen", chosen)
        layer_shapes.append(seen[key])
    return tuple(layer_shapes)


def check_taps_tuple(taps: tuple[str, ...]) -> None:
    """TypeError for a string, whose letters would be read as names."""
    if isinstance(taps, str):
        raise TypeError(f"taps is the string {taps!r}; it is a tuple of names: taps=({taps!r},).")


def list_of_taps(config: DecoderConfig) -> str:
    """The names of taps, for errors."""
    inner = [name.split(".", 2)[2] for name in tap_names(config) if name.startswith("layers.")]
    ends = ", ".join((*ENDS, *FINAL))
    return f"{ends}, and layers.N.NAME (N a layer or *) with NAME one of {', '.join(dict.fromkeys(inner))}"


def check_tap_names(config: DecoderConfig, unread: list[str]) -> None:
    """ValueError for a tap that was not passed, but for "layers.*.NAME" where only other layers pass it."""
    names = tap_names(config)
    elsewhere = {name.split(".", 2)[2] for name in names if name.startswith("layers.")}
    for tap in unread:
        number, name = tap.split(".", 2)[1:]
        if number != "*" or name not in elsewhere:
            where = f"unknown in layer {number}" if name in elsewhere else "unknown"
            raise ValueError(f"The tap {tap!r} is {where}. There are {list_of_taps(config)}.")


def wanted_taps(config: DecoderConfig, taps: tuple[str, ...], layers: int, run: range) -> frozenset[tuple[int, str]]:
    """(layer, name within it) of each tap "layers.N.NAME"; ValueError for other names and layers outside of `run`."""
    check_taps_tuple(taps)
    pairs = set()
    for tap in taps:
        head, _, rest = tap.partition(".")
        number, _, name = rest.partition(".")
        if head != "layers" or not name or not (number == "*" or (number.isdigit() and int(number) < layers)):
            raise ValueError(f"The tap {tap!r} is unknown; there are {list_of_taps(config)}, and {layers} layers.")
        if number != "*" and int(number) not in run:
            raise ValueError(f"The tap {tap!r} is outside of layers {run.start} to {run.stop - 1}, which are run here.")
        pairs |= {(i, name) for i in (run if number == "*" else [int(number)])}
    return frozenset(pairs)
