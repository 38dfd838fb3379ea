"""Checks of a batch by what its entries mean: integers that number tokens, classes, experts, positions or images.

Over a mesh every rank checks its rows before anything is sent, so that all ranks refuse what one of them cannot use. A
number that the model does not have would raise deep inside of one rank, and the others would wait.

`checked_by` marks a loss whose batch means something else than that of next-token prediction. Values are read on the
CPU alone: elsewhere that would synchronise, and the kernel that meets such a number aborts its process, and so the job.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fnmodels import documents, tree
from fnmodels.inputs.values import readable
from fnmodels.models.common.family import field_of, is_routed, traits_of
from fnmodels.models.common.registry import family_of, stack_configs, text_config, token_ids
from fnmodels.ops.moe.layer import check_range
from params.axes import EMBED, POSITION
from train.batch import Entries
from train.loss import ModelLoss

from .cross_entropy import check_targets

# check(batch, config, options): ValueError for a batch that the loss cannot use. options: the keywords bound to it.
BatchCheck = Callable[[Entries, Any, Mapping[str, Any]], None]
F = TypeVar("F", bound=Callable[..., Any])
_VOCABULARY_HEADS = ("lm", "masked_lm")  # whose labels are tokens


@dataclass(frozen=True)
class Numbers:
    """The integers that an entry may hold: 0 to size - 1, and `ignored`; size None: 0 and more.

    axes: how many of its last dimension. targets_of: what they are targets among, see `check_targets`; "": none.
    """

    size: int | None
    ignored: int | None = None
    axes: int | None = None
    targets_of: str = ""


PAIRS = Numbers(None, targets_of="set of pairs")


def checked_by(check: BatchCheck) -> Callable[[F], F]:
    """Decorator of a loss, or of another function of (params, batch): `check` is for its batches."""

    def mark(loss: F) -> F:
        loss.check_batch = check  # type: ignore[attr-defined]
        return loss

    return mark


def check_of(function: Callable[..., Any]) -> Callable[[Entries, Any], None]:
    """check(batch, config) of a function of (params, batch), also of a partial of one; by default `check_batch`."""
    options: dict[str, Any] = {}
    while isinstance(function, (ModelLoss, functools.partial)):
        if isinstance(function, ModelLoss):
            function = function.function
        else:
            options = function.keywords | options
            function = function.func
    own: BatchCheck | None = getattr(function, "check_batch", None)
    if own is None:
        return check_batch
    return lambda batch, config: own(batch, config, options)


def check_batch(batch: Entries, config: Any, labels: Numbers | str | None = "vocabulary") -> None:
    """ValueError for numbers of a batch that the model does not have, or experts that no token can have.

    labels: what its labels number; None: nothing that the model knows.
    """
    known = dict(_numbers(config))
    if not isinstance(labels, str):
        known.pop("labels", None)
        known |= {} if labels is None else {"labels": labels}
    for name, numbers in known.items():
        ids = batch.get(name)
        if ids is not None and _is_read(ids):
            _check_numbers(name, ids if numbers.axes is None else ids[..., : numbers.axes], numbers)
    if "routing" in batch and _is_read(batch["routing"]) and "segment_ids" in batch:
        _check_routing(batch["routing"], batch["segment_ids"] > 0, config)
    family = family_of(config)
    if traits_of(family).inputs == "latents":
        _check_images(batch)
    if hasattr(family, "with_images") and {"image_ids", "patch_positions"} <= batch.keys():
        _check_grids(batch["image_ids"], batch["patch_positions"])


def check_classes(batch: Entries, config: Any) -> None:
    """`check_batch` of labels that are classes of the model."""
    check_batch(batch, config, Numbers(field_of(config, "num_labels"), targets_of="set of classes"))


def check_pairs(batch: Entries, config: Any, options: Mapping[str, Any]) -> None:
    """`check_batch` of labels that number pairs, and of roles in them."""
    check_batch(batch, config, PAIRS)
    if "roles" in batch:
        check_targets(batch["roles"], None, "roles")


def _is_read(ids: Tensor) -> bool:
    return ids.is_cpu and bool(ids.numel()) and not ids.is_floating_point() and readable(ids)


def _check_numbers(name: str, ids: Tensor, numbers: Numbers) -> None:
    if numbers.targets_of:
        check_targets(ids, numbers.size, name, numbers.targets_of)
        return
    assert numbers.size is not None
    known = ids if numbers.ignored is None else ids.where(ids != numbers.ignored, 0)
    low, high = int(known.min()), int(known.max())
    if low < 0 or high >= numbers.size:
        raise ValueError(f"The {name} go from {low} to {high}; the model knows 0 to {numbers.size - 1}.")


def _check_routing(routing: Tensor, valid: Tensor, config: Any) -> None:
    experts = _experts(config)
    if experts and routing.ndim == 4 and routing.shape[:2] == valid.shape:
        for layer in routing.unbind(2):
            check_range(layer, valid, experts)


def _check_images(batch: Entries) -> None:
    """ValueError for tokens of an image that the row has no time and text for."""
    images = batch["pooled"].shape[1] if "pooled" in batch else 0
    for name in ("segment_ids", "text_segment_ids"):
        ids = batch.get(name)
        if images and ids is not None and _is_read(ids) and int(ids.max()) > images:
            raise ValueError(f"{name} has an image {int(ids.max())}, but the conditions are of {images} per row.")


def _check_grids(image_ids: Tensor, positions: Tensor) -> None:
    """ValueError for an image without all of the patches of its grid, of which features are made by cells."""
    if not (_is_read(image_ids) and _is_read(positions)):
        return
    images = documents(image_ids)
    rows, columns = positions[images.row, images.first, 2:].unbind(-1)
    patches = (positions[..., 0] >= 0).flatten()
    found = torch.bincount(images.number.flatten()[patches], minlength=len(images) + 1)[: len(images)]
    wrong = (found != rows * columns).nonzero().flatten().tolist()
    if wrong:
        at = wrong[0]
        raise ValueError(
            f"Image {int(images.segment[at])} of a row has {int(found[at])} patches, and {int(rows[at])} rows of "
            f"{int(columns[at])}; fnmodels.inputs.patch_rows makes them all."
        )


@functools.lru_cache(maxsize=64)
def _numbers(config: Any) -> Mapping[str, Numbers]:
    """{entry of a batch: what it numbers} of a model."""
    family: Any = family_of(config)
    if stacks := stack_configs(config):
        source, target = _of_text(stacks["encoder"]), _of_text(stacks["decoder"])
        found = {f"decoder_{name}": target[name] for name in ("tokens", "positions") if name in target}
        return found | {name: source[name] for name in ("tokens", "positions") if name in source} | _labels(target)
    if not hasattr(family, "towers"):
        return _of_text(text_config(config))
    towers = family.towers(config)
    text, images = _of_text(towers["text"]), _of_text(towers["vision"]) if "vision" in towers else {}
    if text_config(config) is config:  # its labels are not of a text
        text.pop("labels", None)
    return text | ({"patch_positions": images["positions"]} if "positions" in images else {})


def _labels(found: Mapping[str, Numbers]) -> dict[str, Numbers]:
    return {"labels": found["labels"]} if "labels" in found else {}


def _of_text(config: Any) -> dict[str, Numbers]:
    """The bounds of integers of one stack or tower: of its vocabulary, token types, and learned positions."""
    found: dict[str, Numbers] = {}
    if size := getattr(config, "vocab_size", 0):
        ids = token_ids(config)
        found |= {"tokens": Numbers(ids), "next_tokens": Numbers(ids, -1)}
        if field_of(config, "head") in _VOCABULARY_HEADS:
            found |= dict.fromkeys(("labels", "next_labels"), Numbers(size, targets_of="vocabulary"))
    if types := getattr(config, "type_vocab_size", 0):
        found["token_types"] = Numbers(types)
    table = family_of(config).spec(config).get("embed_positions")
    if table is not None and table.axes == (POSITION, EMBED) and traits_of(family_of(config)).inputs == "tokens":
        found["positions"] = Numbers(table.shape[0] - field_of(config, "first_position"))
    if table is not None and table.axes == ("axis", POSITION, EMBED):  # rows and columns of patches
        found["positions"] = Numbers(table.shape[1], axes=2)
    return found


@functools.lru_cache(maxsize=64)
def _experts(config: Any) -> int:
    """The number of experts in a layer; 0 for a model without any."""
    family = family_of(text_config(config))
    if not any(is_routed(family, kind) for kind in family.kinds(text_config(config))):
        return 0
    leaves = tree.flatten(family.spec(text_config(config)))
    return next(leaf.shape[0] for path, leaf in leaves.items() if path.endswith(".experts.down_proj"))
