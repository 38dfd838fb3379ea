"""Losses of documents: transformers' values on each document alone, InfoNCE written out, packed equals separate."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fnmodels
import train
from fnmodels import tree
from fnmodels.models.common.heads import CLASSES
from tests.support.cases import generic_params, variants_of
from tests.support.oracle import model_of, params_of

DOCUMENTS = [list(range(3, 9)), [40, 2, 7], [11, 12, 13, 14, 15], [5], list(range(20, 31)), [9, 9, 8]]


def bert(head: str, labels: int = 0) -> tuple[Any, Any, Any]:
    """(transformers' model, config, params)."""
    names = {"id2label": {str(i): str(i) for i in range(labels)}} if labels else {}
    values = variants_of("bert").TINY | {"architectures": ["Bert" + CLASSES[head]]} | names
    model, config = model_of(values), fnmodels.family_for("bert").Config.from_hf(values)
    return model, config, params_of(model, config)


def batch_of(**values: Any) -> dict[str, torch.Tensor]:
    return train.document_batch(DOCUMENTS, 16, **values)


def check_gradients(loss: Any, params: Any, one: Any) -> None:
    """The gradient of a batch is the sum of the gradients of `one(i)`, (sum, count) of each document."""
    flat = {path: leaf.requires_grad_() for path, leaf in tree.flatten(params).items()}
    (total, count), parts = loss(), [one(i) for i in range(len(DOCUMENTS))]
    torch.testing.assert_close(total, sum(part for part, _ in parts))
    assert int(count) == sum(int(n) for _, n in parts) > 1
    got = torch.autograd.grad(total, list(flat.values()), allow_unused=True)
    want = torch.autograd.grad(sum(part for part, _ in parts), list(flat.values()), allow_unused=True)
    for path, a, b in zip(flat, got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=path)


def test_classification() -> None:
    model, config, params = bert("classification", 3)
    labels = [2, 0, 1, 1, -100, 0]
    batch = batch_of(labels=labels)
    with torch.no_grad():
        total, count = train.classification_loss(params, batch, config=config)
        wanted = sum(
            model(input_ids=torch.tensor([d]), labels=torch.tensor([label])).loss
            for d, label in zip(DOCUMENTS, labels, strict=True)
            if label >= 0
        )
    torch.testing.assert_close(total, wanted)
    assert int(count) == 5

    def one(i: int) -> Any:
        alone = train.document_batch(DOCUMENTS[i : i + 1], 16, labels=labels[i : i + 1])
        return train.classification_loss(params, alone, config=config)

    check_gradients(lambda: train.classification_loss(params, batch, config=config), params, one)


@pytest.mark.parametrize(
    ("problem", "labels", "declared"),
    [("regression", 3, True), ("regression", 1, False), ("multi_label_classification", 3, True)],
    ids=str,
)
def test_problem_types(problem: str, labels: int, declared: bool) -> None:
    """transformers' losses of each document, which depend on the config's problem_type and number of labels."""
    names = {"id2label": {str(i): str(i) for i in range(labels)}} | ({"problem_type": problem} if declared else {})
    values = variants_of("bert").TINY | {"architectures": ["BertForSequenceClassification"]} | names
    model, config = model_of(values), fnmodels.family_for("bert").Config.from_hf(values)
    params, generator = params_of(model, config), torch.Generator().manual_seed(5)
    targets = torch.rand(len(DOCUMENTS), labels, generator=generator)
    has = [0, 0, 0, 0, -100, 0]
    if problem != "regression":
        targets = targets.round()
    batch = train.document_batch(DOCUMENTS, 16, labels=has, targets=targets.squeeze(1).tolist())
    total, count = train.classification_loss(params, batch, config=config)
    wanted = sum(
        model(input_ids=torch.tensor([d]), labels=target[None]).loss
        for d, target, label in zip(DOCUMENTS, targets, has, strict=True)
        if label >= 0
    )
    torch.testing.assert_close(total, wanted)
    assert int(count) == 5 and model.config.problem_type == problem
    everyone = train.document_batch(DOCUMENTS, 16, targets=targets.tolist())

    def one(i: int) -> Any:
        alone = train.document_batch(DOCUMENTS[i : i + 1], 16, targets=targets[i : i + 1].tolist())
        return train.classification_loss(params, alone, config=config)

    check_gradients(lambda: train.classification_loss(params, everyone, config=config), params, one)
    assert config.to_hf().get("problem_type") == (problem if declared else None)


def test_targets_that_do_not_fit() -> None:
    names = {"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"}
    values = variants_of("bert").TINY | {"architectures": ["BertForSequenceClassification"]} | names
    config = fnmodels.family_for("bert").Config.from_hf(values)
    params = generic_params(config)
    with pytest.raises(ValueError, match="The batch has no targets, and the model's problem is multi_label"):
        train.classification_loss(params, batch_of(labels=[0] * 6), config=config)
    for targets, message in (
        ([0.0] * 6, r"targets must be floating point \[2, 16, 2\], one per label, not torch.float32 \[2, 16, 1\]"),
        ([[0.0, 3.0]] * 6, "targets go from 0 to 3; those of multi_label_classification are probabilities, 0 to 1"),
    ):
        batch = train.document_batch(DOCUMENTS, 16, targets=targets)
        with pytest.raises(ValueError, match=message):
            train.classification_loss(params, batch, config=config)
    with pytest.raises(ValueError, match="targets has 1 values for 6 documents"):
        train.document_batch(DOCUMENTS, 16, targets=[0.5])
    decoder = variants_of("llama").variants()["llama"]
    decoder = decoder | {"architectures": ["LlamaForSequenceClassification"]} | names
    made = fnmodels.family_for("llama").Config.from_hf(decoder)
    assert made.problem_type == made.to_hf()["problem_type"] == "multi_label_classification"
    for change, message in (
        ({"problem_type": "ranking"}, "'problem_type' is \"ranking\"; it must be one of regression, single_label"),
        ({"id2label": {"0": "a"}, "problem_type": "single_label_classification"}, "a single score is a regression"),
        ({"id2label": {"1": "a", "2": "b"}}, "its keys must be the labels 0 to 1"),
        ({"num_labels": 3}, "'num_labels' is 3, but 'id2label' has 2 labels"),
    ):
        with pytest.raises(fnmodels.errors.ConfigError, match=message):
            fnmodels.family_for("bert").Config.from_hf(values | change)


def test_classification_with_a_decoder() -> None:
    llama = fnmodels.family_for("llama")
    values = variants_of("llama").variants()["llama"]
    config = dataclasses.replace(llama.Config.from_hf(values), head="classification", num_labels=2)
    params, labels = generic_params(config), [1, 0, 1, 1, 0, 0]
    total, _ = train.classification_loss(params, batch_of(labels=labels), config=config)
    parts = []
    for document, label in zip(DOCUMENTS, labels, strict=True):
        logits = fnmodels.forward(params, *fnmodels.prepare(config, torch.tensor([document])), config=config)
        parts.append(F.cross_entropy(logits, torch.tensor([label])))
    torch.testing.assert_close(total, sum(parts))


def test_tokens() -> None:
    model, config, params = bert("tokens", 3)
    batch = batch_of()
    labels = torch.where(batch["segment_ids"] > 0, batch["tokens"] % 3, -100)
    with torch.no_grad():
        total, count = train.losses.token_classification_loss(params, {**batch, "labels": labels}, config=config)
        wanted = sum(model(input_ids=torch.tensor([d]), labels=torch.tensor([d]) % 3).loss * len(d) for d in DOCUMENTS)
    torch.testing.assert_close(total, wanted)
    assert int(count) == sum(map(len, DOCUMENTS))


def test_answers() -> None:
    model, config, params = bert("question_answering")
    spans = [(1, 4), (2, 2), None, (0, 0), (3, 10), (0, 2)]
    batch = batch_of(labels=range(len(DOCUMENTS)))
    number, batch["labels"] = batch["labels"], torch.zeros_like(batch["tokens"])
    for i, span in enumerate(spans):
        for at, bit in zip(span or (), (1, 2), strict=bool(span)):
            batch["labels"] += bit * ((number == i) & (batch["positions"] == at))
    with torch.no_grad():
        total, count = train.losses.answer_loss(params, batch, config=config)
        wanted = sum(
            model(
                input_ids=torch.tensor([d]), start_positions=torch.tensor([s[0]]), end_positions=torch.tensor([s[1]])
            ).loss
            for d, s in zip(DOCUMENTS, spans, strict=True)
            if s
        )
    torch.testing.assert_close(total, wanted)
    assert int(count) == 5


@pytest.mark.parametrize("widths", [(), (32, 8)], ids=["full", "matryoshka"])
def test_contrastive(widths: tuple[int, ...]) -> None:
    """Two pairs, one with a hard negative; the value written out, in any order of documents."""
    _, config, params = bert("none")
    embedder = fnmodels.Embedder(("mean",), (), normalize=False)
    pairs, roles = [7, 3, 7, 3, 3], [0, 1, 1, 0, 2]
    batch = train.document_batch(DOCUMENTS[:5], 16, labels=pairs, roles=roles)
    flat = {path: leaf.requires_grad_() for path, leaf in tree.flatten(params).items() if "pooler" not in path}
    given = {"config": config, "embedder": embedder, "temperature": 0.1, "widths": widths}
    total, count = train.contrastive_loss(params, batch, **given)
    states = [
        fnmodels.forward(params, *fnmodels.prepare(config, torch.tensor([document])), config=config)[0].mean(0)
        for document in DOCUMENTS[:5]
    ]
    wanted = torch.zeros(())
    for width in widths or (32,):
        unit = F.normalize(torch.stack(states)[:, :width], dim=-1)
        scores = unit[[0, 3]] @ unit[[2, 1, 4]].T / 0.1
        wanted = wanted + F.cross_entropy(scores, torch.tensor([0, 1]), reduction="sum")
    torch.testing.assert_close(total, wanted)
    assert int(count) == 2
    for a, b in zip(*(torch.autograd.grad(one, list(flat.values())) for one in (total, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    wrong = train.document_batch(DOCUMENTS[:5], 16, labels=pairs, roles=[0, 2, 1, 0, 2])
    with pytest.raises(ValueError, match="The query of pair 3 has 0 positives here; it needs exactly one"):
        train.contrastive_loss(params, wrong, **given)
    with pytest.raises(ValueError, match="The model's head is 'none'; this loss is for the head 'tokens'"):
        train.losses.token_classification_loss(params, batch, config=config)
    with pytest.raises(ValueError, match="labels has 1 values for 6 documents"):
        batch_of(labels=[1])
