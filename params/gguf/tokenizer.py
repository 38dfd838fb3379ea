"""The tokenizer of a GGUF file as the content of a tokenizer.json.

Five kinds are read: BPE of bytes ("gpt2"), whose file has the merges and names the rule that cuts text before them;
SentencePiece's BPE ("llama"), whose merges follow from the scores of its pieces, and Gemma 4's, whose file has them;
WordPiece ("bert"); and SentencePiece's unigrams ("t5", of XLM-RoBERTa too).
"""

import base64
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fnmodels.errors import ConfigError, UnsupportedError

Json = dict[str, Any]  # of a tokenizer.json or tokenizer_config.json

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
_SPACE = "▁"
_SPECIAL = ("bos", "eos", "unknown", "padding", "cls", "seperator", "mask")  # the spelling is the format's
_ENDING = ("eos", "eot", "eom")  # the ends of a text, of a turn and of a message
_NORMALIZER = ("normalizer.lowercase", "normalizer.strip_accents")
_READ = {
    *("model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_eos_token", "add_space_prefix"),
    *("suppress_tokens", "remove_extra_whitespaces", "precompiled_charsmap", *_NORMALIZER),
    *(f"{name}_token_id" for name in (*_SPECIAL, *_ENDING)),
}
# What changes no token of a text: the number of BERT's segments, the token between the two texts of a reranker, and
# those by which a program asks for the middle of a text, with their older names.
_NEUTRAL = {
    *("token_type_count", "add_sep_token", "prefix_token_id", "suffix_token_id", "middle_token_id"),
    *(f"fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")),
}
_PREFIX = "tokenizer.ggml."
_WITHOUT = "leave the tokenizer out (--without-tokenizer)"
_BEGINS, _ENDS = "[CLS]", "[SEP]"

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
# Names of Llama 3's rule, by which a text begins with a token whether the file says so or not.
_OF_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
PRE_TOKENIZERS: Mapping[str, tuple[Json, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("gpt-2", "olmo", "phi-2", "mpt", "exaone4"), _GPT2),
        **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "exaone"), (_DIGITS, *_GPT2)),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _QWEN),
        **dict.fromkeys((*_OF_LLAMA3, "smaug-bpe"), _LLAMA3),
    }
)
_WHOLE_WORDS_FIRST = (*_OF_LLAMA3, "smaug-bpe")  # words are taken without merges


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

    def check_all_known(self) -> None:
        """UnsupportedError for a key that nothing here reads."""
        ends = {key.removeprefix(_PREFIX): key for key in self._values if key.startswith(_PREFIX)}
        if unknown := sorted(ends.keys() - _READ - _NEUTRAL):
            key = ends[unknown[0]]
            value = repr(self._values[key])
            raise UnsupportedError(
                f"{self.path}: {key!r} is {value[:80]}, which may change how text is cut and is not read; {_WITHOUT}."
            )

    def rule(self) -> str:
        """The name of the rule by which bytes are cut before merges; GPT-2's files have no word of theirs."""
        rule = self.take("pre", str, "gpt-2" if self._values.get("general.architecture") == "gpt2" else None)
        if rule is None:
            raise UnsupportedError(
                f"{self.path} has no 'tokenizer.ggml.pre', the rule by which text is cut; write the file again by a "
                f"newer converter, or {_WITHOUT}."
            )
        if rule not in PRE_TOKENIZERS:
            raise UnsupportedError(
                f"{self.path}: 'tokenizer.ggml.pre' is {rule!r}; the rules {', '.join(PRE_TOKENIZERS)} are read. "
                f"For another, {_WITHOUT}."
            )
        return str(rule)

    def special_ids(self) -> dict[str, int]:
        ids = {name: self.take(f"{name}_token_id", int) for name in _SPECIAL}
        return {name: token_id for name, token_id in ids.items() if token_id is not None}


def special_ids(path: Path, metadata: Mapping[str, Any]) -> dict[str, int]:
    """{"bos": id, ...} of the special tokens that the file names: bos, eos, unknown, padding."""
    return _Fields(path, metadata).special_ids()


