"""The compressed ids of tokens by which DeepSeek V4.1 hashes n-grams (Engram, arXiv 2601.07372), made of the tokenizer.

Tokens whose texts differ only in case, accents, compatibility forms or white space at their ends have one id. A token
that is part of a character, whose text has U+FFFD, keeps an id of its own, by its name in the vocabulary.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fnmodels.errors import MismatchError
from fnmodels.models.common.family import DecoderConfig, traits_of
from fnmodels.models.common.registry import family_of
from fnmodels.tree import Tree, flatten, map_with_path

from .io.tokenizer_file import read_tokenizer
from .sharding import sharding_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPACE = "\ue000"  # a token that is one space, while white space is stripped
_PART = "\ufffd"  # in the text of a token that is part of a character


def token_map(config: DecoderConfig, tokenizer: "Tokenizer") -> Tensor:
    """The compressed id of each token, for a model of n-grams such as DeepSeek V4.1.

    The recipe is DeepSeek's: a token's text is normalized (NFKC, NFD, accents stripped, lowercased, white space
    collapsed and stripped), and ids count distinct results in the order of tokens. Rows of the vocabulary that the
    tokenizer lacks have the id of padding.

    Args:
        config: The model's config, whose `ngram_ids` is the number of compressed ids.
        tokenizer: Of the tokenizers library; `transformers_tokenizer.backend_tokenizer` is one.

    Returns:
        fp32 [vocab_size, 1], the values of a layer's "ngrams.token_map".

    Raises:
        ValueError: The model has no such table.
        MismatchError: The tokenizer has more tokens than the model, another number of compressed ids, or no token for
            padding.
    """
    if not map_paths(config):
        raise ValueError(f"{type(config).__module__} with this config has no table of compressed token ids.")
    sizes: Any = config
    ids = compressed_ids(tokenizer)
    count = max(ids, default=-1) + 1
    if len(ids) > sizes.vocab_size:
        raise MismatchError(f"The tokenizer has {len(ids):,} tokens, and vocab_size is {sizes.vocab_size:,}.")
    if count != sizes.ngram_ids:
        raise MismatchError(
            f"The {len(ids):,} tokens of the tokenizer have {count:,} compressed ids, and the model hashes n-grams of "
            f"{sizes.ngram_ids:,} (ngram_ids; engram_compressed_vocab_size in config.json): it is another tokenizer."
        )
    if sizes.ngram_padding >= len(ids):
        raise MismatchError(f"ngram_padding is token {sizes.ngram_padding}, and the tokenizer has {len(ids):,} tokens.")
    rest = [ids[sizes.ngram_padding]] * (sizes.vocab_size - len(ids))
    return torch.tensor(ids + rest, dtype=torch.float32).unsqueeze(1)


def with_token_map(config: DecoderConfig, params: Tree, tokenizer: "Tokenizer") -> Tree:
    """The same parameters with `token_map` of this tokenizer in each layer that has such a table.

    `init` numbers tokens in turn. `load_pretrained` makes the tables of the folder's tokenizer.json where files lack
    them.

    Args:
        config: The model's config.
        params: The tree of parameters; a sharded table stays sharded.
        tokenizer: Of the tokenizers library.

    Returns:
        The tree; other leaves are those of `params`.

    Raises:
        ValueError: As `token_map`.
        MismatchError: As `token_map`.
    """
    table, paths = token_map(config, tokenizer), map_paths(config)

    def made(path: str, old: Any) -> Any:
        if path not in paths:
            return old
        if (sharding := sharding_of(old)) is not None:
            return sharding.distribute(table[sharding.local_box()].to(old.to_local()))
        return table.to(old, copy=True)

    return map_with_path(made, params)


def map_paths(config: DecoderConfig) -> frozenset[str]:
    """The paths of the tables, by the family's trait `of_tokenizer`."""
    family = family_of(config)
    if not (ends := traits_of(family).of_tokenizer):
        return frozenset()
    return frozenset(path for path in flatten(family.spec(config)) if path.endswith(ends))


def folder_token_map(config: DecoderConfig, folder: Path) -> Tensor:
    """`token_map` of the folder's tokenizer.json; MismatchError names the folder."""
    try:
        return token_map(config, read_tokenizer(folder))
    except MismatchError as error:
        raise MismatchError(f"{folder}: {error}") from None


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder has a tokenizer.json, of which `folder_token_map` makes the tables."""
    return os.path.lexists(folder / "tokenizer.json")


def compressed_ids(tokenizer: "Tokenizer") -> list[int]:
    """The compressed id of each token of a tokenizer, from 0 on."""
    from tokenizers import Regex, normalizers

    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _SPACE),
            normalizers.Strip(),
            normalizers.Replace(_SPACE, " "),
        ]
    )
    numbers: dict[str | None, int] = {}
    found = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token) if _PART in text else normalizer.normalize_str(text) or text
        found.append(numbers.setdefault(key, len(numbers)))
    return found
