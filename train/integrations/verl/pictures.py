"""Images of verl's batches: `multi_modal_inputs`, what transformers' processors made of the images of each sequence.

The text is trained; the tower and what joins it to the text are as the checkpoint has them, whole on every rank.
`PromptImages` has those of a rollout's requests.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import params as P
from fnmodels import tree
from fnmodels.image_text import image_grid, own_places
from fnmodels.models.common.registry import family_of, text_config
from fnmodels.preparation import positions_of_images
from fnmodels.tree import Tree
from params.sharding import sharding_of
from train.data.turns.image_rows import FEATURES, MARKS, check_causal, image_entries
from train.parallel.whole_model import fetching

ENTRY = "multi_modal_inputs"
PIXELS, GRIDS = "pixel_values", "image_grid_thw"
BESIDE = {"images_seqlens", "token_type_ids", "mm_token_type_ids", "num_crops"}  # follow from the others and the tokens
KEPT = 1 << 30  # bytes of pictures that a rollout has at hand, for the answers to a prompt and turns of a conversation
PATCH_ROWS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")  # whose pixels come as rows of patches


def given_to(micro: Any) -> list[Mapping[str, Any]]:
    """The inputs of each sequence of a microbatch; {} for those without images."""
    if ENTRY not in micro.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        return []
    return [getattr(one, "data", one) or {} for one in micro[ENTRY]]


def images_of(given: Mapping[str, Any], config: Any) -> list[Tensor]:
    """The images [C, H, W] of a sequence, as the tower reads them. NotImplementedError for videos and the like."""
    known = {name: value for name, value in given.items() if value is not None and name not in BESIDE}
    pixels, grids = known.pop(PIXELS, None), known.pop(GRIDS, None)
    if known:
        raise NotImplementedError(f"{ENTRY} have {min(known)!r}; fnmodels takes {PIXELS} and {GRIDS}, of images.")
    if pixels is None:
        return []
    if grids is None:
        return list(pixels)
    if config.model_type not in PATCH_ROWS:
        raise NotImplementedError(f"{ENTRY} have {GRIDS}, in an order that is not known of a {config.model_type}.")
    sizes = grids.prod(-1).tolist()
    if sum(sizes) != len(pixels) or (grids[:, 0] != 1).any():
        raise ValueError(
            f"{PIXELS} have {len(pixels)} patches, and {GRIDS} are {grids.tolist()}: an image has one frame, and a "
            "patch for each row and column."
        )
    return [_unfolded(rows, grid, config) for rows, grid in zip(pixels.split(sizes), grids.tolist(), strict=True)]


def _unfolded(rows: Tensor, grid: list[int], config: Any) -> Tensor:
    """The image [C T, H, W] of rows of patches, those of a cell behind each other, each of C T P P numbers."""
    side, merge, frames = config.vision.patch_size, config.vision.merge, config.vision.frames
    _, down, across = grid
    cells = rows.reshape(down // merge, across // merge, merge, merge, -1, frames, side, side)
    return cells.permute(4, 5, 0, 2, 6, 1, 3, 7).reshape(-1, down * side, across * side)


def _answered(micro: Any) -> Tensor:
    """Bool [T]: the tokens of the row that the loss mask marks. ValueError where it does not say which these are.

    The mask is jagged, of the last tokens of each sequence or of all, or [N, R] of the padded batch's last R columns,
    as `left_right_2_no_padding` leaves it.
    """
    mask = micro["loss_mask"]
    if mask.is_nested:
        each = list(mask.unbind())
    elif "attention_mask" in micro.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        attended = micro["attention_mask"][:, micro["attention_mask"].shape[1] - mask.shape[1] :] != 0
        each = [own[there] for own, there in zip(mask, attended, strict=True)]
    else:
        raise ValueError("loss_mask is padded, and there is no attention_mask, which says how long each answer is.")
    found = torch.zeros_like(micro["input_ids"].values(), dtype=torch.bool)
    for end, own in zip(micro["input_ids"].offsets()[1:].tolist(), each, strict=True):
        found[end - len(own) : end] = own != 0
    return found


@dataclass(frozen=True)
class ImageReader:
    """The model around the text that is trained. config: of the whole model; params: all but those of its text."""

    config: Any
    params: Tree

    @staticmethod
    def load(folder: Path, dtype: torch.dtype, device: str) -> "ImageReader":
        """From a checkpoint folder. ValueError for one that reads no images, or whose prompt sees all of itself."""
        config = P.load_config(folder)
        if text_config(config) is config:
            raise ValueError(f"engine.images is true, and a {config.model_type} reads no images.")
        check_causal(config, "engine.images")
        _, params = P.load_pretrained(folder, dtype=dtype, device=device, copy=True)
        return ImageReader(config, {name: part for name, part in params.items() if name != "text"})

    def entries(self, micro: Any) -> dict[str, Tensor]:
        """Entries [T, ...] of a row: features at their tokens, and which tokens these are; also without images, for
        rows of all ranks have the same entries. ValueError for another number of image tokens than of features.

        Tokens of answers, which the loss mask marks, are text, whatever their id is.
        """
        tokens = micro["input_ids"]
        is_image = (tokens.values() == self.config.image_token) & ~_answered(micro)
        lengths = tokens.offsets().diff().tolist()
        images = self._images(micro, len(lengths))
        own = {"config": self.config, "marks": is_image.split(lengths)}
        found = image_entries(self.params, tokens.values().split(lengths), images, **own)
        if found:
            return {name: torch.cat(values) for name, values in found.items()}
        like = next(leaf for leaf in tree.leaves(self.params) if leaf.is_floating_point())
        return {FEATURES: like.new_zeros(len(is_image), self._features, self.config.text.hidden_size), MARKS: is_image}

    def positions(self, row: dict[str, Tensor], micro: Any) -> Tensor:
        """Positions [1, T], or of several axes where the model's are."""
        images = self._images(micro, len(micro["input_ids"].offsets()) - 1)
        grids = [image_grid(image, config=self.config) for own in images for image in own]
        made = torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)
        found = positions_of_images(self.config, row["segment_ids"], own_places(row[MARKS]), made)
        return row["positions"] if found is None else found

    def _images(self, micro: Any, count: int) -> list[list[Tensor]]:
        return [images_of(one, self.config) for one in given_to(micro)] or [[] for _ in range(count)]

    @property
    def _features(self) -> int:
        """How many features an image token has."""
        family: Any = family_of(self.config)
        return 1 + (len(family.taps(self.config)) if hasattr(family, "deepstack") else 0)

    def exported(self, text: Tree) -> Iterator[tuple[str, Tensor]]:
        """(name on disk, full tensor) of the whole model with a text, whose adapters are merged."""
        given = P.lora.merge(text)
        if sharding_of(tree.leaves(given)[0]) is None:
            return P.export(self.config, {**self.params, "text": given})
        leaves, fetch = fetching(given)
        flat = tree.flatten(self.params)

        def fetched(path: str) -> Any:
            return fetch(path.removeprefix("text.")) if path.startswith("text.") else flat[path]

        return P.export(self.config, {**self.params, "text": tree.unflatten(leaves)}, fetched)