def ending_ids(path: Path, metadata: Mapping[str, Any]) -> list[int]:
    """The tokens that end an answer: those of the end of a text, of a turn and of a message, each once."""
    fields = _Fields(path, metadata)
    tokens = fields.texts("tokens")
    found = [fields.take(f"{name}_token_id", int) for name in _ENDING]
    ids = list(dict.fromkeys(token_id for token_id in found if token_id is not None))
    for token_id in ids:
        _token(path, tokens, token_id)
    return ids


def tokenizer_json(path: Path, metadata: Mapping[str, Any]) -> Json:
    """The content of tokenizer.json. UnsupportedError: a kind or a rule that is not read; ConfigError: a value."""
    fields = _Fields(path, metadata)
    kind = fields.take("model", str)
    if kind is None:
        raise UnsupportedError(f"{path} has no tokenizer: the key 'tokenizer.ggml.model' is missing.")
    if kind not in _KINDS:
        raise UnsupportedError(
            f"{path}: 'tokenizer.ggml.model' is {kind!r}; of tokenizers {', '.join(_KINDS)} are read."
        )
    fields.check_all_known()
    if kind != "bert" and (name := next((name for name in _NORMALIZER if fields.take(name, bool, False)), None)):
        raise UnsupportedError(
            f"{path}: 'tokenizer.ggml.{name}' is True, which is read of WordPiece (bert) alone; {_WITHOUT}."
        )
    tokens = fields.texts("tokens")
    if len(set(tokens)) != len(tokens):
        raise ConfigError(f"{path}: 'tokenizer.ggml.tokens' has a token twice.")
    types = fields.one_per_token("token_type", len(tokens), _NORMAL)
    parts = _KINDS[kind](fields, tokens, types)
    if kind != "bert":
        parts["post_processor"] = _post_processor(fields, tokens, parts["post_processor"])
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(i, _shown(tokens[i], token_type, kind), token_type)
            for i, token_type in enumerate(types)
            if token_type in (_CONTROL, _USER)
        ],
        **parts,
    }


def _byte_bpe(fields: _Fields, tokens: list[str], types: list[int]) -> Json:
    rule = fields.rule()
    model = _model(tokens, _listed_merges(fields)) | {"ignore_merges": rule in _WHOLE_WORDS_FIRST}
    bytes_ = {**_BYTES, "use_regex": True}
    return {
        "normalizer": {"type": "NFC"} if rule == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(PRE_TOKENIZERS[rule])},
        "model": model,
        "decoder": bytes_,
        "post_processor": {**_BYTES, "trim_offsets": False, "use_regex": True},
    }


def _listed_merges(fields: _Fields) -> list[list[str]]:
    merges = [pair.split(" ") for pair in fields.texts("merges")]
    if any(len(pair) != 2 for pair in merges):
        raise ConfigError(f"{fields.path}: 'tokenizer.ggml.merges' must have two pieces and a space in each text.")
    return merges


def _gemma4(fields: _Fields, tokens: list[str], types: list[int]) -> Json:
    """Pieces as SentencePiece's, with the merges of the file."""
    return _pieces(fields, tokens, types, _listed_merges(fields))


def _sentencepiece(fields: _Fields, tokens: list[str], types: list[int]) -> Json:
    ids = {token: i for i, token in enumerate(tokens)}
    scores = fields.one_per_token("scores", len(tokens), 0.0)
    return _pieces(fields, tokens, types, _merges(ids, scores, types))


def _pieces(fields: _Fields, tokens: list[str], types: list[int], merges: list[list[str]]) -> Json:
    begins = fields.take("add_space_prefix", bool, True)
    unknown = fields.special_ids().get("unknown")
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    decoders: list[Json] = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    model = _model(tokens, merges) | {
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


def _unigrams(fields: _Fields, tokens: list[str], types: list[int]) -> Json:
    """The most likely pieces of each word, by their scores; the file has the map by which text is normalized."""
    scores = fields.one_per_token("scores", len(tokens), 0.0)
    characters = fields.take("precompiled_charsmap", list)
    unknown = fields.special_ids().get("unknown")
    if unknown is None and _UNKNOWN in types:
        unknown = types.index(_UNKNOWN)
    encoded = base64.b64encode(bytes(one & 255 for one in characters)).decode() if characters else None
    begins = "always" if fields.take("add_space_prefix", bool, True) else "never"
    space = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": begins, "split": True}
    words = [{"type": "WhitespaceSplit"}] if fields.take("remove_extra_whitespaces", bool, False) else []
    return {
        "normalizer": None if encoded is None else {"type": "Precompiled", "precompiled_charsmap": encoded},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*words, space]},
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": [list(pair) for pair in zip(tokens, map(float, scores), strict=True)],
            "byte_fallback": _BYTE in types,
        },
        "decoder": space,
        "post_processor": None,
    }


