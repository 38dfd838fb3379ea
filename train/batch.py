"""The batch of a loss: its keys, its microbatches, and the checks of its entries."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from fnmodels import tree

Entries = Mapping[str, Tensor]  # what losses and steps take: a `Batch`, or other keys of a loss of one's own


class Batch(TypedDict, total=False):
    """The keys of a batch that the losses of `train` read; each loss says which of them it needs.

    B rows of S positions, of one document each or of several that are packed (`fnmodels.pack(...).batch()`). All
    entries are in one order of rows and positions, so that rows may be split and positions permuted together.
    """

    tokens: Tensor  # int64 [B, S]: ids; of encoders that read frames or patches, their features [B, S, D]
    positions: Tensor  # int64 [B, S], from 0 in each document; [B, S, axes] where a position has several axes
    segment_ids: Tensor  # int64 [B, S]: which document of its row, from 1; 0 is padding
    labels: Tensor  # int64 [B, S]: the target predicted at each token, already shifted; -100 is ignored
    weights: Tensor  # [B, S]: multiplies each token's loss; a label of weight 0 does not count
    routing: Tensor  # int64 [B, S, layers, k]: the experts to use
    choices: Tensor  # int64 [B, S, layers, k]: the keys to use, of models that choose keys
    preceding: Tensor  # int64 [B, S, n - 1]: the tokens before each in its document, made before positions are split
    token_types: Tensor  # int64 [B, S]: see `fnmodels.prepare`
    image_features: Tensor  # [B, S, F, D]: of images at their tokens (`train.data.turns.image_rows`), of frozen towers
    is_image: Tensor  # bool [B, S]: the tokens that stand for these; text may have their id too
    maskable: Tensor  # bool [B, S]: tokens that masked diffusion may mask, of `diffusion_masks`
    rng: Tensor  # int64 [B, S]: keys of dropout (`fnmodels.inputs.noise_keys`), made before rows are split or permuted;
    # or a seed [] of rows that are not split, or one for each row [B]

    next_tokens: Tensor  # int64 [B, S, heads]: what follows, for heads that predict further tokens (`look_ahead`)
    next_labels: Tensor  # int64 [B, S, heads]: their labels
    next_weights: Tensor  # [B, S, heads]: their weights

    roles: Tensor  # int64 [B, S]: of a document in its pair: 0 a query, 1 its positive, from 2 hard negatives
    targets: Tensor  # [B, S, num_labels]: of documents with several labels or a regression

    decoder_tokens: Tensor  # int64 [B, T], of encoder-decoders; labels are [B, T] there
    decoder_positions: Tensor  # int64 [B, T]
    decoder_segment_ids: Tensor  # int64 [B, T]
    decoder_rng: Tensor  # int64 [B, T]: keys of dropout of the decoder's tokens (`noise_keys` of a second seed)

    patches: Tensor  # [B, I, C]: of the images that belong to texts (`image_text_batch`)
    patch_positions: Tensor  # int64 [B, I, axes]
    image_ids: Tensor  # int64 [B, I]: which image of its row, from 1; 0 is padding

    latents: Tensor  # [B, I, C]: of images to denoise (`flow_matching_loss`), with positions and segment_ids [B, I]
    noise: Tensor  # [B, I, C], and
    time: Tensor  # [B, M] for M images per row: as `flow_noise` draws them
    text: Tensor  # [B, T, D]: the conditions' embeddings, with
    text_segment_ids: Tensor  # int64 [B, T], and
    pooled: Tensor  # [B, M, D]: one for each image
    guidance: Tensor  # [B, M], where the config has it


Batches = Batch | Entries | Sequence[Batch] | Sequence[Entries]  # of a step: one, or its microbatches
PLACES = "places"  # batch key: each token's position in the unpermuted row, [B, S]
FULL_ROWS = "rows"  # batch key: a dict of the full rows, beside this rank's positions of them


def check_entries(batch: Entries, *names: str) -> None:
    """ValueError unless the batch has all of these keys."""
    missing = [name for name in names if name not in batch]
    if missing:
        raise ValueError(f"The batch has no {' and no '.join(missing)}; its keys are {sorted(batch)}.")


def microbatches(batch: Batches, accumulate: int = 1) -> list[Entries]:
    """The microbatches of a step, each a dict: those of a list, or the batch's rows split into `accumulate`.

    Where the rows do not divide evenly, the first microbatches have one more. ValueError for an empty list, accumulate
    with a list, entries that are not mappings, tensors that differ in their rows or have fewer than `accumulate`, and
    one seed of dropout for rows that are split.
    """
    if isinstance(batch, (list, tuple)):
        if not batch:
            raise ValueError("The list of microbatches is empty; it needs at least one.")
        if accumulate != 1:
            raise ValueError(f"The batch is a list of {len(batch)} microbatches, so accumulate is 1, not {accumulate}.")
        parts: list[Entries] = [_as_dict(one, f"Microbatch {i} of the list") for i, one in enumerate(batch)]
        for i, part in enumerate(parts):
            _refuse_seed(part, f"microbatch {i} of the list")
        return parts
    full = _as_dict(batch, "A batch that is no list")
    if accumulate == 1:
        return [full]
    _refuse_seed(full, f"a batch that accumulate={accumulate} splits")
    sizes: dict[str, int] = {}
    for name, tensor in tree.flatten(full).items():
        if not tensor.ndim or tensor.shape[0] < accumulate:
            raise ValueError(
                f"accumulate={accumulate} cannot split {name!r}, whose shape is {tuple(tensor.shape)}, by rows: give "
                "fewer parts, or a list of microbatches."
            )
        sizes[name] = tensor.shape[0]
    if len(set(sizes.values())) > 1:
        raise ValueError(f"accumulate={accumulate} splits a batch by rows, and its entries differ in them: {sizes}.")
    return [tree.map(lambda t, i=i: t.tensor_split(accumulate)[i], full) for i in range(accumulate)]


def _refuse_seed(batch: Entries, what: str) -> None:
    """ValueError for one seed of dropout, by which each microbatch would number its documents from the first one."""
    rng = batch.get("rng")
    if isinstance(rng, Tensor) and not rng.ndim:
        raise ValueError(
            f"rng is one seed in {what}, and all microbatches would have the same masks of dropout: make keys of the "
            "full batch before it is split, fnmodels.inputs.noise_keys(seed, positions, segment_ids)."
        )


def _as_dict(batch: Any, what: str) -> dict[str, Tensor]:
    """The mapping as a dict, the only mapping that trees support. what: names it in the ValueError."""
    if not isinstance(batch, (dict, Mapping)):
        raise ValueError(f"{what} must be a dict of tensors; it is a {type(batch).__name__}.")
    made = batch if isinstance(batch, dict) else dict(batch)
    for path, entry in tree.flatten(made).items():
        if type(entry) is not Tensor or entry.layout is not torch.strided or entry.is_nested:
            check_entry(path, entry)
    return made


def check_entry(path: str, entry: Any) -> None:
    """ValueError for an entry of a batch that is no dense tensor: nested and sparse ones have no rows to take."""
    if not isinstance(entry, Tensor):
        raise ValueError(
            f"The batch's {path!r} is of type {type(entry).__name__}; entries are tensors: give a number by "
            "functools.partial to the loss, or as a tensor."
        )
    if entry.is_nested:
        raise ValueError(
            f"The batch's {path!r} is a nested (jagged) tensor; entries are dense: train.token_budget packs sequences "
            "of any lengths, jagged tensors among them, into dense rows."
        )
    if entry.layout is not torch.strided:
        raise ValueError(f"The batch's {path!r} has the layout {entry.layout}; entries are dense: give its to_dense().")
