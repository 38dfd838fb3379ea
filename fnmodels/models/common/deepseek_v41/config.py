"""The parts of DeepSeek V4.1's config.json that say which layer does what: kinds of layers, tables of n-grams."""

from collections.abc import Sequence
from typing import Any

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.models.common.config_json import ConfigJson, Fields, shown
from fnmodels.models.common.family import parsed

RATIOS = (2, 1)  # tokens of a window, in published files
_NGRAMS = {
    "engram_max_ngram_size": "ngram_size",
    "engram_n_heads": "ngram_heads",
    "engram_head_dim": "ngram_head_dim",
    "engram_vocab_size": "ngram_rows",
    "engram_compressed_vocab_size": "ngram_ids",
    "engram_pad_token_id": "ngram_padding",
}
NGRAM_FIELDS = (*_NGRAMS, "engram_layer_ids", "engram_num_embeddings")


def all_kinds() -> tuple[str, ...]:
    """The kinds of layers, the usual one first.

    "indexed" makes keys of windows of "by" so many tokens and chooses among them, "reads" takes those of such a layer
    before it, "shared" its choice too; "finds": choices after the one that made these keys are among candidates.
    """
    windows = [
        f"indexed{shares}_by{ratio}{finds}{reads}"
        for ratio in RATIOS
        for finds in ("", "_finds")
        for shares, reads in (("", ""), ("", "_reads"), ("_shared", "_reads"))
    ]
    return tuple(f"{kind}_moe{table}" for kind in ("sliding", *windows) for table in ("", "_ngrams"))


def ratio_of(kind: str) -> int:
    """The tokens of a window of layers of this kind; 0: they read none."""
    return next((int(word[2:]) for word in kind.split("_") if word.startswith("by")), 0)


def check_lenders(layer_kinds: Sequence[str]) -> None:
    """ConfigError for a layer that reads keys of windows that the last layer which made some has not made."""
    last = None
    for index, kind in enumerate(parsed(layer_kinds)):
        if kind.beside is not None and kind.beside != last:
            raise ConfigError(
                f"Layer {index} is {kind.name!r}, and the last layer before it that makes keys of windows is "
                f"{last!r}; it must be {kind.beside!r}."
            )
        last = kind.stem if kind.indexed and kind.beside is None else last


def layer_kinds_of(fields: Fields, layers: int) -> tuple[str, ...]:
    """The kinds of layers, of lists of the tokens of their windows and of those that make keys and choices."""
    ratios = fields.take("compress_ratios")
    if not isinstance(ratios, list) or len(ratios) < layers or any(r not in (0, *RATIOS) for r in ratios):
        raise ConfigError(
            f"{fields.where}: 'compress_ratios' is {shown(ratios)}, but must be a list of 0, 1 or 2 for each of "
            f"{layers} layers."
        )
    makes, chooses = (_layers(fields, f"{name}_source_layer_ids", layers) for name in ("kv", "index"))
    tables = _layers(fields, "engram_layer_ids", layers)
    finds = fields.integer("candidate_source_layer_id", -1, low=-1, high=layers - 1)
    if not makes <= chooses or (finds >= 0 and finds not in makes):
        raise UnsupportedError(
            f"{fields.where}: layers {sorted(makes)} make keys, {sorted(chooses)} choose and {finds} finds candidates "
            "(-1: none); only layers that choose make keys here, and only such a layer finds candidates."
        )
    if finds >= 0 and (later := sorted(index for index in makes if index > finds)):
        raise UnsupportedError(
            f"{fields.where}: layer {later[0]} makes keys after layer {finds}, which finds candidates; choices among "
            "keys of several layers are not supported, so that the last of kv_source_layer_ids must find them."
        )
    found, source = [], None
    for index, ratio in enumerate(ratios[:layers]):
        source = index if index in makes else source
        if not ratio:
            if index in chooses:
                raise ConfigError(f"{fields.where}: layer {index} chooses windows, and its compress_ratios has 0.")
            kind = "sliding"
        else:
            if source is None or ratios[source] != ratio:
                raise ConfigError(f"{fields.where}: no layer before {index} makes keys of windows of {ratio} tokens.")
            shared = "" if index in chooses else "_shared"
            kind = f"indexed{shared}_by{ratio}{'_finds' * (source == finds)}{'_reads' * (source != index)}"
        found.append(f"{kind}_moe{'_ngrams' * (index in tables)}")
    return tuple(found)


def _layers(fields: Fields, name: str, layers: int) -> set[int]:
    """The indices of layers in the list of this field; ConfigError if it is none."""
    listed = fields.take(name, [])
    if not isinstance(listed, list) or any(type(i) is not int or not 0 <= i < layers for i in listed):
        raise ConfigError(f"{fields.where}: {name!r} is {shown(listed)}; layers are numbers from 0 to {layers - 1}.")
    return set(listed)


def layer_kinds_to_hf(config: Any) -> ConfigJson:
    """The fields that `layer_kinds_of` reads."""
    kinds = parsed(config.layer_kinds)
    makes = [i for i, kind in enumerate(kinds) if kind.indexed and kind.beside is None]
    finds = [i for i in makes if "_finds" in kinds[i].name]
    return {
        "compress_ratios": [ratio_of(kind.name) for kind in kinds],
        "kv_source_layer_ids": makes,
        "index_source_layer_ids": [i for i, kind in enumerate(kinds) if kind.indexed and not kind.shares_choice],
        "candidate_source_layer_id": finds[0] if finds else -1,
        "engram_layer_ids": [i for i, kind in enumerate(kinds) if "_ngrams" in kind.name],
    }


def ngrams_of(fields: Fields, tables: int) -> dict[str, Any]:
    """The Config fields of n-grams; {} where no layer has a table."""
    if not tables:
        return {}
    low = {"ngram_padding": 0, "ngram_size": 2}
    high = {"ngram_size": 16, "ngram_heads": 64, "ngram_head_dim": 1 << 16, "ngram_ids": 1 << 29}
    return {
        ours: fields.integer(theirs, low=low.get(ours, 1), high=high.get(ours, 1 << 31))
        for theirs, ours in _NGRAMS.items()
    }


def ngrams_to_hf(config: Any) -> ConfigJson:
    """The fields that `ngrams_of` reads, and the rows of tables; {} where no layer has one."""
    if not config.ngram_size:
        return {}
    rows = [sum(how.sizes) for how in config.ngram_hashes]
    return {"engram_num_embeddings": rows} | {theirs: getattr(config, ours) for theirs, ours in _NGRAMS.items()}
