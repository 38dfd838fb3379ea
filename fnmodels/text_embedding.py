"""`embed_texts`: texts to vectors, with the tokenizer and the prompts of a folder of sentence-transformers."""

from collections.abc import Sequence
from typing import Any, Unpack

from torch import Tensor

from fnmodels.models.common.family import DecoderConfig
from fnmodels.options import ForwardKwargs
from fnmodels.tree import Tree

from .embedding import Embedder, LoadedEmbedder, embed_documents


def embed_texts(
    embedder: LoadedEmbedder | tuple[DecoderConfig, Tree, Embedder],
    texts: Sequence[str],
    *,
    prompt_name: str | None = None,
    prompt: str | None = None,
    truncate: bool = False,
    row: int | None = None,
    batch: int | None = None,
    **options: Unpack[ForwardKwargs],
) -> Tensor:
    """Embeds texts with the embedder's tokenizer and prompts, without gradients.

    Args:
        embedder: What `params.load_embedder` returned, or (config, params, embedder).
        texts: The texts, without prompts.
        prompt_name: The name of one of the embedder's prompts, which is written before each text; None for its
            default_prompt, if it has one.
        prompt: The text of a prompt, in place of prompt_name; "" for none.
        truncate: Whether texts of more than max_length tokens are cut there, with the special tokens kept.
        row: The tokens of a row, at least those of the longest text; None for one row per forward pass.
        batch: About as many tokens are one forward pass; None for 2,048, and for 8,192 of 16-bit parameters.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        [N, width]: one vector per text, in their order.

    Raises:
        ValueError: A text is too long and truncate is False; the embedder has no tokenizer or no such prompt; texts is
            a single text; and the errors of `embed_documents`.
    """
    config, params, how = embedder
    if isinstance(texts, str):
        raise ValueError(f"texts must be a list of texts, not one text, {texts[:40]!r}.")
    if how.tokenizer is None:
        raise ValueError(
            "The embedder has no tokenizer: its folder has no tokenizer.json, or the package tokenizers, which the "
            "extra fnmodels[text] installs, is missing. embed_documents takes token ids."
        )
    before = _prompt(how, prompt_name, prompt)
    encodings = how.tokenizer.encode_batch([before + text for text in texts])
    cut = [index for index, encoding in enumerate(encodings) if encoding.overflowing]
    if cut and not truncate:
        raise ValueError(
            f"Text {cut[0]} has more than {how.max_length} tokens, the embedder's max_length: split it, or cut texts "
            "there with truncate=True."
        )
    # a tokenizer of the caller's may still pad
    documents = [
        [token for token, real in zip(encoding.ids, encoding.attention_mask, strict=True) if real]
        for encoding in encodings
    ]
    skipped = 0 if how.include_prompt else _prompt_length(how.tokenizer, before)
    return embed_documents(
        params, documents, config=config, embedder=how, row=row, batch=batch, prompt_length=skipped, **options
    )


def _prompt(embedder: Embedder, name: str | None, text: str | None) -> str:
    """The text before each text."""
    if name is not None and text is not None:
        raise ValueError(f"prompt_name is {name!r} and prompt is {text!r}; only one of them can be chosen.")
    if text is not None:
        return text
    name = embedder.default_prompt if name is None else name
    return "" if name is None else embedder.prompt(name)


def _prompt_length(tokenizer: Any, prompt: str) -> int:
    """The tokens of a prompt with the special ones in front, which sentence-transformers counts alike."""
    if not prompt:
        return 0
    special = tokenizer.encode(prompt).special_tokens_mask
    return max((index + 1 for index, value in enumerate(special) if not value), default=0)
