"""The tokenizer of a GGUF file as the content of a tokenizer.json.

Two kinds are read: BPE of bytes ("gpt2"), whose file has the merges and names the rule that cuts text before them, and
SentencePiece's BPE ("llama"), whose merges follow from the scores of its pieces.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fnmodels.errors import ConfigError, UnsupportedError

Json = dict[str, Any]  # of a tokenizer.json or tokenizer_config.json

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
_SPACE = "▁"
_SPECIAL = ("bos", "eos", "unknown", "padding")

# Rules by which text is cut before merges, one step after the other. A regular expression cuts around its matches.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
_GPT2 = ({**_BYTES, "use_regex": True},)


def _split(pattern: str) -> tuple[Json, ...]:
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return cut, {**_BYTES, "use_regex": False}


_QWEN = _split(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}")
_LLAMA3 = _split(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}")
PRE_TOKENIZERS: Mapping[str, tuple[Json, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("default", "gpt-2", "olmo", "phi-2", "mpt"), _GPT2),
        **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "exaone"), (_DIGITS, *_GPT2)),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _QWEN),
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe"), _LLAMA3),
    }
)
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe")  # words are taken without merges


class _Fields:
    """The keys `tokenizer.ggml.*`."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self._values = path, values

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        value = self._values.get(f"tokenizer.ggml.{name}", default)
        if value is not default and type(value) is not kind:
            raise ConfigError(
                f"{self.path}: 'tokenizer.ggml.{name}' is a {type(value).__name__}; it must be a {kind.__name__}."
            )
        return value

    def texts(self, name: str) -> list[str]:
        values = self.take(name, list)
        if not values or not all(isinstance(text, str) for text in values):
            raise ConfigError(f"{self.path}: 'tokenizer.ggml.{name}' must be an array of texts.")
        return values

    def one_per_token(self, name: str, count: int, default: Any) -> list[Any]:
        values: list[Any] = self.take(name, list, [default] * count)
        if len(values) != count or not all(type(number) in (int, float) for number in values):
            raise ConfigError(f"{self.path}: 'tokenizer.ggml.{name}' must have a number for each of {count:,} tokens.")
        return values

    def special_ids(self) -> dict[str, int]:
        ids = {name: self.take(f"{name}_token_id", int) for name in _SPECIAL}
        return {name: token_id for name, token_id in ids.items() if token_id is not None}


def special_ids(path: Path, metadata: Mapping[str, Any]) -> dict[str, int]:
    """{"bos": id, ...} of the special tokens that the file names: bos, eos, unknown, padding."""
    return _Fields(path, metadata).special_ids()


def tokenizer_json(path: Path, metadata: Mapping[str, Any]) -> Json:
    """The content of tokenizer.json. UnsupportedError: a kind or a rule that is not read; ConfigError: a value."""
    fields = _Fields(path, metadata)
    kind = fields.take("model", str)
    if kind not in ("gpt2", "llama"):
        raise UnsupportedError(f"{path}: 'tokenizer.ggml.model' is {kind!r}; of tokenizers gpt2 and llama are read.")
    tokens = fields.texts("tokens")
    if len(set(tokens)) != len(tokens):
        raise ConfigError(f"{path}: 'tokenizer.ggml.tokens' has a token twice.")
    types = fields.one_per_token("token_type", len(tokens), _NORMAL)
    parts = _byte_bpe(fields, tokens) if kind == "gpt2" else _sentencepiece(fields, tokens, types)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(i, tokens[i], token_type) for i, token_type in enumerate(types) if token_type in (_CONTROL, _USER)
        ],
        "post_processor": _post_processor(fields, tokens, parts.pop("post_processor")),
        **parts,
    }


