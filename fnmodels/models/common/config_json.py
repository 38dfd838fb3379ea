"""`Fields`: a strict reader of Hugging Face's config.json, in both dialects.

Each getter checks one field and marks it as read; `finish` refuses fields that were not read and are not known to be
harmless, so that no field that could change the maths is ignored silently.
"""

import json
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fnmodels.errors import ConfigError, UnsupportedError

from .bookkeeping import DROPOUTS, SPECIAL_TOKENS, is_bookkeeping

ConfigJson = dict[str, Any]  # the values of a config.json: field -> a JSON value

# Defaults of PreTrainedConfig that files of transformers 4 state for models and parts that have no use for them.
_PRETRAINED_DEFAULTS = {"tie_word_embeddings": True, "ignore_index": -100}
# Names of one thing in files of different publishers.
_SYNONYMS = """
    hidden_size n_embd d_model dim model_dim embed_dim
    intermediate_size n_inner d_ff ffn_dim ffn_hidden_size
    num_hidden_layers num_layers n_layer n_layers depth
    num_attention_heads num_heads n_head n_heads
    num_key_value_heads num_kv_heads n_kv_heads n_head_kv multi_query_group_num
    head_dim attention_head_dim kv_channels d_kv
    max_position_embeddings n_positions n_ctx max_positions
    vocab_size org_vocab_size padded_vocab_size
    num_experts n_routed_experts num_local_experts moe_num_experts
    num_experts_per_tok num_experts_per_token experts_per_token moe_k moe_topk moe_top_k top_k top_k_experts
    n_shared_experts num_shared_experts num_shared_expert moe_num_shared_experts
    rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps norm_epsilon rms_norm_epsilon
    hidden_act hidden_activation activation_function act_fn activation
    rope_theta rotary_emb_base rotary_base rope_base
    partial_rotary_factor rotary_pct rope_percentage rope_percent
    sliding_window sliding_window_size attention_window_size
"""
# Other names of activations.
_ACTIVATIONS = {"swish": "silu", "swiglu": "silu", "gelu_new": "gelu_pytorch_tanh"}
_SYNONYM_GROUPS = [group.split() for group in _SYNONYMS.strip().splitlines()]
# Pieces of words about what every model has. A switch of another part that is off says that there is no such part.
_COMMON_PARTS = """
    act attention attn bias caus center decod direction embed encod final gate glu head linear mask mlp norm offset
    output parallel pos qk regress resid rope rot sandwich scal softcap softmax tie
"""
_GENERIC_WORDS = "config hidden is language layer layers model num size text type use vision"
_GENERIC, _COMMON = frozenset(_GENERIC_WORDS.split()), tuple(_COMMON_PARTS.split())
# What `top_k` stands beside where it is about sampling, and its default in PreTrainedConfig.
_SAMPLING, _TOP_K = ("do_sample", "temperature", "top_p"), 50
# Where the fields that `ignore_fields` named when a file was read are recorded in what is saved, {name: value}.
IGNORED_FIELDS = "_ignored_fields"
# The harmless fields that a saved checkpoint keeps; the others are rewritten or have no effect.
KEPT = (*SPECIAL_TOKENS, "max_length", "tokenizer_class", *DROPOUTS)
# Noise of training that `prepare(..., rng=)` refuses where the family does not act on it.
_NOISE = "activation_dropout dropout_rate layerdrop encoder_layerdrop decoder_layerdrop input_jitter_noise"
NOISE = tuple(_NOISE.split())
KEPT += NOISE
KEPT += ("chunk_size", "mamba_chunk_size")  # how kernels divide the sequence

# The depth of the deepest published transformer. A larger number is probably a mistake, and `spec` lists every layer.
LAYERS_LIMIT = 1000

_MISSING = object()
_SHOWN = 20  # unknown fields that a message lists


def shown(value: Any) -> str:
    """`value` for a message, cut where it is long."""
    text = ""
    for piece in json.JSONEncoder(default=repr).iterencode(value):  # stops early: there may be millions of entries
        text += piece
        if len(text) > 80:
            return text[:77] + "..."
    return text


