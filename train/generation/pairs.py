"""Generation with a model of an encoder and a decoder: the encoder reads the prompts, the decoder begins and goes on.

The keys and values of cross attention are made once for each request (`fnmodels.cache.encode`) and stand in its row of
the cache beside those of its own tokens. Sources may differ in length: shorter ones are padded, which nothing reads.
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
from fnmodels.models.common.family import field_of
from fnmodels.models.common.registry import stack_configs
from fnmodels.options import ForwardKwargs
from fnmodels.tree import Tree

from .images import text_model
from .prompts import Prefilled, activations
from .requests import Request


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
class Sources:
    """The encoder of a run of requests. width: tokens of the longest source. capacity: of the decoder's tokens."""

    params: Tree
    config: Any
    width: int
    capacity: int

    def with_memory(self, cache: Cache) -> Cache:
        """An empty cache of the decoder with room for what the encoder returns."""
        decoder, (dtype, device) = stack_configs(self.config)["decoder"], activations(self.params)
        rows = len(next(iter(cache.layers[0].values())))
        heads = field_of(decoder, "num_key_value_heads") or decoder.num_attention_heads
        shape = rows, self.width, heads, decoder.head_dim
        entries = [
            {**entry, **{name: torch.zeros(shape, dtype=dtype, device=device) for name in ("memory_k", "memory_v")}}
            for entry in cache.layers
        ]
        none = torch.zeros(rows, self.width, dtype=torch.int64, device=device)
        return replace(cache, layers=tuple(entries), memory=Slots(none, none, None, False))

    def encoded(
        self, requests: Sequence[Request], **options: Unpack[ForwardKwargs]
    ) -> Generator[None, None, Prefilled]:
        """A generator, which never yields, of a cache of all tokens of each beginning but the last; see `prefilled`."""
        stacks, (_, device) = stack_configs(self.config), activations(self.params)
        tokens, ids = _padded([torch.as_tensor(request.source) for request in requests], device)
        prepared = fnmodels.prepare(stacks["encoder"], tokens, segment_ids=ids)
        cache = fnmodels.cache.encode(self.params, *prepared, config=self.config, capacity=self.capacity, **options)
        cache = self._widened(cache)
        if any(len(request.prompt) > 1 for request in requests):
            tokens, ids = _padded([torch.as_tensor(request.prompt[:-1]).long() for request in requests], device)
            step = fnmodels.prepare_step(stacks["decoder"], tokens, cache, segment_ids=ids)
            decoder, config = decoding_model(self.params, self.config)
            _, cache = fnmodels.decode_(decoder, *step, cache, config=config, **options)
        yield from ()
        return Prefilled(cache, {})

    def _widened(self, cache: Cache) -> Cache:
        """The cache with the memory of the longest source of the run, so that rows fit into one cache."""
        memory = cache.memory
        assert memory is not None
        more = self.width - memory.segments.shape[1]
        layers = tuple(
            {name: F.pad(t, (0, 0, 0, 0, 0, more)) if name.startswith("memory") else t for name, t in entry.items()}
            for entry in cache.layers
        )
        slots = Slots(F.pad(memory.positions, (0, more)), F.pad(memory.segments, (0, more)), None, False)
        return replace(cache, layers=layers, memory=slots)


def sources_of(params: Tree, config: Any, requests: Any, capacity: int, options: dict[str, Any]) -> Sources | None:
    """The `Sources` of a run; None for a model without an encoder.

    options: kv_dtype and compile, which such a run has not. ValueError for these, for requests that are no sequence,
    whose longest source is not known, and for a source that the encoder cannot read, with the request's number.
    """
    if not (stacks := stack_configs(config)):
        return None
    if options["kv_dtype"] is not None or options["compile"] not in ("auto", "none"):
        raise ValueError("A model of an encoder and a decoder runs without kv_dtype and compile: leave them out.")
    if not isinstance(requests, Sequence):
        raise ValueError(
            "Requests to a model of an encoder and a decoder must be a sequence: the longest source sets the width of "
            "all rows of its cache."
        )
    for row, request in enumerate(requests):
        _check_source(row, request.source, stacks["encoder"])
    return Sources(params, config, max((len(request.source) for request in requests), default=1), capacity)


def _check_source(row: int, source: Any, config: Any) -> None:
    if source is None:
        raise ValueError(f"Request {row} has no source, what the encoder reads: a model of both stacks needs one.")
    limit, size = config.max_position_embeddings, len(source)
    if not 0 < size <= limit:
        raise ValueError(f"The prompt of request {row} has {size} tokens; the encoder reads 1 to {limit}.")
    values = torch.as_tensor(source)
    if values.is_floating_point():
        return  # vectors or frames [S, D], which the family's `embed` checks
    wrong = [token for token in values.tolist() if not 0 <= token < config.vocab_size]
    if wrong:
        raise ValueError(
            f"The prompt of request {row} has the token {wrong[0]}; token ids are from 0 to {config.vocab_size - 1}."
        )


def _padded(rows: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """(rows [S, ...] as one tensor [B, longest, ...] with zeros at padding, segment ids [B, longest])."""
    longest = max(map(len, rows))
    tokens = rows[0].new_zeros(len(rows), longest, *rows[0].shape[1:])
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    for row, (target, segment) in zip(rows, zip(tokens, ids, strict=True), strict=True):
        target[: len(row)], segment[: len(row)] = row, 1
    return tokens.to(device), ids.to(device)
