"""Generation with cross attention: to what an encoder makes of a source, or a tower of images.

The keys and values of these memories are made once for each request (`fnmodels.cache.encode`) and stand in its row of
the cache beside those of its own tokens. Memories may differ in length: shorter ones are padded, which nothing reads.
"""

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

import fnmodels
from fnmodels import Cache
from fnmodels.cache.value import Slots
from fnmodels.image_text import image_tiles
from fnmodels.inputs.mask import Mask
from fnmodels.models.common.family import field_of
from fnmodels.models.common.registry import family_of, stack_configs
from fnmodels.models.encoder_decoder.cross_attention import cross_mask
from fnmodels.options import ForwardKwargs
from fnmodels.tree import Tree

from .images import text_model
from .prompts import Prefilled, activations
from .requests import Request, length_of

_KEYS = ("memory_k", "memory_v")


def decoding_model(params: Tree, config: Any) -> tuple[Tree, Any]:
    """(params, config) of what writes: the decoder of both stacks, the text of a model that reads images, or itself."""
    if stacks := stack_configs(config):
        return fnmodels.stack_params(params, "decoder"), stacks["decoder"]
    return text_model(params, config)


def first_tokens(config: Any) -> list[int]:
    """The decoder's first tokens: decoder_start_token_id of config.json, then forced_bos_token_id where it has one."""
    forced = dict(config.extra).get("forced_bos_token_id")
    return [config.decoder_start_token_id, *([] if forced is None else [int(json.loads(forced))])]


def begun(config: Any, prompts: Sequence[Any], beginnings: Sequence[Sequence[int]] | None) -> Sequence[Sequence[int]]:
    """The prompts of what writes: those given, or of a model of both stacks the beginnings of its decoder.

    ValueError for beginnings of another model, and for another number of them.
    """
    if not stack_configs(config):
        if beginnings is not None:
            raise ValueError(
                f"A {config.model_type} has no encoder, so its prompts are what it begins with: leave beginnings out."
            )
        return prompts
    if beginnings is None:
        return [first_tokens(config)] * len(prompts)
    if len(beginnings) != len(prompts):
        raise ValueError(
            f"beginnings has {len(beginnings)} entries; it must have one for each of {len(prompts)} prompts."
        )
    return beginnings


def with_sources(config: Any, requests: list[Request], prompts: Sequence[Any]) -> list[Request]:
    """The requests with the prompts as what the encoder reads, where the model has one."""
    if not stack_configs(config):
        return requests
    return [replace(request, source=source) for request, source in zip(requests, prompts, strict=True)]


@dataclass(frozen=True)
class Memories:
    """Where the requests of a run have what their cross attention reads.

    params, config: of the whole model. width: tokens of the longest memory. capacity: of the tokens of a request.
    """

    params: Tree
    config: Any
    width: int
    capacity: int

    def with_memory(self, cache: Cache) -> Cache:
        """An empty cache of what writes with room for memories."""
        (params, config), (dtype, device) = decoding_model(self.params, self.config), activations(self.params)
        rows = len(next(iter(cache.slots.values())).segments)
        heads = field_of(config, "num_key_value_heads") or config.num_attention_heads
        shape = rows, self.width, heads, config.head_dim
        layers = tuple(
            {**entry, **{name: torch.zeros(shape, dtype=dtype, device=device) for name in _KEYS}}
            if "cross_attention" in layer
            else entry
            for layer, entry in zip(params["layers"], cache.layers, strict=True)
        )
        none = torch.zeros(rows, self.width, dtype=torch.int64, device=device)
        return replace(cache, layers=layers, memory=Slots(none, none, None, False))

    def widened(self, cache: Cache) -> Cache:
        """The cache with room for the longest memory of the run, so that rows fit into one cache."""
        memory = cache.memory
        assert memory is not None
        more = self.width - memory.segments.shape[1]
        layers = tuple(
            {name: F.pad(t, (0, 0, 0, 0, 0, more)) if name in _KEYS else t for name, t in entry.items()}
            for entry in cache.layers
        )
        slots = Slots(F.pad(memory.positions, (0, more)), F.pad(memory.segments, (0, more)), None, False)
        return replace(cache, layers=layers, memory=slots)

    def encoded(
        self, requests: Sequence[Request], **options: Unpack[ForwardKwargs]
    ) -> Generator[None, None, Prefilled]:
        """A generator, which never yields, of a cache of all tokens of each prompt but the last; see `prefilled`."""
        raise NotImplementedError


