"""The batch of a loss: its keys, its microbatches, the checks of its entries, and what a run keeps of the last one."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.image_text import Prepared
from fnmodels.inputs.values import at_hand
from fnmodels.models.common.family import DecoderConfig
from fnmodels.ops.torch_internals import quiet, versions
from fnmodels.preparation import check_tokens

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
MOST = 1 << 13  # tokens of a batch that is kept: tables of more take memory, and no time beside their layers
_OF_POSITIONS = {"tokens", "positions", "valid"}  # inputs of models of which no other follows from the tokens


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


class _Last(NamedTuple):
    """A batch without its tokens: arguments of `prepare`, results, and how often its tensors had been written to."""

    config: DecoderConfig
    length: int | None
    positions: Tensor
    segment_ids: Tensor
    inputs: dict[str, Any]
    masks: Any
    tables: Any
    tensors: tuple[Tensor, ...]
    writes: list[int]

    def is_of(self, config: DecoderConfig, tokens: Tensor, positions: Any, segment_ids: Any, length: Any) -> bool:
        """Whether `prepare` makes the same of these arguments, apart from the tokens."""
        if config is not self.config or length is not self.length or tokens.shape[:2] != self.positions.shape:
            return False
        same = tokens.is_cpu and _same(positions, self.positions) and _same(segment_ids, self.segment_ids)
        return same and versions(self.tensors) == self.writes


class KeptBatch:
    """What `fnmodels.prepare` made of a run's last batch, for batches whose rows hold the same documents.

    All but the tokens follows from positions and segment ids. In rows of one document each these are equal in every
    step, and preparing them takes as long as a layer of a small model. A caller's writes into what is kept are noticed,
    but not those that torch does not count.
    """

    def __init__(self) -> None:
        self._last: _Last | None = None

    def prepare(
        self, config: DecoderConfig, tokens: Tensor, *, positions: Tensor, segment_ids: Tensor, length: Any, rng: Any
    ) -> Prepared:
        """`fnmodels.prepare` of a batch, with its errors."""
        places = {"positions": positions, "segment_ids": segment_ids, "length": length}
        if torch.compiler.is_compiling() or rng is not None or not quiet():
            return fnmodels.prepare(config, tokens, **places, rng=rng)
        last = self._last
        if last is not None and last.is_of(config, tokens, positions, segment_ids, length):
            return {**last.inputs, "tokens": check_tokens(tokens)}, dict(last.masks), dict(last.tables)
        if length is None and _is_kept(tokens) and _is_kept(positions) and _is_kept(segment_ids):
            places |= {"positions": positions.clone(), "segment_ids": segment_ids.clone()}  # that are not the caller's
        inputs, masks, tables = fnmodels.prepare(config, tokens, **places)
        self._last = None
        if places["positions"] is not positions and inputs.keys() == _OF_POSITIONS:
            rest = {name: value for name, value in inputs.items() if name != "tokens"}
            tensors = tuple({id(leaf): leaf for leaf in tree.leaves((rest, masks, tables))}.values())
            if (writes := versions(tensors)) is not None:
                held = config, None, places["positions"], places["segment_ids"], rest, dict(masks), dict(tables)
                self._last = _Last(*held, tensors, writes)
        return inputs, masks, tables


def _is_kept(tensor: Any) -> bool:
    plain = isinstance(tensor, Tensor) and at_hand(tensor) is tensor
    return plain and tensor.ndim == 2 and tensor.numel() <= MOST and not tensor.is_inference()


def _same(tensor: Any, held: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.is_cpu and tensor.dtype is held.dtype and torch.equal(tensor, held)
