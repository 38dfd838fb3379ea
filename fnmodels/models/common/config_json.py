"""`Fields`: a strict reader of Hugging Face's config.json, in both dialects.

Each getter checks one field and marks it as read; `finish` refuses fields that were not read and are not known to be
harmless, so that no field that could change the maths is ignored silently.
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fnmodels.errors import ConfigError, UnsupportedError

# Fields that change no output of a forward pass: bookkeeping, generation settings, settings of trainers.
_HARMLESS = """
    _attn_implementation_autoset _name_or_path add_cross_attention architectures attn_implementation auto_map
    bad_words_ids begin_suppress_tokens bos_token_id cache_implementation chunk_size chunk_size_feed_forward
    decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label
    initializer_range is_decoder is_llama_config label2id length_penalty mamba_chunk_size max_length min_length
    model_max_length
    model_type no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_router_logits output_scores pad_token_id prefix pretraining_tp problem_type
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate router_aux_loss_coef
    sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype
    torchscript transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
"""
# Dropout rates, under every published name. `forward` applies no dropout, as in evaluation mode.
_DROPOUTS = """
    attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout dropout embd_pdrop embedding_dropout
    hidden_dropout hidden_dropout_prob mlp_dropout qa_dropout resid_pdrop residual_dropout seq_classif_dropout
"""
DROPOUTS = tuple(_DROPOUTS.split())
HARMLESS = frozenset((*_HARMLESS.split(), *DROPOUTS))
# The harmless fields that a saved checkpoint keeps; the others are rewritten or have no effect.
KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "max_length", "tokenizer_class", *DROPOUTS)
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
        return {name: strict_json(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_json(one) for one in value]
    return {"__float__": "Infinity"} if value == math.inf else value


class Fields:
    """Reader of one JSON object. Getters check type and range; ConfigError or UnsupportedError names the field."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where} must hold a JSON object, not {shown(values)}.")
        self.values, self.where, self.seen = values, where, set[str]()

    def take(self, name: str, default: Any = _MISSING) -> Any:
        """The raw value; JSON's null counts as absent."""
        self.seen.add(name)
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _MISSING:
            raise ConfigError(f"{self.where} has no {name!r}, which is needed.")
        return default

    def _wrong(self, name: str, value: Any, wanted: str) -> ConfigError:
        return ConfigError(f"{self.where}: {name!r} is {shown(value)}, but must be {wanted}.")

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

    def expect(self, name: str, *allowed: Any) -> None:
        """Requires a field that would change the maths to be absent or one of `allowed`; else UnsupportedError."""
        value = self.take(name, allowed[0])
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            wanted = " or ".join(shown(a) for a in allowed)
            raise UnsupportedError(f"{self.where}: {name!r} is {shown(value)}; only {wanted} is supported here.")

    def finish(self, ignored: Sequence[str] = ()) -> tuple[tuple[str, str], ...]:
        """ConfigError for fields that were not read; returns those to keep for saving, as (name, JSON) pairs."""
        self.expect("pruned_heads", {})  # pruned layers have fewer rows than the sizes imply
        unknown = [n for n in self.values if n not in self.seen and n not in HARMLESS and n not in ignored]
        unknown = [n for n in unknown if self.values[n] is not None]
        if unknown:
            listed = ", ".join(f"{shown(n)[1:-1]} = {shown(self.values[n])}" for n in sorted(unknown)[:_SHOWN])
            listed += f" and {len(unknown) - _SHOWN:,} more" if len(unknown) > _SHOWN else ""
            raise ConfigError(
                f"{self.where} has fields this family does not know, which may change the maths: {listed}. "
                "Remove them if they do not, or set them to null."
            )
        return tuple((n, json.dumps(self.values[n], sort_keys=True)) for n in KEPT if self.values.get(n) is not None)


def renamed(fields: Fields, names: Mapping[str, str]) -> Fields:
    """The fields under other names: {name in the file: name}. ConfigError where it has both, and they differ."""
    kept = {name: value for name, value in fields.values.items() if name not in names}
    return merged(Fields(kept, fields.where), [(old, new, fields.values.get(old)) for old, new in names.items()])


def merged(fields: Fields, given: Iterable[tuple[str, str, Any]]) -> Fields:
    """The fields and those given, (name in the file, name, value or None). ConfigError where values differ."""
    values = dict(fields.values)
    for old, new, value in given:
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
