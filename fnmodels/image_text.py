"""Images among the tokens of a text, for every family of `fnmodels.models.vision_language` alike.

found = image_features(params, images, config=config)  # floats [C, H, W] each
places = image_places(tokens, config.image_token, torch.ones(found.values[0].shape[:2], dtype=torch.bool))
prepared = fnmodels.prepare(config, tokens, places=places, grids=found.grids)
prepared, options = with_features(params, found, places, prepared, config=config)
logits = fnmodels.forward(params["text"], *prepared, config=config.text, **options)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.apply import forward, hidden
from fnmodels.inputs.audio import frame_rows
from fnmodels.inputs.image_sizes import TiledImage
from fnmodels.inputs.images import patch_rows
from fnmodels.inputs.mask import MaskLike
from fnmodels.models.common.registry import BESIDE_TOKENS, family_of, text_config
from fnmodels.preparation import prepare
from fnmodels.tree import Tree

Prepared = tuple[dict[str, Any], dict[str, MaskLike], dict[str, Tensor]]


@tree.pytree
@dataclass(frozen=True)
class ImageFeatures:
    """Features of images, one image after the other.

    values: [1, N, text's D], those that replace embeddings, then those that are added to the outputs of the first
    layers (DeepStack). grids: int64 [images, 3], the frames, rows and columns of each image's features, on the host.
    """

    values: tuple[Tensor, ...]
    grids: Tensor


Image = Tensor | TiledImage
# Which functions of `train` generate from what is given beside the tokens.
_GENERATION = {
    "image_memory": "Generation with them is that of train.generate and stream, from a sequence of prompts.",
    "with_sound": "Generation with them is not supported.",
}


def check_reads_images(config: Any) -> None:
    """TypeError for a model that reads no images among its tokens."""
    family = family_of(config)
    for name in BESIDE_TOKENS:
        if hasattr(family, name):
            raise TypeError(
                f"Nothing takes a token's place in {config.model_type}: {family.__name__}.{name} gives its text images "
                f"or sounds, as the first lines of that module show. {_GENERATION[name]}"
            )
    if text_config(config) is config:
        raise TypeError(
            f"{type(config).__module__}.{type(config).__name__} reads no images: pass config and params of a full "
            "model of fnmodels.models.vision_language, as params.load_pretrained returns them."
        )


def image_grid(image: Image, *, config: Any) -> tuple[int, int, int]:
    """(1, rows, columns) of the features of an image [C, H, W]; one row of a model whose queries read it.

    A column of newlines counts, of a family that has one.

    ValueError for sizes without whole cells.

    Those of a `TiledImage` are one row: newlines are among them. So are those of a sound, [bins, frames], for a family
    of `fnmodels.models.audio_language`.
    """
    check_reads_images(config)
    family: Any = family_of(config)
    if hasattr(family, "input_grid"):  # of sounds
        grid: tuple[int, int, int] = family.input_grid(image, config)
        return grid
    if isinstance(image, TiledImage) != hasattr(family, "arranged"):
        expected = "a fnmodels.inputs.image_sizes.TiledImage" if hasattr(family, "arranged") else "a tensor [C, H, W]"
        raise TypeError(f"An image of {config.model_type} is {expected}, not a {type(image).__name__}.")
    if isinstance(image, TiledImage):
        for tile in image.tiles:
            _expect_image(tile, family, config)
        return 1, 1, family.feature_count(len(image.tiles), image.size, config=config)
    grid = _expect_image(image, family, config)
    if hasattr(family, "feature_grid"):  # newlines among them
        return 1, *family.feature_grid(*grid[1:])
    if not hasattr(family, "queries"):
        return grid
    side = config.vision.image_size
    if image.shape[1:] != (side, side):
        raise ValueError(f"An image of {config.model_type} is [3, {side}, {side}], not {list(image.shape)}.")
    return 1, 1, family.queries(config)


def _expect_image(image: Tensor, family: Any, config: Any) -> tuple[int, int, int]:
    """(1, rows, columns) of the cells of an image. ValueError for sizes without whole cells."""
    side = config.vision.patch_size * family.cell_side(config)
    channels, frames = config.vision.num_channels, getattr(config.vision, "frames", 1)
    if not isinstance(image, Tensor):
        raise TypeError(f"An image is a tensor, floats [{channels // frames}, H, W], not a {type(image).__name__}.")
    ok = image.ndim == 3 and image.shape[0] in (channels, channels // frames) and image.is_floating_point()
    if not ok or not image.numel() or image.shape[1] % side or image.shape[2] % side:
        raise ValueError(
            f"An image is floats [{channels // frames}, H, W] with H and W multiples of {side}, not {image.dtype} "
            f"{list(image.shape)}: see fnmodels.inputs.images and image_sizes."
        )
    return 1, image.shape[1] // side, image.shape[2] // side


@torch.no_grad()
def image_features(params: Tree, images: Sequence[Image], *, config: Any, kernel: Any = "auto") -> ImageFeatures:
    """The features of images, floats [C, H, W] as the tower reads them; each is computed alone.

    params, config: of the whole model. A model whose patches have two frames takes a picture, which stands still, or
    two frames [2 C, H, W], channels first. ValueError as for `image_grid`.
    """
    grids = torch.tensor([image_grid(image, config=config) for image in images]).reshape(-1, 3)
    family: Any = family_of(config)
    features: list[tuple[Tensor, ...]] = []
    for image in images:
        if hasattr(family, "input_grid") and isinstance(image, Tensor):
            features.append((_sound_features(params, image, family, config, kernel),))
        elif isinstance(image, TiledImage):
            tiles = [_features(params, tile, family, config, kernel)[0] for tile in image.tiles]
            features.append((family.arranged(params, torch.cat(tiles, 1), image.size, config=config),))
        else:
            features.append(_features(params, image, family, config, kernel))
    return ImageFeatures(tuple(torch.cat(feature, 1) for feature in zip(*features, strict=True)), grids)


@torch.no_grad()
def image_tiles(params: Tree, images: Sequence[Tensor], *, config: Any, kernel: Any = "auto") -> tuple[Tensor, Tensor]:
    """(features [images, tokens, D], positions [images, tokens, 4]) for `family.image_memory`; each is computed alone.

    params, config: of the whole model, whose text attends to images. images: floats [C, rows * side, columns * side].
    ValueError for an image of other sizes.
    """
    family: Any = family_of(config)
    names = family.taps(config) if hasattr(family, "taps") else ()
    like, features, positions = next(iter(tree.leaves(params["vision"]))), [], []
    for image in images:
        patches, at = family.tile_rows([image.to(like.device, like.dtype)], config.vision)
        batch = prepare(config.vision, patches, positions=at)
        x = hidden(params["vision"], *batch, config=config.vision, taps=names, kernel=kernel)
        x, tapped = x if names else (x, {})
        features.append(family.project(params, x, tapped, config=config))
        positions.append(at)
    return torch.cat(features), torch.cat(positions)


def _features(params: Tree, image: Tensor, family: Any, config: Any, kernel: Any) -> tuple[Tensor, ...]:
    """Features of one image or tile, which the tower reads alone."""
    weights, tower, run = params["vision"], config.vision, forward
    if hasattr(family, "tower"):  # cut behind a layer, so without the last norm
        (weights, tower), run = family.tower(params, config), hidden
    like, names = next(iter(tree.leaves(weights))), family.taps(config) if hasattr(family, "taps") else ()
    image = image.to(like.device, like.dtype)
    image = image.repeat_interleave(config.vision.num_channels // image.shape[0], 0)
    patches, at, ids = patch_rows([image], tower)
    batch = prepare(tower, patches, positions=at, segment_ids=ids)
    x = run(weights, *batch, config=tower, taps=names, kernel=kernel)
    x, tapped = x if names else (x, {})
    features: tuple[Tensor, ...] = family.features_of(
        params, x, tapped, family.cells(at, ids, family.cell_side(config)), config=config
    )
    return features


def _sound_features(params: Tree, clip: Tensor, family: Any, config: Any, kernel: Any) -> Tensor:
    """Features of one sound [bins, frames], which the encoder reads alone."""
    like = next(leaf for leaf in tree.leaves(params["audio"]) if leaf.is_floating_point())
    rows = family.sound_rows if hasattr(family, "sound_rows") else frame_rows
    frames, at, ids = rows([clip.to(like.device, like.dtype)], config.audio)
    batch = prepare(config.audio, frames, positions=at, segment_ids=ids)
    names = family.taps(config) if hasattr(family, "taps") else ()
    x = hidden(params["audio"], *batch, config=config.audio, kernel=kernel, taps=names)
    x, tapped = x if names else (x, ())
    features: Tensor = family.project(
        params, x, family.groups(at, ids, config.group), *((tapped,) if names else ()), config=config
    )
    return features


def features_of_tokens(is_image: Tensor, features: ImageFeatures, *, config: Any) -> Tensor:
    """[S, F, D]: the features of each token of a sequence with images, 0 for text; F as in `ImageFeatures.values`.

    They are in the order of the tokens, so that sequences are packed and rows split as all else that is per token.

    is_image: bool [S], the tokens that stand for features: an answer may have the id of these too, as text. features:
    of its images alone, in order. ValueError unless there is one image token for each.
    """
    count = features.values[0].shape[1]
    if int(is_image.sum()) != count:
        raise ValueError(
            f"The sequence has {int(is_image.sum())} image tokens (id {config.image_token}), but its "
            f"{len(features.grids)} images have {count} features; each feature needs one token, in the order of the "
            "images."
        )
    each = torch.stack([value[0] for value in features.values], 1)
    found = each.new_zeros(len(is_image), *each.shape[1:])
    found[is_image.to(each.device)] = each
    return found


def own_places(is_image: Tensor) -> Tensor:
    """places [B, S, 2] of features that stand at their tokens, bool [B, S]: (row, slot) of each."""
    row, slot = (torch.arange(size, device=is_image.device) for size in is_image.shape)
    places = torch.stack(torch.broadcast_tensors(row[:, None], slot), -1)
    return torch.where(is_image[..., None], places, -1)


def with_features(
    params: Tree, features: ImageFeatures, places: Tensor, prepared: Prepared, *, config: Any
) -> tuple[Prepared, dict[str, Any]]:
    """(the arguments of the text model with the features in them, options of the call beside them).

    places: [B, S, 2], (0, n) for the n-th feature, see `image_places`. prepared: of `prepare` or `prepare_step`.
    """
    family: Any = family_of(config)
    inputs, masks, freqs_cis = prepared
    inputs = family.with_images(params, inputs, features.values[0], places, config=config)
    edits: Mapping[str, Any] = {}
    if len(features.values) > 1:
        edits = family.deepstack(features.values[1:], places)
    return (inputs, masks, freqs_cis), {"edits": edits} if edits else {}