def _shown(token: str, kind: int, model: str) -> str:
    """A token as its tokenizer.json has it: in files of WordPiece, pieces that begin a word have a mark instead."""
    if model != "bert" or kind == _CONTROL:
        return token
    return token[1:] if token.startswith(_SPACE) and token != _SPACE else f"##{token}"


def _word_pieces(fields: _Fields, tokens: list[str], types: list[int]) -> Json:
    """The longest pieces of each word. Without a key, letters become small ones in a vocabulary that has no others."""
    named = [_shown(token, kind, "bert") for token, kind in zip(tokens, types, strict=True)]
    if len(set(named)) != len(named):
        raise ConfigError(f"{fields.path}: 'tokenizer.ggml.tokens' has a piece of words twice.")
    cased = any(token != token.lower() for token, kind in zip(named, types, strict=True) if kind == _NORMAL)
    ids = fields.special_ids()
    begin, end = ids.get("cls", ids.get("bos")), ids.get("seperator", ids.get("eos"))
    first = _token(fields.path, named, begin) if begin is not None else _BEGINS
    last = _token(fields.path, named, end) if end is not None else _ENDS
    vocabulary = {token: i for i, token in enumerate(named)}
    unknown = _token(fields.path, named, ids["unknown"]) if "unknown" in ids else "[UNK]"
    for token in (first, last, unknown):
        if token not in vocabulary:
            raise ConfigError(f"{fields.path}: 'tokenizer.ggml.tokens' has no token {token!r}, which a text needs.")
    text, other = ([{"Sequence": {"id": name, "type_id": i}}] for i, name in enumerate("AB"))
    starts, stops = {"SpecialToken": {"id": first, "type_id": 0}}, {"SpecialToken": {"id": last, "type_id": 0}}
    single = [starts, *text, stops]
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": fields.take("normalizer.strip_accents", bool),  # None: as lowercase
            "lowercase": fields.take("normalizer.lowercase", bool, not cased),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "model": {
            "type": "WordPiece",
            "unk_token": unknown,
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocabulary,
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, *other, {"SpecialToken": {"id": last, "type_id": 1}}],
            "special_tokens": {
                name: {"id": name, "ids": [vocabulary[name]], "tokens": [name]} for name in (first, last)
            },
        },
    }


_KINDS = {"gpt2": _byte_bpe, "llama": _sentencepiece, "gemma4": _gemma4, "bert": _word_pieces, "t5": _unigrams}


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
    """Adds the tokens that begin and end a text where the file says so, or llama.cpp does without a word of it."""
    ids, kind = fields.special_ids(), fields.take("model", str)
    begins = kind == "llama" or (kind == "gpt2" and fields.rule() in _OF_LLAMA3)
    first = ids.get("bos") if fields.take("add_bos_token", bool, begins) else None
    last = ids.get("eos") if fields.take("add_eos_token", bool, kind == "t5") else None
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
    keys = {"unknown": "unk_token", "padding": "pad_token", "seperator": "sep_token"}
    ids = special_ids(path, metadata)
    named = {keys.get(name, f"{name}_token"): _token(path, tokens, token_id) for name, token_id in ids.items()}
    if metadata.get("tokenizer.ggml.model") == "bert" and "bos_token" in named:
        named.setdefault("cls_token", named["bos_token"])
    template = metadata.get("tokenizer.chat_template")
    chat = {"chat_template": template} if isinstance(template, str) else {}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **named, **chat}