def strict_json(value: Any) -> Any:
    """The JSON value with infinity, which JSON does not have, in the form in which transformers writes it."""
    if isinstance(value, dict):
        return {name: strict_json(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_json(entry) for entry in value]
    return {"__float__": "Infinity"} if value == math.inf else value


@dataclass(frozen=True)
class IgnoreFields:
    """The caller's `ignore_fields`: names of fields that may stay unread; used: {name: value} of those that did."""

    names: frozenset[str]
    used: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Within it every `Fields`, of whatever object of the file, reads without these fields."""
        token = _ASKED.set(self)
        try:
            yield
        finally:
            _ASKED.reset(token)


_ASKED: ContextVar[IgnoreFields | None] = ContextVar("ignore_fields", default=None)


class Fields:
    """Reader of one JSON object. Getters check type and range; ConfigError or UnsupportedError names the field."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where} must hold a JSON object, not {shown(values)}.")
        self.values, self.where = values, where
        self.read: dict[str, Any] = {}  # what counts: the value in the file, or the default

    def take(self, name: str, default: Any = _MISSING) -> Any:
        """The raw value; JSON's null counts as absent."""
        value = self.values.get(name)
        if value is None and default is _MISSING:
            raise ConfigError(f"{self.where} has no {name!r}, which is needed.")
        self.read[name] = default if value is None else value
        return self.read[name]

    def _wrong(self, name: str, value: Any, expected: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name!r} is {shown(value)}, but must be {expected}.")

    def integer(self, name: str, default: Any = _MISSING, *, low: int = 1, high: int = 1 << 31) -> int:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(name, value, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, default: Any = _MISSING, *, above: float = 0.0, high: float = math.inf) -> float:
        value = self.take(name, default)
        if not _finite(value) or not above < value <= high:
            most = "" if math.isinf(high) else f" and at most {high:g}"
            raise self._wrong(name, value, f"a finite number above {above:g}{most}")
        return float(value)

    def boolean(self, name: str, default: Any = _MISSING) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def choice(self, name: str, among: Sequence[str], default: Any = _MISSING) -> str:
        value = self.take(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, f"one of {', '.join(among)}")
        if value not in among:
            raise UnsupportedError(f"{self.where}: {name!r} is {shown(value)}; supported are {', '.join(among)}.")
        return value

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        value = self.take(name)
        if not isinstance(value, list) or len(value) != length or not all(_finite(v) and v > 0 for v in value):
            raise self._wrong(name, value, f"a list of {length} positive numbers")
        return tuple(float(v) for v in value)

    def plain(self, **defaults: bool | int | float) -> dict[str, Any]:
        """{name: value} of fields that a Config has under the same names; each default says how its field is read.

        That is as `boolean`, `integer` (of at least 1) or `number` (above 0).
        """
        readers: dict[type, Any] = {bool: self.boolean, int: self.integer, float: self.number}
        return {name: readers[type(default)](name, default) for name, default in defaults.items()}

    def expect(self, name: str, *allowed: Any) -> None:
        """Requires a field that would change the maths to be absent or one of `allowed`; else UnsupportedError."""
        value = self.take(name, allowed[0])
        if not any(value == option and isinstance(value, bool) == isinstance(option, bool) for option in allowed):
            expected = " or ".join(shown(a) for a in allowed)
            raise UnsupportedError(f"{self.where}: {name!r} is {shown(value)}; only {expected} is supported here.")

    def finish(self, ignored: Sequence[str] = ()) -> tuple[tuple[str, str], ...]:
        """ConfigError for fields that were not read; returns those to keep for saving, as (name, JSON) pairs.

        A field is accepted unread if it is bookkeeping, restates what was read, says that a part which the family does
        not have is off, or is named by `ignored` or by `IgnoreFields.asked`.
        """
        self.expect("pruned_heads", {})  # pruned layers have fewer rows than the sizes imply
        request = _ASKED.get() or IgnoreFields(frozenset())
        known, off = self.read.keys() | set(ignored), self._parts_off()
        unread = sorted(n for n, value in self.values.items() if value is not None and n not in known)
        unknown = [n for n in unread if not (self._is_bookkeeping(n) or self._is_restated(n) or n in off)]
        dropped = {n: self.values[n] for n in unknown if n in request.names}
        request.used.update(dropped)
        if unknown := [n for n in unknown if n not in dropped]:
            listed = ", ".join(f"{shown(n)[1:-1]} = {shown(self.values[n])}{self._beside(n)}" for n in unknown[:_SHOWN])
            listed += f" and {len(unknown) - _SHOWN:,} more" if len(unknown) > _SHOWN else ""
            raise ConfigError(
                f"{self.where} has fields this family does not know, which may change the maths: {listed}. If they do "
                f"not, ignore_fields=({', '.join(map(shown, unknown[:_SHOWN]))},) reads the file without them."
            )
        kept = {n: self.values[n] for n in KEPT if self.values.get(n) is not None}
        earlier = self.values.get(IGNORED_FIELDS)
        dropped = {**(earlier if isinstance(earlier, Mapping) else {}), **dropped}
        kept |= {IGNORED_FIELDS: dropped} if dropped else {}
        return tuple((name, json.dumps(value, sort_keys=True)) for name, value in kept.items())

    def _is_bookkeeping(self, name: str) -> bool:
        """Whether the field is bookkeeping, which another name of a field that was read never is."""
        if "rms" in name.split("_") and self.values[name] and not any("rms" in other for other in self.read):
            return False  # a kernel of RMS norms, of a model that has other ones
        if not self._synonyms(name):
            return is_bookkeeping(name, self.values[name])
        return name == "top_k" and (self.values[name] == _TOP_K or any(other in self.values for other in _SAMPLING))

    def _is_restated(self, name: str) -> bool:
        """Whether the field says what is the case anyway: what was read, or a default of transformers."""
        same = [self.read[other] for other in self._synonyms(name)] + [_PRETRAINED_DEFAULTS.get(name, _MISSING)]
        return any(_alike(value, self.values[name]) for value in same)

    def _synonyms(self, name: str) -> list[str]:
        """The fields that were read and are the same thing in other files."""
        group = next((group for group in _SYNONYM_GROUPS if name in group), [])
        if name.endswith(("_token_id", "_token_index")):
            group = [name.rpartition("_")[0] + end for end in ("_id", "_index")]
        return [other for other in group if other != name and self.read.get(other) is not None]

    def _beside(self, name: str) -> str:
        """The contradiction, for a message."""
        return "".join(f" (beside {other} = {shown(self.read[other])})" for other in self._synonyms(name)[:1])

    def _parts_off(self) -> set[str]:
        """The switches that are off, of parts that neither every model has nor this family; their settings."""
        known_words = {word for name in self.read for word in name.split("_")} - _GENERIC
        off = {n for n, value in self.values.items() if value is False and not any(piece in n for piece in _COMMON)}
        off = {name for name in off if name in self.read or not _share(known_words, name)}
        used = [name.split("_") for name in off if name.startswith("use_") and not is_bookkeeping(name, False)]
        parts = {word for words in used for word in words} - _GENERIC
        return off | {name for name in self.values if parts & set(name.split("_"))}


