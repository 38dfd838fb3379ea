"""The Config fields that decoders have in common, and the checks of their values."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fnmodels.errors import ConfigError
from fnmodels.ops.dropout import Dropout
from fnmodels.ops.mlp import ACTIVATIONS
from fnmodels.ops.rotary import Rope

from ..family import model_types, parsed, traits_of
from ..heads import check_head


@dataclass(frozen=True)
class SizesConfig:
    """The Config fields common to decoders, except `hidden_act`.

    layer_kinds: one of the family's `Traits.kinds` per layer; empty: the first of them for every layer.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    rope: Rope = Rope()  # noqa: RUF009 - frozen
    tie_word_embeddings: bool = False
    head: str = "lm"  # or "classification" or "tokens", see `heads`
    num_labels: int = 0
    problem_type: str = ""
    layer_kinds: tuple[str, ...] = ()
    max_position_embeddings: int = 131072
    initializer_range: float = 0.02
    dropout: Dropout = Dropout()  # noqa: RUF009 - frozen
    # kept for saving only
    model_type: str = field(default="", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        family = sys.modules[type(self).__module__]
        check_decoder(self, traits_of(family).kinds)
        if not self.model_type:
            object.__setattr__(self, "model_type", (*model_types(family), "")[0])


@dataclass(frozen=True)
class BaseConfig(SizesConfig):
    """The Config fields common to decoders; a family adds its own: `class Config(BaseConfig)`."""

    hidden_act: str = "silu"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_act not in ACTIVATIONS:
            raise ConfigError(f"hidden_act {self.hidden_act!r} is unknown; known are {', '.join(ACTIVATIONS)}.")


def check_decoder(config: Any, known_kinds: Sequence[str]) -> None:
    """For `Config.__post_init__`: fills head_dim 0 and layer_kinds (); ConfigError for inconsistent fields.

    intermediate_size 0 is a model without MLPs, whose layers are attention alone.
    """
    check_sizes(config, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    check_sizes(config, "max_position_embeddings")
    if config.intermediate_size != 0:
        check_sizes(config, "intermediate_size")
    check_head(config)
    window = getattr(config, "sliding_window", None)
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ConfigError(f"sliding_window is {window!r}; it must be an integer of at least 1, or None.")
    object.__setattr__(config, "layer_kinds", tuple(config.layer_kinds))  # hashable
    if not config.head_dim:
        if config.hidden_size % config.num_attention_heads:
            raise ConfigError(
                f"hidden_size {config.hidden_size} is not a multiple of num_attention_heads "
                f"{config.num_attention_heads}, so head_dim must be given."
            )
        object.__setattr__(config, "head_dim", config.hidden_size // config.num_attention_heads)
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {config.num_key_value_heads}."
        )
    if not config.layer_kinds:
        object.__setattr__(config, "layer_kinds", (known_kinds[0],) * config.num_hidden_layers)
    if len(config.layer_kinds) != config.num_hidden_layers or not set(config.layer_kinds) <= set(known_kinds):
        raise ConfigError(
            f"layer_kinds must name {config.num_hidden_layers} layers, each one of {', '.join(known_kinds)}; "
            f"it is {config.layer_kinds}."
        )
    if window is None and any(kind.slides for kind in parsed(config.layer_kinds)):
        raise ConfigError("layer_kinds has sliding layers, but sliding_window is None.")


def check_sizes(config: Any, *names: str) -> None:
    """For `Config.__post_init__`: ConfigError unless these fields are integers of at least 1."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} is {value!r}; it must be an integer of at least 1.")


def check_width(config: SizesConfig) -> None:
    """For `Config.__post_init__`: ConfigError unless the heads divide the width, as the reference computes them."""
    heads = config.num_attention_heads
    if config.head_dim * heads != config.hidden_size:
        raise ConfigError(
            f"This family divides hidden_size {config.hidden_size} among {heads} heads; "
            f"head_dim {config.head_dim} says otherwise."
        )
