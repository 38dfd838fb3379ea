"""`encode`: what an encoder returns, as the keys and values of its decoder's cross attention in a cache."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

from fnmodels.apply import forward, stack_params
from fnmodels.inputs.mask import Mask, MaskLike, attention_part
from fnmodels.models.common.registry import stack_configs
from fnmodels.models.encoder_decoder.cross_attention import keys_of_memory, without_padding
from fnmodels.options import ForwardKwargs
from fnmodels.tree import Tree

from .init import init_cache
from .value import Cache, Slots, known_clean


def encode(
    params: Tree,
    inputs: Tree,
    masks: Mapping[str, MaskLike],
    freqs_cis: Mapping[str, Any],
    /,
    *,
    config: Any,
    capacity: int,
    length: int | None = None,
    rings: bool = True,
    **options: Unpack[ForwardKwargs],
) -> Cache:
    """The cache of an encoder-decoder, with the encoder run and no tokens of the decoder yet.

    The next tokens are those of the decoder alone:

        decoder, own = config.decoder, fnmodels.stack_params(params, "decoder")
        logits, cache = fnmodels.prefill(own, *fnmodels.prepare_step(decoder, tokens, cache), cache, config=decoder)

    A token of the decoder sees the encoder's tokens of its row that have its segment id, 1 by default.

    Args:
        params: The parameters of both stacks.
        inputs: Those of `fnmodels.prepare(config.encoder, tokens)`.
        masks: Those of the same call.
        freqs_cis: Those of the same call.
        config: The config of both stacks.
        capacity: Slots for the decoder's tokens per row.
        length: What length-dependent rotary scalings of the decoder read; None: the capacity.
        rings: Whether sliding layers hold no more than their window, see `fnmodels.init_cache`.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        The cache.

    Raises:
        ValueError: The model has a single stack.
        TypeError: A mask is no `fnmodels.inputs.Mask`.
    """
    stacks = stack_configs(config)
    if not stacks:
        raise ValueError(
            f"A model of type {config.model_type!r} with this config has one stack: take fnmodels.init_cache."
        )
    mask = attention_part(next(iter(masks.values())))
    if not isinstance(mask, Mask):
        raise TypeError(
            f"The encoder's mask is a {type(mask).__name__}; it must be a fnmodels.inputs.Mask, from prepare."
        )
    own = stack_params(params, "encoder")
    memory = forward(own, inputs, masks, freqs_cis, config=stacks["encoder"], **options)
    rows, width = memory.shape[:2]
    positions, segments = (t.expand(rows, width) for t in (mask.kv_positions, mask.kv_segments))
    memory = without_padding(memory, segments)
    decoder = stacks["decoder"]
    where: dict[str, Any] = {"dtype": memory.dtype, "device": memory.device}
    empty = init_cache(decoder, rows, capacity, length=length, rings=rings, **where)
    layers = []
    for layer, entry in zip(stack_params(params, "decoder")["layers"], empty.layers, strict=True):
        k, v = keys_of_memory(layer["cross_attention"], memory, head_dim=decoder.head_dim)
        layers.append({**entry, "memory_k": k, "memory_v": v})
    held = Slots(positions.contiguous(), segments.contiguous(), None, False)
    return known_clean(replace(empty, layers=tuple(layers), memory=held))