class Sources(Memories):
    """The encoder of a run of requests, which reads their sources."""

    def encoded(
        self, requests: Sequence[Request], **options: Unpack[ForwardKwargs]
    ) -> Generator[None, None, Prefilled]:
        """See `Memories.encoded`."""
        stacks, (_, device) = stack_configs(self.config), activations(self.params)
        tokens, ids = _padded([torch.as_tensor(request.source) for request in requests], device)
        prepared = fnmodels.prepare(stacks["encoder"], tokens, segment_ids=ids)
        cache = fnmodels.cache.encode(self.params, *prepared, config=self.config, capacity=self.capacity, **options)
        cache = self.widened(cache)
        if any(len(request.prompt) > 1 for request in requests):
            tokens, ids = _padded([torch.as_tensor(request.prompt[:-1]).long() for request in requests], device)
            step = fnmodels.prepare_step(stacks["decoder"], tokens, cache, segment_ids=ids)
            decoder, config = decoding_model(self.params, self.config)
            _, cache = fnmodels.decode_(decoder, *step, cache, config=config, **options)
        yield from ()
        return Prefilled(cache, {})


class ImageMemories(Memories):
    """The images of a run of requests, which layers of the text attend to; see `family.image_memory`.

    A new token sees the images that the last token of its prompt sees: no answer has an image token, for the head has
    no logits of it, or only a document's first token is one.
    """

    def encoded(
        self, requests: Sequence[Request], **options: Unpack[ForwardKwargs]
    ) -> Generator[None, None, Prefilled]:
        """See `Memories.encoded`. Equal prompts with the same images are computed once."""
        keys = [(tuple(request.prompt), tuple(map(id, request.images)), length_of(request)) for request in requests]
        distinct = dict(zip(keys, requests, strict=True))
        cache = self.widened(self._read(list(distinct.values()), **options))
        yield from ()
        rows = list(distinct)
        return Prefilled(fnmodels.take(cache, [rows.index(key) for key in keys]), {})

    def _read(self, requests: Sequence[Request], **options: Unpack[ForwardKwargs]) -> Cache:
        """The cache of all tokens of each prompt but the last, with the memory of its images."""
        (params, config), (dtype, device) = decoding_model(self.params, self.config), activations(self.params)
        tokens, ids = _padded([torch.as_tensor(request.prompt).long() for request in requests], device)
        images, kernel = [request.images for request in requests], options.get("kernel", "auto")
        memory, seen = self._memory(images, tokens, ids, kernel)
        cache = fnmodels.init_cache(config, len(tokens), self.capacity, dtype=dtype, device=device)
        family: Any = family_of(config)
        layers = []
        for layer, entry in zip(params["layers"], cache.layers, strict=True):
            if "cross_attention" in layer:
                k, v = family.memory_keys(layer, memory, config=config)
                entry = {**entry, "memory_k": k, "memory_v": v}
            layers.append(entry)
        cache = replace(cache, layers=tuple(layers))
        if tokens.shape[1] > 1:
            last = torch.tensor([len(request.prompt) - 1 for request in requests], device=device)
            before = ids.where(torch.arange(ids.shape[1], device=device) < last[:, None], 0)[:, :-1]
            length = torch.tensor(list(map(length_of, requests)), device=device)
            inputs, masks, tables = fnmodels.prepare_step(
                config, tokens[:, :-1], cache, segment_ids=before, length=length
            )
            given = {**inputs, "memory_mask": seen.select(slice(-1), slice(None))}
            _, cache = fnmodels.decode_(params, given, masks, tables, cache, config=config, **options)
        return replace(cache, memory=_seen_last(seen, ids))

    def _memory(
        self, images: Sequence[Sequence[Any]], tokens: Tensor, segment_ids: Tensor, kernel: Any
    ) -> tuple[Tensor, Mask]:
        """(memory [B, K, D], the Mask of the tokens and it) of the images of each row; each image is read once."""
        unique = {id(image): image for own in images for image in own}
        if not unique:
            (_, config), none = decoding_model(self.params, self.config), torch.zeros_like(tokens[:, :1])
            dtype = activations(self.params)[0]
            width = field_of(config, "memory_size") or config.hidden_size
            memory = torch.zeros(*none.shape, width, dtype=dtype, device=tokens.device)
            return memory, cross_mask(segment_ids, segment_ids, none, none)
        features, positions = image_tiles(self.params, list(unique.values()), config=self.config, kernel=kernel)
        numbers = {name: number for number, name in enumerate(unique)}
        each = [numbers[id(image)] for own in images for image in own]
        family: Any = family_of(self.config)
        found = family.image_memory(tokens, segment_ids, features[each], positions[each], config=self.config)
        return found["memory"], found["memory_mask"]


