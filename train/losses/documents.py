"""Losses of encoders and of whole documents, (sum, count), on packed rows: classification, answers, contrastive pairs.

The values of a document stand at its tokens, as `document_batch` writes them, so that rows of a batch can be split and
permuted as usual.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

import fnmodels
from fnmodels.embedding import Embedder, embeddings
from fnmodels.inputs.documents import Documents
from fnmodels.inputs.packing import IGNORE, Document, pack
from fnmodels.inputs.values import readable
from fnmodels.models.common import decoder
from fnmodels.models.common.family import DecoderConfig, field_of, function_of
from fnmodels.models.common.heads import problem_of
from fnmodels.ops.dtypes import upcast
from fnmodels.options import ForwardKwargs, ForwardOptions
from fnmodels.tree import Tree
from train.batch import Entries, check_entries
from train.loss import run_options

from .batch_checks import PAIRS, check_batch, check_classes, check_pairs, checked_by
from .cross_entropy import check_targets, cross_entropy
from .next_token import ModelStates, model_states


def document_batch(
    documents: Sequence[Document],
    length: int,
    *,
    targets: Sequence[float] | Sequence[Sequence[float]] | None = None,
    **values: Sequence[int],
) -> dict[str, Tensor]:
    """Packs documents unsplit into rows, with values of each document at all of its tokens.

    Args:
        documents: Token ids of each document.
        length: Tokens per row, S.
        targets: One number per document, or one per label, for regression and several labels. They become [B, S,
            labels] in fp32 at least, 0 at padding, and labels are 0 if not given. None: no targets.
        **values: One integer per document, such as labels=, or pairs' labels= and roles=. Each becomes int64 [B, S],
            the value at every token of the document and -100 at padding.

    Returns:
        A batch of [B, S]: tokens, positions, segment_ids and the values.

    Raises:
        ValueError: A document is longer than a row, or there are more or fewer values than documents.
    """
    if targets is not None:
        values = {"labels": [0] * len(documents)} | values
    packed = pack(documents, length, method="first_fit", split=False)
    batch = packed.batch()
    del batch["labels"]  # documents have others, if any
    for name, given in values.items():
        if len(given) != len(documents):
            raise ValueError(f"{name} has {len(given)} values for {len(documents)} documents; each has its own.")
        batch[name] = torch.full_like(packed.tokens, IGNORE)
        for document, _, row, start, size in packed.pieces.tolist():
            batch[name][row, start : start + size] = int(given[document])
    if targets is None:
        return batch
    wanted = upcast(torch.as_tensor(targets)).reshape(len(targets), -1)
    if len(wanted) != len(documents):
        raise ValueError(f"targets has {len(wanted)} values for {len(documents)} documents; each has its own.")
    batch["targets"] = torch.zeros(*packed.tokens.shape, wanted.shape[1], dtype=wanted.dtype)
    for document, _, row, start, size in packed.pieces.tolist():
        batch["targets"][row, start : start + size] = wanted[document]
    return batch


def _check_classification(batch: Entries, config: Any, options: Mapping[str, Any]) -> None:
    problem = problem_of(config)
    if problem == "single_label_classification":
        check_classes(batch, config)
        return
    check_batch(batch, config, PAIRS)  # 0 or more says that a document counts
    _check_targets(batch, config, problem)


@checked_by(_check_classification)
def classification_loss(
    params: Tree, batch: Entries, *, config: DecoderConfig, **options: Unpack[ForwardKwargs]
) -> tuple[Tensor, Tensor]:
    """The loss of each document's class or scores, for a model with the head "classification".

    It is the cross entropy, unless the config's problem_type says otherwise or there is a single label, which is a
    regression. Then it is the mean over labels of squared errors, or of binary cross entropies.

    Args:
        params: The parameters of the model.
        batch: tokens, positions, segment_ids and labels, each [B, S]; labels: the class at any token of a document,
            -100 at the others. Regressions and several labels need targets [B, S, num_labels] too, read at a document's
            first token; a label of 0 or more then says only that the document counts.
        config: The model's config.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        The sum of the documents' losses, and the number of documents with a label.

    Raises:
        ValueError: The model has another head, targets are missing or of another width, or targets for several labels
            lie outside of 0 to 1.
    """
    _check_head(config, "classification")
    problem = problem_of(config)
    several = problem != "single_label_classification"
    if several:
        _check_targets(batch, config, problem)
    check_entries(batch, "labels")
    check_targets(batch["labels"], None if several else field_of(config, "num_labels"), of="set of classes")
    states, found = _states(params, batch, config, options), _documents(batch)
    classify = function_of(fnmodels.family_of(config), "classify") or decoder.classify
    logits, labels = classify(states.params, states.x, found, config=config), _of_documents(batch, "labels", found)
    if not several:
        return cross_entropy(logits, labels)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets, has = batch["targets"][found.row, found.first].to(wide.dtype), labels != IGNORE
    of = F.mse_loss if problem == "regression" else F.binary_cross_entropy_with_logits
    return of(wide, targets, reduction="none").mean(1).where(has, 0).sum(), has.sum()


@checked_by(lambda batch, config, _: check_classes(batch, config))
def token_classification_loss(
    params: Tree, batch: Entries, *, config: DecoderConfig, **options: Unpack[ForwardKwargs]
) -> tuple[Tensor, Tensor]:
    """The cross entropy of each token's class, for a model with the head "tokens".

    Args:
        params: The parameters of the model.
        batch: tokens, positions, segment_ids and labels, each [B, S]; labels: the class of each token, -100 ignored.
        config: The model's config.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        The sum of the tokens' cross entropies in nats, and the number of labels that count.

    Raises:
        ValueError: The model has another head, or labels are no classes of it.
    """
    _check_head(config, "tokens")
    check_entries(batch, "labels")
    check_targets(batch["labels"], field_of(config, "num_labels"), of="set of classes")
    states = _states_of_tokens(params, batch, config, options)
    return cross_entropy(decoder.scores(states.params, states.x, config=config), batch["labels"])


@checked_by(lambda batch, config, _: check_batch(batch, config, None))
def answer_loss(
    params: Tree, batch: Entries, *, config: DecoderConfig, **options: Unpack[ForwardKwargs]
) -> tuple[Tensor, Tensor]:
    """The loss of the first and the last token of each document's answer, for the head "question_answering".

    Each is a cross entropy over the tokens of the document, and never over padding.

    Args:
        params: The parameters of the model.
        batch: tokens, positions, segment_ids and labels, each [B, S]; labels: 1 at the first token of a document's
            answer, 2 at its last, 3 where these are the same token, anything else elsewhere.
        config: The model's config.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        The sum over documents of the mean of the two losses, in nats, and the number of documents that have both
        tokens.

    Raises:
        ValueError: The model has another head, or the batch's ids are outside of the model's.
    """
    _check_head(config, "question_answering")
    states, found = _states(params, batch, config, options), _documents(batch)
    logits = fnmodels.family_of(config).unembed(states.params, states.x, config=config).flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    number, count, labels = found.number.flatten(), len(found), _at_tokens(batch, "labels", found).flatten()
    total, has = logits.new_zeros(count), torch.ones(count, dtype=torch.bool, device=logits.device)
    for index, bit in enumerate((1, 2)):
        values = logits[:, index]
        top = values.new_full((count + 1,), -torch.inf).scatter_reduce(0, number, values.detach(), "amax")
        inside = number < count
        sums = values.new_zeros(count + 1).index_add(0, number, torch.where(inside, values - top[number], 0).exp())
        target = inside & ((labels == bit) | (labels == 3))
        at = values.new_zeros(count + 1).index_add(0, number, torch.where(target, values, 0))
        has &= torch.zeros(count + 1, dtype=torch.bool, device=has.device).index_fill(0, number[target], True)[:count]
        total = total + (sums[:count].log() + top[:count] - at[:count]) / 2
    return torch.where(has, total, 0).sum(), has.sum()


@checked_by(check_pairs)
def contrastive_loss(
    params: Tree,
    batch: Entries,
    *,
    config: DecoderConfig,
    embedder: Embedder,
    temperature: float = 0.05,
    widths: tuple[int, ...] = (),
    **options: Unpack[ForwardKwargs],
) -> tuple[Tensor, Tensor]:
    """InfoNCE (arXiv 1807.03748) of queries and documents, with in-batch and hard negatives.

    Candidates of every query are all documents with other roles; the loss is the cross entropy of cosine similarities /
    temperature. The candidates are the documents of one microbatch, of all ranks together: the loss depends on how a
    batch is split into microbatches, and not on the mesh.

    Args:
        params: The parameters of the encoder.
        batch: tokens, positions, segment_ids, labels and roles, each [B, S], see `document_batch`. labels: the number
            of the pair that a document belongs to; roles: 0 a query, 1 its positive, 2 and more a hard negative.
        config: The encoder's config, without a head.
        embedder: How hidden states become one vector per document.
        temperature: Divides the similarities.
        widths: Numbers of first elements of the vectors: the loss is the sum of the losses of the vectors cut to each
            (Matryoshka, arXiv 2205.13147). () is the full width alone.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        The sum of the queries' losses in nats, and the number of queries.

    Raises:
        ValueError: A query is without exactly one positive in its microbatch, on all ranks alike, or the model has a
            head.
    """
    _check_head(config, "none")
    check_entries(batch, "positions", "segment_ids", "labels", "roles")
    for name in ("labels", "roles"):
        check_targets(batch[name], None, name)
    _check_full_rows(params)
    found, gather = _documents(batch), run_options(params).ranks.all_documents
    keys = torch.stack([_of_documents(batch, name, found) for name in ("labels", "roles")], 1)
    every = keys if gather is None else gather(keys)
    _check_pairs(every)  # before the model runs: over pp all stages come here
    states = _states(params, batch, config, options)
    x = fnmodels.family_of(config).unembed(states.params, states.x, config=config)
    vectors = embeddings(states.params, x, found, embedder=embedder)
    everyone = vectors if gather is None else gather(vectors)
    queries, others = keys[:, 1] == 0, every[:, 1] > 0
    target = _positives(keys[queries], every[others]).int().argmax(1)
    total = vectors.new_zeros((), dtype=torch.promote_types(vectors.dtype, torch.float32))
    for width in widths or (vectors.shape[1],):
        mine, theirs = (F.normalize(x[:, :width].to(total.dtype), dim=-1) for x in (vectors[queries], everyone[others]))
        total = total + F.cross_entropy(mine @ theirs.T / temperature, target, reduction="sum")
    return total, queries.sum()


def _positives(queries: Tensor, others: Tensor) -> Tensor:
    """[Q, C]: whether a candidate is a query's positive; both are (pair, role) of documents, [Q, 2] and [C, 2]."""
    return (queries[:, None, 0] == others[:, 0]) & (others[:, 1] == 1)


