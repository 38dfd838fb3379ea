"""One vector per document: pooling, dense layers and normalization, on packed rows.

    loaded = P.load_embedder(folder)                         # a folder of sentence-transformers
    vectors = fnmodels.embed_texts(loaded, texts)            # [N, D]
    config, params, embedder = loaded
    vectors = fnmodels.embed_documents(params, documents, config=config, embedder=embedder)   # of token ids

`embeddings` does the same for hidden states, differentiably.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.documents import POOLINGS, Documents, documents, pool
from fnmodels.inputs.layout import layout
from fnmodels.inputs.packing import Document, pack
from fnmodels.models.common.family import DecoderConfig, field_of
from fnmodels.models.common.registry import family_of
from fnmodels.models.common.spec import bias, weight
from fnmodels.ops.linear import linear
from fnmodels.options import ForwardKwargs
from fnmodels.tree import Tree

from .apply import forward, prepare

ACTIVATIONS = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": F.relu,
    "GELU": F.gelu,
    "SiLU": F.silu,
    "Sigmoid": torch.sigmoid,
}
# {bytes per element: tokens of a forward pass}: on a CPU more of them leave the cache; products of bf16 with AMX are so
# fast that the time of a call counts more.
BATCH = {4: 2048, 2: 8192}
STEP = 128  # lengths of rows above it are multiples of it: a kernel that is compiled per length sees few of them


@dataclass(frozen=True)
class DenseLayer:
    """A linear layer on pooled vectors, and its activation.

    Args:
        in_features: The width of the pooled vectors.
        out_features: The width of the result.
        bias: Whether there is a bias.
        activation: One of `fnmodels.embedding.ACTIVATIONS`, by torch's name.

    Raises:
        ValueError: The activation is unknown.
    """

    in_features: int
    out_features: int
    bias: bool = True
    activation: str = "Tanh"

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation is {self.activation!r}; it must be one of {', '.join(ACTIVATIONS)}.")


@dataclass(frozen=True)
class Embedder:
    """Settings that make one vector of a text: tokens, then pooling, dense layers and normalization of hidden states.

    Args:
        pooling: Names of `fnmodels.pool`, whose results are concatenated.
        dense: Layers after pooling; their parameters are params["dense"].
        normalize: Whether the vectors have length 1.
        max_length: The longest document in tokens; None for no limit.
        lower_case: Whether texts are lowercased before the tokenizer, which `tokenizer` does by itself.
        include_prompt: Whether pooling reads the tokens of a prompt.
        prompts: (name, text) of each prompt, which `embed_texts` writes before texts.
        default_prompt: The name of the prompt where no other is chosen.
        pad_token_id: The padding token, which documents must not begin or end with.
        tokenizer: A tokenizer of the tokenizers library, without padding, which cuts at max_length. It takes no part
            in equality.
        sparse: "relu" or "log1p_relu": the vectors are sparse ones of the vocabulary (SPLADE, arXiv 2109.10086), the
            pooled log(1 + relu(logits)) of a masked-LM head; for the second the logarithm is taken twice.

    Raises:
        ValueError: An unknown pooling, or a default_prompt that prompts lacks.
    """

    pooling: tuple[str, ...] = ("mean",)
    dense: tuple[DenseLayer, ...] = ()
    normalize: bool = True
    max_length: int | None = None
    lower_case: bool = False
    include_prompt: bool = True
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None
    pad_token_id: int | None = None
    tokenizer: Any = field(default=None, compare=False, repr=False)
    sparse: str = ""

    def __post_init__(self) -> None:
        if not self.pooling or any(how not in POOLINGS for how in self.pooling):
            raise ValueError(f"pooling is {self.pooling}; it must name some of {', '.join(POOLINGS)}.")
        if self.sparse not in ("", "relu", "log1p_relu"):
            raise ValueError(f"sparse is {self.sparse!r}; it must be relu, log1p_relu or empty.")
        if self.sparse and (self.pooling not in (("max",), ("sum",)) or self.dense or self.normalize):
            raise ValueError("A sparse embedder pools by max or by sum, without dense layers and normalization.")
        if self.default_prompt is not None:
            self.prompt(self.default_prompt)

    def prompt(self, name: str) -> str:
        """The text of a prompt by its name.

        Args:
            name: A name of `prompts`.

        Returns:
            The text that is written before a text.

        Raises:
            ValueError: There is no prompt of this name.
        """
        if name not in (known := dict(self.prompts)):
            raise ValueError(f"The embedder has no prompt {name!r}; it has {', '.join(known) or 'none'}.")
        return known[name]

    def spec(self, config: DecoderConfig) -> Tree:
        """The declaration of the parameters of the model and of the dense layers.

        Args:
            config: The model's config.

        Returns:
            The tree of `Leaf`.
        """
        std = config.initializer_range
        tree: Tree = dict(family_of(config).spec(config))
        for layer in self.dense:
            leaves = {"weight": weight((layer.out_features, layer.in_features), ("features", "features_in"), std)}
            leaves |= {"bias": bias(layer.out_features, "features")} if layer.bias else {}
            tree["dense"] = [*tree.get("dense", []), leaves]
        return tree


class LoadedEmbedder(NamedTuple):
    """An embedding model with its parameters: the result of `params.load_embedder` and the argument of `embed_texts`.

    Args:
        config: The model's config.
        params: The parameters, with those of dense layers in params["dense"].
        embedder: How hidden states become vectors.
    """

    config: Any
    params: Tree
    embedder: Embedder


def embeddings(params: Tree, hidden: Tensor, documents: Documents, *, embedder: Embedder) -> Tensor:
    """The vectors of documents from the hidden states of a batch.

    Args:
        params: The parameters, of which those of dense layers are read.
        hidden: Hidden states [B, S, D] after the final norm; logits [B, S, V] for a sparse embedder.
        documents: The documents of the batch, of `fnmodels.documents`.
        embedder: Pooling, dense layers and normalization.

    Returns:
        [N, width], in the order of `documents`.
    """
    for _ in range({"": 0, "relu": 1, "log1p_relu": 2}[embedder.sparse]):
        hidden = torch.log1p(F.relu(hidden))
    vectors = torch.cat([pool(hidden, documents, how=how) for how in embedder.pooling], -1)
    for layer, weights in zip(embedder.dense, params.get("dense", ()), strict=True):
        vectors = ACTIVATIONS[layer.activation](linear(vectors, weights["weight"], weights.get("bias")))
    return F.normalize(vectors, dim=-1) if embedder.normalize else vectors


@torch.no_grad()
def embed_documents(
    params: Tree,
    texts: Sequence[Document],
    *,
    config: DecoderConfig,
    embedder: Embedder,
    row: int | None = None,
    batch: int | None = None,
    prompt_length: int = 0,
    **options: Unpack[ForwardKwargs],
) -> Tensor:
    """Embeds documents of token ids, without gradients.

    Documents are packed unsplit into rows, those of one length side by side, which attention takes together. Nothing is
    cut: the embedder's tokenizer cuts texts.

    Args:
        params: The parameters, with those of dense layers.
        texts: Token ids of each document, with the special tokens of the tokenizer and without padding.
        config: The configuration, without a head: `load_pretrained(..., head="none")` leaves it out.
        embedder: Pooling, dense layers and normalization.
        row: The tokens of a row, at least those of the longest document; None for one row per forward pass.
        batch: About as many tokens are one forward pass; None for 2,048, and for 8,192 of 16-bit parameters.
        prompt_length: The number of first tokens that pooling leaves out where include_prompt is False.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        [N, width]: one vector per document, in their order.

    Raises:
        ValueError: A document is empty, is longer than the embedder's max_length, begins or ends with padding, or has
            no tokens behind its prompt; or the config has a head.
    """
    head, needed_head = field_of(config, "head"), "masked_lm" if embedder.sparse else "none"
    if head != needed_head:
        how = "a sparse embedder reads masked_lm" if embedder.sparse else 'embeddings need it without: head="none"'
        raise ValueError(f"The model has the head {head!r}; {how}.")
    skipped = 0 if embedder.include_prompt else prompt_length
    lengths = _lengths(texts, embedder, skipped)
    if not texts:
        raise ValueError("There are no documents to embed.")
    groups = _groups(lengths, config)
    parts = []
    for group in groups:
        some = [texts[index] for index in group]
        parts.append(_vectors(params, some, config, embedder, row, batch, skipped, options))
    order = torch.tensor([index for group in groups for index in group], device=parts[0].device)
    return torch.cat(parts)[order.argsort()]


def _groups(lengths: Sequence[int], config: DecoderConfig) -> list[list[int]]:
    """The documents that can share a forward pass: rotary scaling by length would give each that of the longest."""
    rope: Any = getattr(config, "rope", None)
    scaled = rope is not None and rope.kind in ("dynamic", "longrope")
    groups: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        group = length if scaled and length > rope.original_max_position_embeddings else 0
        groups.setdefault(group, []).append(index)
    return list(groups.values())


def _vectors(
    params: Tree,
    texts: Sequence[Document],
    config: DecoderConfig,
    embedder: Embedder,
    row: int | None,
    batch: int | None,
    skipped: int,
    options: ForwardKwargs,
) -> Tensor:
    """[N, width]: the vectors of documents that can share a forward pass; arguments as for `embed_documents`."""
    lengths = [len(text) for text in texts]
    table = params["embed_tokens"]
    device, batch = table.device, BATCH.get(table.element_size(), BATCH[4]) if batch is None else batch
    order = torch.tensor(lengths, device=device).argsort(stable=True)
    width = max(batch if row is None else row, *lengths)
    packed = pack([texts[i] for i in order.tolist()], width, method="first_fit", split=False)
    batches_of_vectors, rows = [], max(1, batch // width)
    for first in range(0, len(packed.tokens), rows):
        some = slice(first, first + rows)
        used = int((packed.segment_ids[some] > 0).sum(1).max())  # the rest is padding of all of these rows
        here = some, slice(used if used <= STEP else -(-used // STEP) * STEP)
        part: dict[str, Any] = {name: getattr(packed, name)[here].to(device) for name in ("positions", "segment_ids")}
        inputs, masks, freqs_cis = prepare(config, packed.tokens[here].to(device), **part)
        run_options: ForwardKwargs = {"layout": layout(masks), **options}
        hidden = forward(params, inputs, masks, freqs_cis, config=config, **run_options)
        pooled = part["segment_ids"].where(part["positions"] >= skipped, 0)  # not the tokens of the prompt
        each = documents(pooled, part["positions"])
        batches_of_vectors.append(embeddings(params, hidden, each, embedder=embedder))
    vectors = torch.cat(batches_of_vectors)
    out = torch.empty_like(vectors)
    out[order[packed.pieces[:, 0].to(device)]] = vectors  # pieces are sorted by row and place in it, as `documents` are
    return out


def _lengths(texts: Sequence[Document], embedder: Embedder, skipped: int) -> list[int]:
    """The number of tokens of each document. ValueError as in `embed_documents`."""
    lengths, limit = [len(text) for text in texts], embedder.max_length
    for index, length in enumerate(lengths):
        if not 0 < length <= (limit or length):
            cut = "; embedder.tokenizer cuts texts" if length else ""
            raise ValueError(
                f"Document {index} has {length} tokens; a document has from 1 to {limit or 'any number'}{cut}."
            )
        if length <= skipped:
            raise ValueError(
                f"Document {index} has {length} tokens and a prompt of {skipped}, which is not pooled; it needs more."
            )
    pad = embedder.pad_token_id
    if pad is None:
        return lengths
    # Some tokenizers end each text with the token that also pads, as Qwen3's does.
    edges = embedder.tokenizer.encode("").ids if embedder.tokenizer is not None else []
    before, behind = _run(edges, pad), _run(edges[::-1], pad)
    for index, text in enumerate(texts):
        first, last = _run(text[: before + 1], pad), _run(text[-1 - behind :], pad)
        if first > before or last > behind:
            raise ValueError(
                f"Document {index} begins or ends with padding, token {pad}, which would be read as text: tokenize "
                "with embedder.tokenizer, or call no_padding() of yours."
            )
    return lengths


def _run(ids: Document, token: int) -> int:
    """The length of the run of a token with which ids begin."""
    values = [int(value) for value in ids]
    return next((i for i, value in enumerate(values) if value != token), len(values))
