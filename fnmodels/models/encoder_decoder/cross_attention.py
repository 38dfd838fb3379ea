"""Cross attention (arXiv 1706.03762): queries of a decoder, keys and values of what its encoder returns.

The memory and its mask come from the tree that `family.shared` makes: {"memory": [B, K, D], "memory_mask": a Mask of
the decoder's tokens as queries and the encoder's as keys, in which equal segment ids see each other}. A cache has the
keys and values of the memory instead, which `fnmodels.cache.encode` projects once.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from fnmodels.inputs.mask import Mask
from fnmodels.inputs.rules import Everything
from fnmodels.models.common.context import PATTERN_TAPS, Context
from fnmodels.ops.attention.select import attention
from fnmodels.ops.dropout import dropped_weights
from fnmodels.ops.linear import linear
from fnmodels.ops.norm import rms_norm
from fnmodels.ops.qkv import project_out, split_heads
from fnmodels.options import Tap

TAPS = tuple(f"cross_attention.{name}" for name in "qkvz")


def cross_mask(positions: Tensor, segments: Tensor, memory_positions: Tensor, memory_segments: Tensor) -> Mask:
    """The mask of a decoder's tokens [B, S] and an encoder's [B, K]: a document sees the document of the same id."""
    return Mask(positions, segments, memory_positions, memory_segments, None, None, Everything())


def memory_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """{"memory", "memory_mask"} of a decoder's inputs, zeros at padding, the mask bool [B, 1, S, K] for all layers.

    With keys of noise, those of the memory's tokens too, "memory_rng" [B, K]. On a cache that `fnmodels.cache.encode`
    made the inputs have the mask only. ValueError where they do not fit, and without a mask.
    """
    if "memory_mask" not in inputs:
        missing = [name for name in ("memory", "memory_mask") if name not in inputs]
        raise ValueError(
            f"The decoder's inputs have no {' and no '.join(missing)}: memory is what the encoder returns, [B, K, D], "
            'and memory_mask is masks["cross"] of fnmodels.prepare_pair. A cache has them from fnmodels.cache.encode.'
        )
    memory, mask = inputs.get("memory"), inputs["memory_mask"]
    if not isinstance(mask, Mask):
        return {"memory": memory, "memory_mask": mask}
    if memory is None:
        return {"memory_mask": mask.dense()}
    if memory.shape[1] != mask.kv_segments.shape[1]:
        raise ValueError(
            f"memory has {memory.shape[1]} tokens [B, K, D], but memory_mask is made for "
            f"{mask.kv_segments.shape[1]} keys."
        )
    noise = {name: inputs[name] for name in ("memory_rng",) if name in inputs}
    return {"memory": without_padding(memory, mask.kv_segments), "memory_mask": mask.dense(), **noise}


def optional_memory(params: Any, inputs: Mapping[str, Any], /, *, config: Any) -> dict[str, Any]:
    """`memory_of`, as a family's `shared`, of a text whose images are its memory; {} for texts without any."""
    return memory_of(inputs) if "memory" in inputs or "memory_mask" in inputs else {}


def without_padding(memory: Tensor, segments: Tensor) -> Tensor:
    """memory [B, K, D] with zeros where segments [B, K] are 0: a masked key has weight 0, but 0 times NaN is NaN."""
    return memory.where((segments > 0)[..., None], 0)


def keys_of_memory(
    weights: Mapping[str, Tensor], memory: Tensor, *, head_dim: int, norm_eps: float | None = None
) -> tuple[Tensor, Tensor]:
    """(k, v), each [B, K, N, H], of memory [B, K, D]. The biases are optional; norm_eps: see `attend_to_memory`."""
    k, v = (linear(memory, weights[f"{name}_proj"], weights.get(f"{name}_bias")) for name in "kv")
    k, v = split_heads(k, head_dim), split_heads(v, head_dim)
    return (k if norm_eps is None else rms_norm(k, weights["k_norm"], eps=norm_eps)), v


def attend_to_memory(
    weights: Mapping[str, Tensor],
    x: Tensor,
    ctx: Context,
    *,
    head_dim: int,
    scale: float,
    softcap: float | None = None,
    norm_eps: float | None = None,
) -> Tensor:
    """The output projection of attention of x [B, S, D] to the memory: [B, S, D]. The biases are optional leaves.

    norm_eps: of the norms of each head of queries and keys, leaves "q_norm" and "k_norm"; None: there are none.

    The kernel is "math" where that of the call is and where scores are capped, else "sdpa" with a dense mask.
    """
    q = split_heads(linear(x, weights["q_proj"], weights.get("q_bias")), head_dim)
    q = q if norm_eps is None else rms_norm(q, weights["q_norm"], eps=norm_eps)
    held, memory = ctx.state() or {}, ctx.shared("memory")
    if "memory_k" in held:
        k, v = held["memory_k"], held["memory_v"]
    elif memory is None:
        raise ValueError(
            "The decoder has no memory: inputs need what the encoder returns as memory [B, K, D], or a cache that "
            "fnmodels.cache.encode made."
        )
    else:
        k, v = keys_of_memory(weights, memory, head_dim=head_dim, norm_eps=norm_eps)
    q, k, v = (ctx.tap(name, t) for name, t in zip(TAPS, (q, k, v), strict=False))
    drop = _dropping(ctx) if ctx.dropout.weights else None
    kernel = "math" if ctx.options.kernel == "math" or drop or softcap is not None else "sdpa"
    mixed = attention(q, k, v, ctx.shared("memory_mask"), kernel=kernel, scale=scale, softcap=softcap, tap=drop)
    return project_out(weights, ctx.tap(TAPS[3], mixed))


def _dropping(ctx: Context) -> Tap:
    """The tap of scores and weights that drops the weights."""
    if (keys := ctx.shared("memory_rng")) is None:
        raise ValueError(
            'Dropout of cross attention needs inputs["memory_rng"] [B, K], the keys of noise of the encoder\'s tokens, '
            "which fnmodels.prepare_pair(..., rng=) makes."
        )
    noise = replace(ctx.tensors["noise"], keys=keys)

    def tap(name: str, value: Tensor) -> Tensor:
        if name != PATTERN_TAPS[1]:
            return value
        return dropped_weights(value, noise, ctx.dropout.weights, f"cross_{name}")

    return tap