def _check_pairs(every: Tensor) -> None:
    """ValueError unless each query has one positive. every: (pair, role) of all documents, so all ranks raise alike."""
    queries = every[every[:, 1] == 0]
    counts = _positives(queries, every[every[:, 1] > 0]).sum(1)
    if bool((counts == 1).all()):
        return
    wrong = int((counts != 1).nonzero()[0, 0])
    raise ValueError(
        f"The query of pair {int(queries[wrong, 0])} has {int(counts[wrong])} positives here; it needs exactly one, in "
        "the same microbatch."
    )


def _states(params: Tree, batch: Entries, config: Any, options: ForwardKwargs) -> ModelStates:
    """The model's states. NotImplementedError as `_check_full_rows`."""
    _check_full_rows(params)
    return _states_of_tokens(params, batch, config, options)


def _states_of_tokens(params: Tree, batch: Entries, config: Any, options: ForwardKwargs) -> ModelStates:
    """The model's states, of this rank's positions. NotImplementedError, on all ranks alike, with sequence=True."""
    if run_options(params).ranks.sequence:
        raise NotImplementedError(
            "This loss reads the states of all tokens of a row, of which each rank of tp has some with sequence=True: "
            "take Strategy(sequence=False)."
        )
    return model_states(params, batch, config=config, length=None, options=ForwardOptions(**options))


