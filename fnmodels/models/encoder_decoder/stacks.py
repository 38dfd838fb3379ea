"""Shared parts of encoder-decoder models: the stacks of a Config, their kinds of layers, masks and tables.

Such a Config has the fields `stack` ("both", "encoder" or "decoder"), `num_hidden_layers` and, of "both",
`num_decoder_layers`, `head` ("lm" or "none"), and the properties `encoder` and `decoder`, the configs of the stacks.
"""

from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.inputs.mask import Create, MaskLike, masks_of
from fnmodels.inputs.rules import Causal, Everything
from fnmodels.ops.rotary import no_rotation

STACKS = ("both", "encoder", "decoder")


def check_stack(config: Any) -> None:
    """For a Config's `__post_init__`: ConfigError for an unknown `stack` or `head`; an encoder alone has no head."""
    if config.stack not in STACKS:
        raise ConfigError(f"stack is {config.stack!r}; it must be both, encoder or decoder.")
    if config.head not in ("lm", "none"):
        raise ConfigError(f"head is {config.head!r}; it must be lm or none.")
    if config.stack == "encoder":
        object.__setattr__(config, "head", "none")


def stacks(config: Any) -> dict[str, Any]:
    """The configs of both stacks; {} for one of them."""
    return {"encoder": config.encoder, "decoder": config.decoder} if config.stack == "both" else {}


def kinds(config: Any) -> tuple[str, ...]:
    """The kind of each layer: "full" of the encoder, "causal" of the decoder."""
    first = ("causal" if config.stack == "decoder" else "full",) * config.num_hidden_layers
    return first + ("causal",) * config.num_decoder_layers if config.stack == "both" else first


def attention_masks(
    config: Any, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask} of one stack; positions and segment_ids [B, S]."""
    rules = {kind: Causal() if kind == "causal" else Everything() for kind in kinds(config)}
    return masks_of(rules, positions, segment_ids, create=create)


def freqs_cis(config: Any, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 [B, S, 0, 2]}: no rotary embedding; a model reads its positions in `embed` or `shared`."""
    return dict.fromkeys(sorted(set(kinds(config))), no_rotation(positions))