@dataclass(frozen=True)
class PromptImages:
    """Images of a rollout's requests, read by verl's processor of the checkpoint as verl reads those of the actor.

    config: of the whole model. processor: of transformers. known: {key: images} of pictures that were read, those
    that were asked for last at the end.
    """

    config: Any
    processor: Any
    known: dict[bytes, list[Tensor]] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(folder: Path, trust_remote_code: bool = False) -> "PromptImages | None":
        """None for a checkpoint whose model reads no images here, or for which verl makes no processor."""
        from verl.utils.tokenizer import hf_processor

        try:
            config = P.load_config(folder)
        except P.CheckpointError:  # of a whole model that is not supported, though its text is
            return None
        family = family_of(config)
        if not hasattr(family, "with_images") or hasattr(family, "prompt_masks"):
            return None
        processor = hf_processor(str(folder), trust_remote_code=trust_remote_code)
        return None if processor is None else PromptImages(config, processor)

    def read(self, pictures: Sequence[Any], options: Mapping[str, Any] | None = None) -> list[Tensor]:
        """The images of pictures, in their order. options: mm_processor_kwargs of the request.

        ValueError for one that is no picture of PIL, which verl's data sets and tools give.
        """
        from PIL.Image import Image

        for number, picture in enumerate(pictures):
            if not isinstance(picture, Image):
                kind = type(picture).__name__
                raise ValueError(f"Image {number} of the request is a {kind}; it must be a picture of PIL.")
        return [image for picture in pictures for image in self._read_one(picture, dict(options or {}))]

    def _read_one(self, picture: Any, options: dict[str, Any]) -> list[Tensor]:
        """An image that was read before is the same object, for which `train.serve` computes features once."""
        from verl.utils.tokenizer import build_multimodal_processor_inputs

        about = f"{picture.mode} {picture.size} {picture.getpalette()} {sorted(options.items())}"
        key = hashlib.sha256(about.encode() + picture.tobytes()).digest()
        images = self.known.pop(key, None)
        if images is None:
            options = {"text": [""], "images": [picture], "mm_processor_kwargs": options}
            made = dict(build_multimodal_processor_inputs(self.processor, **options))
            images = images_of({name: made[name] for name in (PIXELS, GRIDS) if name in made}, self.config)
        self.known[key] = images
        while len(self.known) > 1 and sum(image.nbytes for each in self.known.values() for image in each) > KEPT:
            del self.known[next(iter(self.known))]
        return images

    def forget(self) -> None:
        """Drops the pictures that were read: other prompts come next."""
        self.known.clear()

    @property
    def placeholders(self) -> list[int]:
        """Ids that stand for images and videos. verl takes each for one, so that an answer must not have any."""
        from verl.utils.tokenizer import get_processor_token_id

        found = {
            self.config.image_token,
            *(get_processor_token_id(self.processor, kind) for kind in ("image", "video")),
        }
        size = text_config(self.config).vocab_size
        return sorted(token for token in found if token is not None and 0 <= token < size)