def _byte_bpe(fields: _Fields, tokens: list[str]) -> Json:
    rule = fields.take("pre", str, "default")
    if rule not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"{fields.path}: 'tokenizer.ggml.pre' is {rule!r}; the rules {', '.join(PRE_TOKENIZERS)} are read."
        )
    merges = [pair.split(" ") for pair in fields.texts("merges")]
    if any(len(pair) != 2 for pair in merges):
        raise ConfigError(f"{fields.path}: 'tokenizer.ggml.merges' must have two pieces and a space in each text.")
    model = _model(tokens, merges) | {"ignore_merges": rule in _WHOLE_WORDS_FIRST}
    bytes_ = {**_BYTES, "use_regex": True}
    return {
        "normalizer": {"type": "NFC"} if rule == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(PRE_TOKENIZERS[rule])},
        "model": model,
        "decoder": bytes_,
        "post_processor": {**_BYTES, "trim_offsets": False, "use_regex": True},
    }


def _sentencepiece(fields: _Fields, tokens: list[str], types: list[int]) -> Json:
    ids = {token: i for i, token in enumerate(tokens)}
    scores = fields.one_per_token("scores", len(tokens), 0.0)
    begins = fields.take("add_space_prefix", bool, True)
    unknown = fields.special_ids().get("unknown")
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    decoders: list[Json] = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    model = _model(tokens, _merges(ids, scores, types)) | {
        "unk_token": None if unknown is None else _token(fields.path, tokens, unknown),
        "byte_fallback": _BYTE in types,
        "fuse_unk": True,
    }
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if begins else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "model": model,
        "decoder": {"type": "Sequence", "decoders": [*decoders, *([strip] if begins else [])]},
        "post_processor": None,
    }


def _merges(ids: Mapping[str, int], scores: list[float], types: list[int]) -> list[list[str]]:
    """Pairs of pieces that join to a piece, the best joined piece first, then the pair whose pieces come first."""
    usable = {token for token, i in ids.items() if types[i] in (_NORMAL, _USER, _UNUSED)}
    pairs = [
        (-scores[i], ids[left], ids[right], left, right)
        for token, i in ids.items()
        if types[i] == _NORMAL
        for cut in range(1, len(token))
        if (left := token[:cut]) in usable and (right := token[cut:]) in usable
    ]
    return [[left, right] for *_, left, right in sorted(pairs)]


def _model(tokens: list[str], merges: list[list[str]]) -> Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": merges,
    }


def _added(index: int, token: str, kind: int) -> Json:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": token, **flags, "special": kind == _CONTROL}


def _post_processor(fields: _Fields, tokens: list[str], plain: Json | None) -> Json | None:
    """Adds the tokens that begin and end a text where the file says so."""
    ids = fields.special_ids()
    first = ids.get("bos") if fields.take("add_bos_token", bool, False) else None
    last = ids.get("eos") if fields.take("add_eos_token", bool, False) else None
    if first is None and last is None:
        return plain
    named = {token_id: _token(fields.path, tokens, token_id) for token_id in (first, last) if token_id is not None}

    def around(sequence: str, number: int) -> list[Json]:
        inner: list[Json] = [{"Sequence": {"id": sequence, "type_id": number}}]
        before = [] if first is None else [{"SpecialToken": {"id": named[first], "type_id": number}}]
        after = [] if last is None else [{"SpecialToken": {"id": named[last], "type_id": number}}]
        return [*before, *inner, *after]

    template = {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": [*around("A", 0), *around("B", 1)],
        "special_tokens": {name: {"id": name, "ids": [token_id], "tokens": [name]} for token_id, name in named.items()},
    }
    return template if plain is None else {"type": "Sequence", "processors": [plain, template]}


def _token(path: Path, tokens: list[str], index: int) -> str:
    if not 0 <= index < len(tokens):
        raise ConfigError(f"{path}: a special token is {index}, but there are {len(tokens):,} tokens.")
    return tokens[index]


def tokenizer_config(path: Path, metadata: Mapping[str, Any]) -> Json:
    """The content of tokenizer_config.json: the special tokens and the chat template."""
    tokens = _Fields(path, metadata).texts("tokens")
    keys = {"unknown": "unk_token", "padding": "pad_token"}
    ids = special_ids(path, metadata)
    named = {keys.get(name, f"{name}_token"): _token(path, tokens, token_id) for name, token_id in ids.items()}
    template = metadata.get("tokenizer.chat_template")
    chat = {"chat_template": template} if isinstance(template, str) else {}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **named, **chat}
