"""One vector per document: pooling, dense layers and normalization, on packed rows.

    config, params, embedder = P.load_embedder(folder)       # a folder of sentence-transformers
    vectors = fnmodels.embed_documents(params, documents, config=config, embedder=embedder)   # [N, D]

`embeddings` does the same for hidden states, differentiably.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

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
    """A linear layer on pooled vectors, and its activation: one of ACTIVATIONS."""

    in_features: int
    out_features: int
    bias: bool = True
    activation: str = "Tanh"

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation is {self.activation!r}; it must be one of {', '.join(ACTIVATIONS)}.")


@dataclass(frozen=True)
class Embedder:
    """How hidden states become one vector per document.

    pooling: names of `fnmodels.pool`, whose results are concatenated. dense: layers after it; their parameters are
    params["dense"]. normalize: the result has length 1. max_length, lower_case: for the tokenizer; the longest
    document in tokens, None for no limit, and whether texts are lowercased. ValueError for an unknown pooling.
    """

    pooling: tuple[str, ...] = ("mean",)
    dense: tuple[DenseLayer, ...] = ()
    normalize: bool = True
    max_length: int | None = None
    lower_case: bool = False

    def __post_init__(self) -> None:
        if not self.pooling or any(how not in POOLINGS for how in self.pooling):
            raise ValueError(f"pooling is {self.pooling}; it must name some of {', '.join(POOLINGS)}.")

    def spec(self, config: DecoderConfig) -> Tree:
        """The parameters of the model and of the dense layers."""
        std = config.initializer_range
        tree: Tree = dict(family_of(config).spec(config))
        for layer in self.dense:
            leaves = {"weight": weight((layer.out_features, layer.in_features), ("features", "features_in"), std)}
            leaves |= {"bias": bias(layer.out_features, "features")} if layer.bias else {}
            tree["dense"] = [*tree.get("dense", []), leaves]
        return tree


def embeddings(params: Tree, hidden: Tensor, documents: Documents, *, embedder: Embedder) -> Tensor:
    """[N, width] of hidden states [B, S, D] after the final norm, in the order of `documents`."""
    found = torch.cat([pool(hidden, documents, how=how) for how in embedder.pooling], -1)
    for layer, weights in zip(embedder.dense, params.get("dense", ()), strict=True):
        found = ACTIVATIONS[layer.activation](linear(found, weights["weight"], weights.get("bias")))
    return F.normalize(found, dim=-1) if embedder.normalize else found


@torch.no_grad()
def embed_documents(
    params: Tree,
    texts: Sequence[Document],
    *,
    config: DecoderConfig,
    embedder: Embedder,
    row: int | None = None,
    batch: int | None = None,
    **options: Unpack[ForwardKwargs],
) -> Tensor:
    """[N, width]: one vector per document of token ids, in their order, without gradients.

    Documents are packed unsplit into rows of at most `row` tokens (or of the longest document), those of one length
    side by side, which attention takes together. About `batch` tokens are one forward pass: None for 2,048, and for
    8,192 of 16-bit parameters. row: None for one row per forward pass. options: as in `fnmodels.forward`.
    ValueError for an empty document, for one that is longer than the embedder's max_length, and for a config with a
    head, which `load_pretrained(..., head="none")` leaves out.
    """
    if (head := field_of(config, "head")) != "none":
        raise ValueError(f'The model has the head {head!r}; embeddings need it without: load it with head="none".')
    lengths = [len(text) for text in texts]
    for index, length in enumerate(lengths):
        if not 0 < length <= (embedder.max_length or length):
            raise ValueError(
                f"Document {index} has {length} tokens; a document has from 1 to {embedder.max_length or 'any number'}."
            )
    if not texts:
        raise ValueError("There are no documents to embed.")
    table = params["embed_tokens"]
    device, batch = table.device, BATCH.get(table.element_size(), BATCH[4]) if batch is None else batch
    order = torch.tensor(lengths, device=device).argsort(stable=True)
    width = max(batch if row is None else row, *lengths)
    packed = pack([texts[i] for i in order.tolist()], width, method="first_fit", split=False)
    found, rows = [], max(1, batch // width)
    for first in range(0, len(packed.tokens), rows):
        some = slice(first, first + rows)
        used = int((packed.segment_ids[some] > 0).sum(1).max())  # the rest is padding of all of these rows
        here = some, slice(used if used <= STEP else -(-used // STEP) * STEP)
        part: dict[str, Any] = {name: getattr(packed, name)[here].to(device) for name in ("positions", "segment_ids")}
        inputs, masks, freqs_cis = prepare(config, packed.tokens[here].to(device), **part)
        given: ForwardKwargs = {"layout": layout(masks), **options}
        hidden = forward(params, inputs, masks, freqs_cis, config=config, **given)
        each = documents(part["segment_ids"], part["positions"])
        found.append(embeddings(params, hidden, each, embedder=embedder))
    vectors = torch.cat(found)
    out = torch.empty_like(vectors)
    out[order[packed.pieces[:, 0].to(device)]] = vectors  # pieces are sorted by row and place in it, as `documents` are
    return out
