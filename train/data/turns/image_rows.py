"""Images in packed rows of text: the features of each token, and positions of several axes.

rows = token_budget({"tokens": sequences, **image_entries(whole_params, sequences, images, config=config)}, 4096)[0]
batches = [image_batch(row, images, config=config) for row in rows]        # for losses with config=config
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import UserError
from fnmodels.image_text import Image, ImageFeatures, features_of_tokens, image_features, image_grid, own_places
from fnmodels.models.common.registry import family_of
from fnmodels.preparation import positions_of_images
from fnmodels.tree import Tree
from train.data.token_budget import PackedRow

FEATURES, MARKS = "image_features", "is_image"


def check_causal(config: Any, user: str) -> None:
    """UserError for a model whose prompt sees all of itself: no row here says where a prompt ends.

    config: that of the whole model. user: who makes the rows, which begins the sentence.
    """
    if hasattr(family_of(config), "prompt_masks"):
        raise UserError(
            f"{user} takes models whose tokens see what is before them, and the prompt of a {config.model_type} sees "
            "all of itself: answers would be drawn by another model than the one whose log-probabilities are computed"
        )


def image_entries(
    params: Tree,
    tokens: Sequence[Tensor],
    images: Sequence[Sequence[Image]],
    *,
    config: Any,
    kernel: Any = "auto",
    marks: Sequence[Tensor] | None = None,
    names: Sequence[str] | None = None,
) -> dict[str, list[Tensor]]:
    """The entries of `token_budget` that have the features of images; none where no sequence has any.

    Args:
        params: Those of the whole model. Its tower is not trained by what comes of this.
        tokens: Ids [T] of each sequence, in which an image token stands for each feature.
        images: Of each sequence, in the order of its tokens; see `fnmodels.image_text`.
        config: That of the whole model.
        kernel: Of attention in the tower.
        marks: Bool [T] of each sequence, the tokens that stand for features, for an answer may have their id as text;
            None: all that have the id of image tokens.
        names: What sentences call each sequence; None: its number.

    Returns:
        {"image_features": [T, F, D] of each sequence, "is_image": its marks}, or nothing.

    Raises:
        ValueError: A sequence has more or fewer image tokens than its images have features.
    """
    unique = {id(image): image for image in chain.from_iterable(images)}
    each = {at: image_features(params, [image], config=config, kernel=kernel) for at, image in unique.items()}
    marks = [ids == config.image_token for ids in tokens] if marks is None else marks
    if not each:
        _check_none(marks, config, names)
        return {}
    none = _none_of(next(iter(each.values())))
    found = []
    for number, (own_marks, own) in enumerate(zip(marks, images, strict=True)):
        try:
            features = _joined([none, *(each[id(image)] for image in own)])
            found.append(features_of_tokens(own_marks, features, config=config))
        except ValueError as error:
            raise ValueError(f"{_name(number, names)}: {error}") from error
    return {FEATURES: found, MARKS: list(marks)}


def _name(number: int, names: Sequence[str] | None) -> str:
    return f"Sequence {number}" if names is None else names[number]


def _check_none(marks: Sequence[Tensor], config: Any, names: Sequence[str] | None) -> None:
    """ValueError for image tokens in sequences without images."""
    for number, own in enumerate(marks):
        if count := int(own.sum()):
            raise ValueError(
                f"{_name(number, names)}: The sequence has {count} image tokens (id {config.image_token}), and no "
                "images; each feature of an image needs one token."
            )


def _none_of(features: ImageFeatures) -> ImageFeatures:
    return ImageFeatures(tuple(value[:, :0] for value in features.values), features.grids[:0])


def _joined(features: Sequence[ImageFeatures]) -> ImageFeatures:
    """The features of several images behind each other."""
    values = zip(*(one.values for one in features), strict=True)
    return ImageFeatures(tuple(torch.cat(parts, 1) for parts in values), torch.cat([one.grids for one in features]))


def image_batch(row: PackedRow, images: Sequence[Sequence[Image]], *, config: Any) -> dict[str, Tensor]:
    """The batch of a packed row whose sequences may have images.

    Args:
        row: Of `token_budget`, with `image_entries` among its entries.
        images: Of all sequences, by their numbers.
        config: That of the whole model.

    Returns:
        The row's batch: positions have several axes where the model's do, and a row without images has no features.
    """
    own = [image for number in row.sequences for image in images[number]]
    if not own:
        return {name: value for name, value in row.batch.items() if name not in (FEATURES, MARKS)}
    if not hasattr(family_of(config), "image_positions"):
        return row.batch
    grids = torch.tensor([image_grid(image, config=config) for image in own])
    places = own_places(row.batch[MARKS])
    positions = positions_of_images(config, row.batch["segment_ids"], places, grids)
    return row.batch if positions is None else {**row.batch, "positions": positions}
