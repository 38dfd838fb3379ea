"""What tests of vision-language models share: references, gradients by our paths, files both ways, documents."""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.inputs.images import patches_of
from fnmodels.models.common import storage
from params.checkpoint.tensor_map import is_leftover, missing_prefix, published_names, stored_leaves
from tests.support.cases import generic
from tests.support.oracle import on_disk


def perturbed(model: Any) -> Any:
    """The model in evaluation mode, with generic values in every parameter."""
    model = model.eval()
    with torch.no_grad():
        for path, tensor in model.named_parameters():
            tensor.copy_(generic(path, tensor))
    return model


def with_generic_buffers(model: Any) -> Any:
    """The model with generic values in the buffers that its files hold: biases of a router's choice."""
    with torch.no_grad():
        known = dict(model.named_parameters(remove_duplicate=False))
        for path, tensor in model.state_dict().items():
            if path not in known:
                tensor.copy_(generic(path, tensor))
    return model


def as_published(model: Any, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """`on_disk`, with Qwen3-VL's experts as published files have them: transformers does not transpose them back."""
    state = on_disk(model) if state is None else state
    if model.config.model_type != "qwen3_vl_moe":
        return state
    return {name: value.mT.contiguous() if ".experts." in name else value for name, value in state.items()}


def ours_of(state: dict[str, Tensor], config: Any) -> Any:
    """Tensors by their names on disk as our tree; no other tensor may be there than leftovers."""
    stored = stored_leaves(config, missing_prefix(stored_leaves(config), state))
    expected = {found for one in stored for found in storage.disk_names(one.stored)}
    state = {name: tensor for name, tensor in state.items() if not is_leftover(config, name)}
    state = dict(zip(published_names(config, expected, state), state.values(), strict=True))
    assert state.keys() == expected
    return tree.unflatten({one.path: storage.extract_parameter(one.stored, state).detach().clone() for one in stored})


def assert_gradients(model: Any, config: Any, params: Any, *, bound: float = 5e-5) -> None:
    """The gradients of our parameters are those of the model's after both went backward; without one it is 0."""
    grads = {
        path: torch.zeros_like(value) if value.grad is None else value.grad for path, value in model.named_parameters()
    }
    values = {path: value.detach().clone() for path, value in model.named_parameters()}
    with torch.no_grad():
        try:
            for path, value in model.named_parameters():
                value.copy_(grads[path])
            theirs = tree.flatten(ours_of(as_published(model), config))
        finally:
            for path, value in model.named_parameters():
                value.copy_(values[path])
    spec = tree.flatten(fnmodels.family_of(config).spec(config))
    theirs = {path: value for path, value in theirs.items() if spec[path].trainable}  # the others are buffers there
    floor = 1e-2 * max(float(wanted.abs().max()) for wanted in theirs.values())  # a key's bias has a gradient of 0
    for path, leaf in tree.flatten(params).items():
        if path not in theirs:
            continue
        found = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        worst = float((found - theirs[path]).abs().max())
        assert worst <= bound * max(float(theirs[path].abs().max()), floor), f"{path} is off by {worst:.1e}"


def assert_files(model: Any, config: Any, folder: Path, *, parts: Sequence[str] = ("text", "vision")) -> None:
    """Their folder is read as this config and these values; ours is read by them without a missing or extra tensor."""
    save(model, folder / "theirs")
    read, params = P.load_pretrained(folder / "theirs")
    assert read == config
    mine = tree.flatten(ours_of(as_published(model), config))
    assert all(torch.equal(leaf, mine[path]) for path, leaf in tree.flatten(params).items())
    P.save_pretrained(folder / "ours", read, params)
    again, told = type(model).from_pretrained(folder / "ours", output_loading_info=True)
    told["missing_keys"] = {name for name in told["missing_keys"] if not is_leftover(config, name)}
    assert not any(told.values()), told
    assert all(torch.equal(value, model.state_dict()[path]) for path, value in again.state_dict().items())
    for part in parts:
        own, loaded = P.load_pretrained(folder / "theirs", part=part)
        assert own == getattr(config, part) == P.load_config(folder / "theirs", part=part)
        assert all(torch.equal(leaf, mine[f"{part}.{path}"]) for path, leaf in tree.flatten(loaded).items())


def save(model: Any, folder: Path) -> None:
    """The model's checkpoint folder with published names and forms."""
    mended = model.config.model_type == "qwen3_vl_moe"
    more = {"state_dict": as_published(model), "save_original_format": False} if mended else {}
    model.save_pretrained(folder, **more)


def assert_text_alone(config: Any, folder: Path) -> None:
    """After `assert_files`: the text is saved as a model without a tower, and read as one."""
    text, params = P.load_pretrained(folder / "theirs", part="text")
    P.save_pretrained(folder / "text", text, params)
    again, loaded = P.load_pretrained(folder / "text")
    assert again == text == config.text and type(again) is type(text)
    flat = tree.flatten(params)
    assert all(torch.equal(leaf, flat[path]) for path, leaf in tree.flatten(loaded).items())


def rows_of(texts: Sequence[Sequence[Tensor]], length: int) -> tuple[Tensor, Tensor]:
    """(tokens [B, length], segment ids) of rows of documents, padded at the end."""
    segment_ids = fnmodels.segments_from_lengths([[len(text) for text in row] for row in texts], length)
    tokens = torch.ones_like(segment_ids)
    tokens[segment_ids > 0] = torch.cat([text for row in texts for text in row])
    return tokens, segment_ids


def feature_grid(family: Any, cells: Sequence[int]) -> tuple[int, int]:
    """(rows, columns) of the features of an image of this many cells: those, or with a column of newlines."""
    rows, columns = cells
    return family.feature_grid(rows, columns) if hasattr(family, "feature_grid") else (rows, columns)


def documents_with_grids(
    documents: Sequence[Sequence[Any]], image_token: int, side: int, *, family: Any = None
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """(tokens of each document, its images [3, H, W]): text of n tokens, and images of (rows, columns) cells.

    side: of a cell, in pixels. The ids of text are below 57. family: of `feature_grid`.
    """
    generator = torch.Generator().manual_seed(0)
    texts, images = [], []
    for document in documents:
        grids = [one for one in document if not isinstance(one, int)]
        runs = [
            torch.randint(1, 57, (one,), generator=generator)
            if isinstance(one, int)
            else torch.full((math.prod(feature_grid(family, one)),), image_token)
            for one in document
        ]
        texts.append(torch.cat(runs))
        images.append([torch.randn(3, side * h, side * w, generator=generator) for h, w in grids])
    return texts, images


def merged_patches(image: Tensor, patch: int) -> Tensor:
    """[patches, C 2 p p] of an image [C, H, W] as Qwen's processors order them: cell by cell of 2 x 2, two frames."""
    channels, height, width = image.shape
    cells = image.reshape(channels, height // (2 * patch), 2, patch, width // (2 * patch), 2, patch)
    cells = cells.permute(1, 4, 2, 5, 0, 3, 6)  # rows, columns, 2, 2, C, p, p
    return cells[..., None, :, :].expand(*cells.shape[:5], 2, patch, patch).reshape(-1, channels * 2 * patch**2)


def each_alone(model: Any, documents: Sequence[Sequence[Any]], image_token: int, side: int) -> Tensor:
    """[tokens, V] of one of Qwen's models: every document alone, one after the other."""
    out = []
    for text, images in zip(*documents_with_grids(documents, image_token, side), strict=True):
        pixels: dict[str, Tensor] = {}
        if images:
            pixels["pixel_values"] = torch.cat([merged_patches(image, side // 2) for image in images])
            grids = [(1, 2 * (image.shape[1] // side), 2 * (image.shape[2] // side)) for image in images]
            pixels |= {"image_grid_thw": torch.tensor(grids), "mm_token_type_ids": (text == image_token).long()[None]}
        out.append(model(input_ids=text[None], **pixels).logits[0])
    return torch.cat(out)


def qwen_logits(
    family: Any,
    config: Any,
    documents: Sequence[Sequence[Any]],
    image_token: int,
    params: Any,
    *,
    text_order: bool = False,
) -> tuple[Tensor, Tensor]:
    """(logits [2, 36, V], segment ids) of one of Qwen's models: four documents, two in each row.

    text_order: a planted bug, positions of text at all tokens.
    """
    texts, images = documents_with_grids(documents, image_token, 2 * config.vision.patch_size, family=family)
    tokens, segment_ids = rows_of((texts[:2], texts[2:]), 36)
    frames = getattr(config.vision, "frames", 1)
    flat = [image.repeat_interleave(frames, 0) for own in images for image in own]
    patches, at, image_ids = fnmodels.inputs.patch_rows(flat, config.vision, length=50)
    batch = fnmodels.prepare(config.vision, patches, positions=at, segment_ids=image_ids)
    cells = family.cells(at, image_ids, config.vision.merge)
    if hasattr(family, "taps"):
        x, tapped = fnmodels.hidden(params["vision"], *batch, config=config.vision, taps=family.taps(config))
        features, *later = family.project(params, x, tapped, cells, config=config)
    else:
        x = fnmodels.forward(params["vision"], *batch, config=config.vision)
        (features,), later = family.features_of(params, x, {}, cells, config=config), []
    places = family.image_places(tokens, image_token, torch.ones(features.shape[:2], dtype=torch.bool))
    sizes = [one for document in documents for one in document if not isinstance(one, int)]
    grids = torch.tensor([(1, *feature_grid(family, one)) for one in sizes])
    positions = family.image_positions(tokens == image_token, segment_ids, grids)
    if text_order:
        positions = fnmodels.positions_from_segments(segment_ids)[..., None].expand_as(positions)
    inputs, masks, freqs = fnmodels.prepare(config.text, tokens, positions=positions, segment_ids=segment_ids)
    inputs = family.with_images(params, inputs, features, places, config=config)
    edits = family.deepstack(later, places) if later else None
    logits: Tensor = fnmodels.forward(
        params["text"], inputs, masks, freqs, config=config.text, edits=edits, kernel="math"
    )
    return logits, segment_ids


Pixels = Callable[[Sequence[Tensor]], dict[str, Tensor]]


def stacked(images: Sequence[Tensor]) -> dict[str, Tensor]:
    """Images of one size."""
    return {"pixel_values": torch.stack(list(images))}


def padded(images: Sequence[Tensor]) -> dict[str, Tensor]:
    """Images [n, 3, H, W] with zeros at the right and below, and their sizes, as Pixtral's tower takes them."""
    sizes = [tuple(image.shape[1:]) for image in images]
    square = torch.zeros(len(images), 3, max(h for h, _ in sizes), max(w for _, w in sizes))
    for one, image in zip(square, images, strict=True):
        one[:, : image.shape[1], : image.shape[2]] = image
    return {"pixel_values": square, "image_sizes": torch.tensor(sizes)}


def naflex(images: Sequence[Tensor], patch: int) -> dict[str, Tensor]:
    """Padded rows of patches [n, patches, p p 3], as SigLIP 2's tower takes them."""
    cells = [patches_of(image, patch, channels_last=True) for image in images]
    most = max(one.shape[0] * one.shape[1] for one in cells)
    pixels, mask = torch.zeros(len(cells), most, cells[0].shape[-1]), torch.zeros(len(cells), most, dtype=torch.int64)
    for i, one in enumerate(cells):
        pixels[i, : one.shape[0] * one.shape[1]], mask[i, : one.shape[0] * one.shape[1]] = one.flatten(0, 1), 1
    shapes = torch.tensor([one.shape[:2] for one in cells])
    return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def pixels_for(config: Any) -> Pixels:
    """How transformers' model with this tower takes images."""
    tower = config.vision
    if getattr(tower, "naflex", False):
        return functools.partial(naflex, patch=tower.patch_size)
    if getattr(tower, "bucketed", False):
        return lambda images: {"pixel_values": torch.stack(list(images))[None]}
    return padded if tower.model_type == "pixtral" else stacked


def alone(
    model: Any, documents: Sequence[Sequence[Any]], image_token: int, side: int, *, pixels: Pixels = stacked
) -> Tensor:
    """[tokens, V]: every document alone, one after the other."""
    out = []
    for text, images in zip(*documents_with_grids(documents, image_token, side), strict=True):
        out.append(model(input_ids=text[None], use_cache=False, **(pixels(images) if images else {})).logits[0])
    return torch.cat(out)


def cell_logits(
    family: Any,
    config: Any,
    documents: Sequence[Sequence[Any]],
    image_token: int,
    params: Any,
    *,
    reverse: bool = False,
    length: int = 80,
) -> tuple[Tensor, Tensor]:
    """(logits [2, 60, V], segment ids) of a model whose features are cells: four documents, two in each row.

    length: of rows of patches. reverse: a planted bug, the patches of a cell, or with one patch the cells, in the
    opposite order.
    """
    side = family.cell_side(config)
    texts, images = documents_with_grids(documents, image_token, side * config.vision.patch_size)
    tokens, segment_ids = rows_of((texts[:2], texts[2:]), 60)
    frames = getattr(config.vision, "frames", 1)
    flat = [image.repeat_interleave(frames, 0) for own in images for image in own]
    patches, at, image_ids = fnmodels.inputs.patch_rows(flat, config.vision, length=length)
    batch = fnmodels.prepare(config.vision, patches, positions=at, segment_ids=image_ids)
    (weights, tower), run = (params["vision"], config.vision), fnmodels.forward
    if hasattr(family, "tower"):
        (weights, tower), run = family.tower(params, config), fnmodels.hidden
    names = family.taps(config) if hasattr(family, "taps") else ()
    x = run(weights, *batch, config=tower, taps=names)
    x, tapped = x if names else (x, {})
    where = family.cells(at, image_ids, side)
    where = where.flip(int(side > 1)) if reverse else where
    features, *_ = family.features_of(params, x, tapped, where, config=config)
    own = fnmodels.positions_from_segments(segment_ids)
    inputs, masks, freqs_cis = fnmodels.prepare(config.text, tokens, positions=own, segment_ids=segment_ids)
    places = family.image_places(tokens, image_token, torch.ones(features.shape[:2], dtype=torch.bool))
    inputs = family.with_images(params, inputs, features, places, config=config)
    logits: Tensor = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text, kernel="math")
    return logits, segment_ids
