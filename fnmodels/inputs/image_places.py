"""Image features among the tokens of a text model. Where each goes is a tensor: `places` int64 [B, S, 2].

The place of a token is (row, slot) of the image's features [rows, slots, D], or (-1, -1) for a token of text.
"""

import torch
from torch import Tensor


def image_places(tokens: Tensor, image_token: int, patches: Tensor) -> Tensor:
    """places [B, S, 2]: the n-th image token takes the n-th patch, both counted row by row.

    tokens: ids [B, S]. patches: bool [rows, slots], True where the tower's token is a patch that the text model reads,
    such as (segment_ids > 0) & (positions[..., 0] >= 0) of `fnmodels.patch_rows`. Reads values: not for use in
    transforms. ValueError unless there are as many image tokens as patches.
    """
    wanted, found = tokens == image_token, patches.nonzero()
    if int(wanted.sum()) != len(found):
        raise ValueError(
            f"The text has {int(wanted.sum())} image tokens (id {image_token}), but the images have {len(found)} "
            "patches; each patch needs one token, in the order of the images."
        )
    places = torch.full((*tokens.shape, 2), -1, dtype=torch.int64, device=tokens.device)
    places[wanted] = found.to(places.device)
    return places


def place(x: Tensor, features: Tensor, places: Tensor) -> Tensor:
    """x [B, S, D], embeddings of text, with features [rows, slots, D] at the tokens that have a place [B, S, 2]."""
    if places.shape != (*x.shape[:2], 2) or places.dtype != torch.int64:
        raise ValueError(
            f"places must be int64 {[*x.shape[:2], 2]}, the (row, slot) of each token's feature, not "
            f"{str(places.dtype).removeprefix('torch.')} {list(places.shape)}."
        )
    if features.shape[-1] != x.shape[-1]:
        raise ValueError(f"The features have width {features.shape[-1]}, the text's embeddings {x.shape[-1]}.")
    row, slot = places.clamp(min=0).unbind(-1)
    return torch.where(places[..., :1] >= 0, features[row, slot].to(x.dtype), x)
