"""An explicit cache for generation: `init_cache`, `prepare_step`, `prefill`, `decode` and `decode_`.

    cache = init_cache(config, batch=B, capacity=S + new)
    logits, cache = prefill(params, *prepare_step(config, prompts, cache), cache, config=config)         # [B, V]
    logits, cache = decode_(params, *prepare_step(config, tokens, cache), cache, config=config)          # [B, 1, V]

A cache is a value: tensors per layer, and for each kind of layer what stands in each slot (`Slots`). The mask of a step
is the family's rule on the positions and segments of the slots and of the new tokens, so there is no cursor, no left
padding and no count that could disagree with what is stored.
"""

from .captured import captured_step
from .compiled import DecodingStep, compiled_step
from .eager import eager_step, tapped_step
from .encode import encode
from .init import init_cache
from .prepare import prepare_step
from .rows import insert, insert_, resize, take, truncate, truncate_
from .step import decode, decode_, prefill, tapped_decode_
from .value import Cache, Slots

__all__ = [
    "Cache",
    "DecodingStep",
    "Slots",
    "captured_step",
    "compiled_step",
    "decode",
    "decode_",
    "eager_step",
    "encode",
    "init_cache",
    "insert",
    "insert_",
    "prefill",
    "prepare_step",
    "resize",
    "take",
    "tapped_decode_",
    "tapped_step",
    "truncate",
    "truncate_",
]