def _check_full_rows(params: Tree) -> None:
    """NotImplementedError, on all ranks alike, over `cp`, which shards documents."""
    if run_options(params).ranks.kernel is not None:
        raise NotImplementedError("Losses of documents read full rows, which ranks of cp do not have: leave cp out.")


def _documents(batch: Entries) -> Documents:
    return fnmodels.documents(batch["segment_ids"], batch["positions"])


def _at_tokens(batch: Entries, name: str, found: Documents) -> Tensor:
    """An entry of values at tokens, [B, S]. ValueError for another shape, which could broadcast silently."""
    check_entries(batch, name)
    if batch[name].shape != found.number.shape:
        raise ValueError(
            f"{name} must be {list(found.number.shape)} like the segment_ids, not {list(batch[name].shape)}."
        )
    return batch[name]


def _of_documents(batch: Entries, name: str, found: Documents) -> Tensor:
    """[N]: the largest value of an entry at each document's tokens; -100 stands for none."""
    values = _at_tokens(batch, name, found)
    lowest = values.new_full((len(found) + 1,), IGNORE)
    return lowest.scatter_reduce(0, found.number.flatten(), values.flatten(), "amax")[: len(found)]


def _check_targets(batch: Entries, config: Any, problem: str) -> None:
    labels = field_of(config, "num_labels")
    if "targets" not in batch:
        raise ValueError(
            f"The batch has no targets, and the model's problem is {problem} of num_labels {labels}: give "
            "document_batch targets=, "
            + ("the values of each document." if problem == "regression" else "a 0 or 1 per label of each document.")
        )
    targets, wanted = batch["targets"], [*batch["tokens"].shape[:2], labels]
    if list(targets.shape) != wanted or not targets.is_floating_point():
        raise ValueError(
            f"targets must be floating point {wanted}, one per label, not {targets.dtype} {list(targets.shape)}."
        )
    if problem != "regression" and readable(targets) and bool(((targets < 0) | (targets > 1)).any()):
        raise ValueError(
            f"targets go from {float(targets.min()):g} to {float(targets.max()):g}; those of {problem} are "
            "probabilities, 0 to 1."
        )


def _check_head(config: Any, wanted: str) -> None:
    if (head := field_of(config, "head")) != wanted:
        raise ValueError(f"The model's head is {head!r}; this loss is for the head {wanted!r}.")