def _share(words: Collection[str], name: str) -> bool:
    """Whether a word of the name is one of `words`, or begins as one does: softcap and softcapping."""
    return any(a == b or (a[:4] == b[:4] and min(len(a), len(b)) > 3) for a in words for b in name.split("_"))


def _alike(value: Any, other: Any) -> bool:
    """Whether two values are the same, or two names of one activation."""
    if isinstance(value, str) and isinstance(other, str):
        return _ACTIVATIONS.get(value, value) == _ACTIVATIONS.get(other, other)
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def renamed(fields: Fields, names: Mapping[str, str]) -> Fields:
    """The fields under other names: {name in the file: name}. ConfigError where it has both, and they differ."""
    kept = {name: value for name, value in fields.values.items() if name not in names}
    return merged(Fields(kept, fields.where), [(old, new, fields.values.get(old)) for old, new in names.items()])


def merged(fields: Fields, renamed: Iterable[tuple[str, str, Any]]) -> Fields:
    """The fields and those given, (name in the file, name, value or None). ConfigError where values differ."""
    values = dict(fields.values)
    for old, new, value in renamed:
        if value is not None:
            if values.get(new) not in (None, value):
                raise ConfigError(
                    f"{fields.where}: {old!r} and {new!r} disagree: {shown(value)}, {shown(values[new])}."
                )
            values[new] = value
    return Fields(values, fields.where)


def _finite(value: Any) -> bool:
    """Whether the JSON value is a number within the range of a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= sys.float_info.max  # math.isfinite raises for integers of 400 digits
