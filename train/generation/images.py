"""Prompts with images: rows of ids in which -1 - n is the n-th feature of the images, and how a model reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Unpack

import torch
from torch import Tensor

import fnmodels
from fnmodels import Cache
from fnmodels.cache import tapped_decode_
from fnmodels.image_text import Image, ImageFeatures, check_reads_images, image_features, image_grid, with_features
from fnmodels.models.common.registry import family_of, text_config
from fnmodels.options import Edit, ForwardKwargs
from fnmodels.preparation import positions_of_images
from fnmodels.tree import Tree

PromptKey = tuple[int, ...]


def text_model(params: Tree, config: Any) -> tuple[Tree, Any]:
    """(params, config) of the text of a model that reads images; of another model its own. ValueError for params of the
    text alone with the config of the whole model."""
    text = text_config(config)
    if text is config:
        return params, config
    if "text" not in params:
        raise ValueError(
            f"config is that of a full {config.model_type}, and params has no 'text': pass the params of the full "
            "model, or config.text for those of its text."
        )
    return params["text"], text


def check_images(row: int, prompt: Sequence[int], images: Sequence[Image], config: Any) -> None:
    """ValueError that names the request whose images are not those of its prompt. TypeError for a model of text."""
    if images:
        check_reads_images(config)
    elif not hasattr(family_of(config), "with_images"):
        return
    try:
        features = sum(rows * columns for _, rows, columns in (image_grid(image, config=config) for image in images))
    except ValueError as error:
        raise ValueError(f"Request {row}: {error}") from error
    tokens = sum(token == config.image_token for token in prompt)
    if tokens != features:
        raise ValueError(
            f"The prompt of request {row} has {tokens} image tokens (id {config.image_token}), but its {len(images)} "
            f"images have {features} features; each feature needs one token, in the order of the images."
        )


def check_memory_images(row: int, prompt: Sequence[int], images: Sequence[Image], config: Any) -> None:
    """ValueError that names the request without one image token for each image that its text attends to."""
    tokens = sum(token == config.image_token for token in prompt)
    if tokens != len(images):
        raise ValueError(
            f"The prompt of request {row} has {tokens} image tokens (id {config.image_token}), but {len(images)} "
            "images; each image needs one token, in the order of the images."
        )


def positions_less(images: Sequence[Image], config: Any) -> int:
    """The number of tokens of a prompt less its positions: of three axes, an image takes those of its longer side."""
    if not images or not hasattr(family_of(config), "image_positions"):
        return 0
    grids = [image_grid(image, config=config) for image in images]
    return sum(rows * columns - max(rows, columns) for _, rows, columns in grids)


@dataclass(frozen=True)
class Reader:
    """params, config: of the whole model. features: of the images of all rows; None without any."""

    params: Tree
    config: Any
    features: ImageFeatures | None

    def axes(self, row: PromptKey) -> Tensor | None:
        """Positions [S, 4] of a row of ids; None for those that follow from the order."""
        if self.features is None:
            return None
        ids = torch.tensor(row)
        starts = self.features.grids.prod(-1).cumsum(0) - self.features.grids.prod(-1)
        image = {start: number for number, start in enumerate(starts.tolist())}
        grids = self.features.grids[[image[-1 - token] for token in row if -1 - token in image]]
        places = torch.where(ids < 0, 0, -1)[None, :, None].expand(1, -1, 2)
        found = positions_of_images(self.config, torch.ones_like(ids)[None], places, grids)
        return None if found is None else found[0]

    @property
    def _sees_prompts(self) -> bool:
        """Whether all tokens of a prompt see each other."""
        return hasattr(family_of(self.config), "prompt_masks")

    def takes_last(self, row: PromptKey) -> bool:
        """Whether the last id of a row is computed with the others: of an image, or of a prompt that sees all of
        itself."""
        return row[-1] < 0 or self._sees_prompts

    def end(self, row: PromptKey, begin: int, most: int) -> int:
        """The end of a chunk of a row from `begin`: after `most` tokens, or where no image or prompt that is computed
        in one call is divided, which may be later."""
        if self._sees_prompts:
            return len(row)
        end = min(begin + most, len(row))
        if not hasattr(family_of(self.config), "image_masks"):
            return end
        back = end
        while back > begin and _divides(row, back):
            back -= 1
        while back == begin and _divides(row, end):
            end += 1
        return end if back == begin else back

    def undivided(self, rows: Sequence[PromptKey], shared: int) -> int:
        """The number of the first `shared` ids of all rows to compute apart from the rest: of a row that ends with an
        image not the last, and no part of images or prompts that are computed in one call."""
        if self._sees_prompts:
            return 0
        shared -= any(row[-1] < 0 for row in rows if 0 < len(row) == shared)
        if hasattr(family_of(self.config), "image_masks"):
            while any(_divides(row, shared) for row in rows):
                shared -= 1
        return shared

    def decoded(
        self,
        rows: Sequence[PromptKey],
        axes: Sequence[Tensor | None],
        cache: Cache,
        length: Tensor,
        /,
        taps: tuple[str, ...] = (),
        **options: Unpack[ForwardKwargs],
    ) -> tuple[Tensor, Cache, dict[str, Tensor]]:
        """(logits [B, V] of each row's last id, the cache, which is used up, with the ids, {tap: tensor})."""
        device, width = length.device, max(map(len, rows))
        ids, segment_ids = torch.zeros(2, len(rows), width, dtype=torch.int64)
        for b, own in enumerate(rows):
            ids[b, : len(own)], segment_ids[b, : len(own)] = torch.tensor(own, dtype=torch.int64), 1
        text, config = text_model(self.params, self.config)
        known: dict[str, Any] = {"segment_ids": segment_ids.to(device), "length": length}
        if self._sees_prompts:
            known["token_types"] = torch.zeros_like(ids).to(device)
        if self.features is None:
            prepared = fnmodels.prepare_step(self.config, ids.to(device), cache, **known)
            return _last_logits(text, prepared, cache, taps, config=config, **options)
        if axes[0] is not None:
            padded = [torch.nn.functional.pad(own, (0, 0, 0, width - len(own))) for own in axes if own is not None]
            known["positions"] = torch.stack(padded).to(device)
        places = torch.stack((torch.where(ids < 0, 0, -1), torch.where(ids < 0, -1 - ids, -1)), -1).to(device)
        tokens = torch.where(ids < 0, self.config.image_token, ids).to(device)
        prepared = fnmodels.prepare_step(self.config, tokens, cache, places=places, **known)
        prepared, more = with_features(self.params, self.features, places, prepared, config=self.config)
        options["edits"] = _both(more.get("edits", {}), options.get("edits") or {}) or None
        return _last_logits(text, prepared, cache, taps, config=config, **options)


def _last_logits(
    params: Tree, prepared: Any, cache: Cache, taps: tuple[str, ...], **options: Any
) -> tuple[Tensor, Cache, dict[str, Tensor]]:
    """(logits [B, V] of each row's last token, the cache, {tap: tensor})."""
    if taps:
        return tapped_decode_(params, prepared, cache, taps, at="last", **options)
    inputs, masks, freqs_cis = prepared
    return *fnmodels.decode_(params, inputs, masks, freqs_cis, cache, at="last", **options), {}


def reader_of(
    params: Tree,
    config: Any,
    prompts: Sequence[Sequence[int]],
    images: Sequence[Sequence[Image]],
    kernel: Any,
) -> tuple[Reader, list[PromptKey]]:
    """(the reader, rows of ids) of prompts and the images of each; an image that several have is computed once."""
    unique = {id(image): image for image in chain.from_iterable(images)}
    if not unique:
        return Reader(params, config, None), [tuple(prompt) for prompt in prompts]
    features = image_features(params, list(unique.values()), config=config, kernel=kernel)
    ends = features.grids.prod(-1).cumsum(0).tolist()
    spans = {name: range(start, end) for name, start, end in zip(unique, [0, *ends], ends, strict=False)}
    rows = []
    for prompt, own in zip(prompts, images, strict=True):
        numbers = chain.from_iterable(spans[id(image)] for image in own)
        rows.append(tuple(-1 - next(numbers) if token == config.image_token else token for token in prompt))
    return Reader(params, config, features), rows


def _divides(row: PromptKey, at: int) -> bool:
    """Whether a border before row[at] is within an image, or between images without text between them."""
    return 0 < at < len(row) and row[at - 1] < 0 and row[at] < 0


def _both(first: dict[str, Edit], then: Any) -> dict[str, Edit]:
    """The edits of both; where both edit a value, `then` sees what `first` made of it."""

    def one_after_the_other(name: str) -> Edit:
        before, after = first[name], then[name]
        if isinstance(after, Tensor) or isinstance(before, Tensor):
            return after
        return lambda value, at: after(before(value, at), at)

    return {**first, **{name: one_after_the_other(name) if name in first else edit for name, edit in then.items()}}
