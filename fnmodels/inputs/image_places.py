"""Image features among the tokens of a text model. Where each goes is a tensor: `places` int64 [B, S, 2].

The place of a token is (row, slot) of the image's features [rows, slots, D], or (-1, -1) for a token of text.
"""

import torch
from torch import Tensor


def image_places(tokens: Tensor, image_token: int, patches: Tensor) -> Tensor:
    """places [B, S, 2]: the n-th image token takes the n-th patch, both counted row by row.

    tokens: ids [B, S]. patches: bool [rows, slots], True where the tower's token is a patch that the text model reads,
    such as (segment_ids > 0) & (positions[..., 0] >= 0) of `fnmodels.inputs.patch_rows`. Reads values: not for use in
    transforms. ValueError unless there are as many image tokens as patches.
    """
    is_image, patch_indices = tokens == image_token, patches.nonzero()
    if int(is_image.sum()) != len(patch_indices):
        raise ValueError(
            f"The text has {int(is_image.sum())} image tokens (id {image_token}), but the images have "
            f"{len(patch_indices)} patches; each patch needs one token, in the order of the images."
        )
    places = torch.full((*tokens.shape, 2), -1, dtype=torch.int64, device=tokens.device)
    places[is_image] = patch_indices.to(places.device)
    return places


def check_places(places: Tensor, shape: torch.Size) -> None:
    """ValueError unless places are int64 [B, S, 2] of tokens of shape [B, S]."""
    if places.shape != (*shape, 2) or places.dtype != torch.int64:
        raise ValueError(
            f"places must be int64 {[*shape, 2]}, the (row, slot) of each token's feature, not "
            f"{str(places.dtype).removeprefix('torch.')} {list(places.shape)}."
        )


def place(x: Tensor, features: Tensor, places: Tensor) -> Tensor:
    """x [B, S, D], embeddings of text, with features [rows, slots, D] at the tokens that have a place [B, S, 2]."""
    check_places(places, x.shape[:2])
    if features.shape[-1] != x.shape[-1]:
        raise ValueError(f"The features have width {features.shape[-1]}, the text's embeddings {x.shape[-1]}.")
    return torch.where(places[..., :1] >= 0, _at(features, places).to(x.dtype), x)


def add_features(x: Tensor, features: Tensor, places: Tensor) -> Tensor:
    """x [B, S, D] plus features [rows, slots, D] at the tokens that have a place [B, S, 2]; see `place`."""
    return torch.where(places[..., :1] >= 0, x + _at(features, places).to(x.dtype), x)


def _at(features: Tensor, places: Tensor) -> Tensor:
    row, slot = places.clamp(min=0).unbind(-1)
    return features[row, slot]


def image_spans(places: Tensor, segment_ids: Tensor) -> Tensor:
    """Span ids [B, S] for `SameSpan`: runs of tokens with a place count from 1 along the row, other tokens have 0.

    places: [B, S, 2]; segment_ids: [B, S], at whose borders a run ends.
    """
    image = places[..., 0] >= 0
    continues = image[:, :-1] & (segment_ids[:, 1:] == segment_ids[:, :-1])
    begins = image.clone()
    begins[:, 1:] = image[:, 1:] & ~continues
    return begins.cumsum(-1).where(image, 0)


def cells(positions: Tensor, segment_ids: Tensor, side: int) -> Tensor:
    """The (row, slot) of the patches of every cell of side x side patches: int64 [cells, side * side, 2].

    Cells are those of image after image, each row by row, as the patches in a cell. positions [B, S, 4] and segment_ids
    [B, S]: those of `fnmodels.inputs.patch_rows`; special tokens are in no cell. Reads values: not for use in
    transforms. ValueError for an image whose rows or columns are not a multiple of `side`.
    """
    patch_indices = ((segment_ids > 0) & (positions[..., 0] >= 0)).nonzero()
    b, s = patch_indices.unbind(-1)
    row, column, rows, columns = positions[b, s].unbind(-1)
    if (rows % side).any() or (columns % side).any():
        i = int(((rows % side) + (columns % side)).nonzero()[0])
        raise ValueError(
            f"An image of {int(rows[i])} x {int(columns[i])} patches has no cells of {side} x {side}: resize it to "
            "multiples of a cell."
        )
    order = torch.arange(len(patch_indices), device=patch_indices.device)
    for key in (column % side, row % side, column // side, row // side, segment_ids[b, s], b):
        order = order[key[order].argsort(stable=True)]
    return patch_indices[order].unflatten(0, (-1, side * side))


def gather_cells(x: Tensor, places: Tensor) -> Tensor:
    """The hidden states [cells, patches of a cell, D] of x [rows, slots, D] at the `places` that `cells` returns."""
    return x[places[..., 0], places[..., 1]]