def _seen_last(mask: Mask, segment_ids: Tensor) -> Slots:
    """The slots of a memory in the segment 1 where the last token of each row sees them, else in none."""
    last = (segment_ids > 0).sum(1, keepdim=True) - 1
    group = mask.q_segments.gather(1, last)
    return Slots(mask.kv_positions, ((mask.kv_segments == group) & (group > 0)).long(), None, False)


def memories_of(params: Tree, config: Any, requests: Any, capacity: int, options: dict[str, Any]) -> Memories | None:
    """The `Memories` of a run; None for one without any: of a model of a single stack, and for prompts without images.

    options: kv_dtype and compile, which such a run has not. ValueError for these, for requests that are no sequence,
    whose longest memory is not known, and for a source or image that cannot be read, with the request's number.
    """
    known = isinstance(requests, Sequence)
    images = known and hasattr(family_of(config), "image_memory") and any(request.images for request in requests)
    if not images and not stack_configs(config):
        return None
    what = "whose text attends to images" if images else "of an encoder and a decoder"
    if options["kv_dtype"] is not None or options["compile"] not in ("auto", "none"):
        raise ValueError(f"A model {what} runs without kv_dtype and compile: leave them out.")
    if not known:
        raise ValueError(
            f"Requests to a model {what} must be a sequence: the longest source sets the width of all rows of its "
            "cache."
        )
    size = _image_size if images else _source_size
    width = max((size(config, row, request) for row, request in enumerate(requests)), default=1)
    return (ImageMemories if images else Sources)(params, config, width, capacity)


def _image_size(config: Any, row: int, request: Request) -> int:
    """The tokens of the images of a request."""
    family: Any = family_of(config)
    if wrong := [image for image in request.images if not isinstance(image, Tensor)]:
        raise TypeError(f"Request {row}: an image of {config.model_type} is a tensor [3, H, W], not {type(wrong[0])}.")
    try:
        return sum(family.memory_tokens(image, config=config) for image in request.images)
    except ValueError as error:
        raise ValueError(f"Request {row}: {error}") from error


def _source_size(config: Any, row: int, request: Request) -> int:
    """The tokens of the source of a request."""
    source, config = request.source, stack_configs(config)["encoder"]
    if source is None:
        raise ValueError(f"Request {row} has no source, what the encoder reads: a model of both stacks needs one.")
    limit, size = config.max_position_embeddings, len(source)
    if not 0 < size <= limit:
        raise ValueError(f"The prompt of request {row} has {size} tokens; the encoder reads 1 to {limit}.")
    values = torch.as_tensor(source)
    if values.is_floating_point():
        return size  # vectors or frames [S, D], which the family's `embed` checks
    wrong = [token for token in values.tolist() if not 0 <= token < config.vocab_size]
    if wrong:
        raise ValueError(
            f"The prompt of request {row} has the token {wrong[0]}; token ids are from 0 to {config.vocab_size - 1}."
        )

    return size


def _padded(rows: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """(rows [S, ...] as one tensor [B, longest, ...] with zeros at padding, segment ids [B, longest])."""
    longest = max(map(len, rows))
    tokens = rows[0].new_zeros(len(rows), longest, *rows[0].shape[1:])
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    for row, (target, segment) in zip(rows, zip(tokens, ids, strict=True), strict=True):
        target[: len(row)], segment[: len(row)] = row, 1
    return tokens.to(device), ids.to(device)
