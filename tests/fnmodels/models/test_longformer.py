"""Longformer with other heads: windows alone, or a first token that sees and is seen by its whole document."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.models.encoder import longformer
from tests.support.cases import generic, positions_of, segments, tokens_of
from tests.support.oracle import assert_close
from tests.variants.longformer import TINY

ROWS = segments((-3, 4, 15, -2), (1, 23))
CLASSES = {"none": "LongformerModel", "classification": "LongformerForSequenceClassification"}
CLASSES |= {"tokens": "LongformerForTokenClassification"}


def theirs(head: str) -> Any:
    """transformers' model, every parameter perturbed."""
    values = TINY | {"architectures": [CLASSES[head]], "id2label": {"0": "a", "1": "b", "2": "c"}}
    model = getattr(transformers, CLASSES[head])(transformers.AutoConfig.for_model(**values)).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(generic(name, tensor))
    return model


def results(model: Any, head: str, tokens: Tensor) -> Tensor:
    """What transformers returns for one document [S]."""
    with torch.no_grad():
        found = model(input_ids=tokens[None])
    return found.last_hidden_state[0] if head == "none" else found.logits[0]


@pytest.mark.parametrize("head", CLASSES)
def test_packed_documents_are_those_of_transformers_and_files_go_both_ways(head: str, tmp_path: Path) -> None:
    model = theirs(head)
    model.save_pretrained(tmp_path / "theirs")
    config, weights = P.load_pretrained(tmp_path / "theirs")
    assert config.head == head and config.first_is_global == (head == "classification")
    tokens = tokens_of(config, *ROWS.shape)
    prepared = fnmodels.prepare(config, tokens, positions=positions_of(ROWS), segment_ids=ROWS)
    for kernel in ("math", "auto"):
        got = fnmodels.forward(weights, *prepared, config=config, kernel=kernel)
        found = fnmodels.documents(ROWS)
        for i, (row, segment) in enumerate(zip(found.row, found.segment, strict=True)):
            mine = ROWS[row] == segment
            wanted = results(model, head, tokens[row, mine])
            assert_close(got[i] if head == "classification" else got[row, mine], wanted)
    P.save_pretrained(tmp_path / "ours", config, weights)
    state = getattr(transformers, CLASSES[head]).from_pretrained(tmp_path / "ours").state_dict()
    kept = {n: t for n, t in model.state_dict().items() if config.first_is_global or "_global." not in n}
    assert all(torch.equal(tensor, state[name]) for name, tensor in kept.items())


def test_gradients_reach_both_projections() -> None:
    """Keys and values of global heads of all tokens, queries of first tokens alone; local ones of all others."""
    config = longformer.Config.from_hf(TINY | {"architectures": [CLASSES["classification"]]})
    params = tree.map_with_path(lambda path, leaf: generic(path, leaf).requires_grad_(), P.init(config, 0))
    tokens = tokens_of(config, *ROWS.shape)
    prepared = fnmodels.prepare(config, tokens, positions=positions_of(ROWS), segment_ids=ROWS)
    logits = fnmodels.forward(params, *prepared, config=config)
    flat = P.flatten(params)
    grads = torch.autograd.grad(logits.square().sum(), list(flat.values()), allow_unused=True)
    still = {path for path, grad in zip(flat, grads, strict=True) if grad is None or not grad.abs().max() > 0}
    last = "layers.1.attention."  # of which the head reads first tokens alone
    assert still <= {f"{last}{name}_{end}" for name in "qkv" for end in ("proj", "bias")}, still


def test_all_layers_have_one_window_and_questions_have_no_global_tokens() -> None:
    config = longformer.Config.from_hf(TINY | {"attention_window": 6})
    assert config.sliding_window == 3 and fnmodels.preset("longformer-base-4096").sliding_window == 256
    for wrong in (5, [4, 4, 4], [4, True]):
        with pytest.raises(P.ConfigError, match=r"'attention_window' is .*; it must be an even number from 2"):
            longformer.Config.from_hf(TINY | {"attention_window": wrong})
    with pytest.raises(P.UnsupportedError, match=r"'attention_window' is \[4, 8\]; only equal windows are built"):
        longformer.Config.from_hf(TINY | {"attention_window": [4, 8]})
    with pytest.raises(P.UnsupportedError, match='has "LongformerForQuestionAnswering"; supported are'):
        longformer.Config.from_hf(TINY | {"architectures": ["LongformerForQuestionAnswering"]})
