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
from fnmodels.inputs.documents import first_tokens
from fnmodels.inputs.mask import build_mask
from fnmodels.models.common.config_json import ConfigJson
from fnmodels.models.encoder import longformer
from tests.support.cases import generic, off, positions_of, segments, tokens_of
from tests.support.oracle import assert_close, params_of
from tests.variants.longformer import TINY

ROWS = segments((-3, 4, 15, -2), (1, 23))
CLASSES = {"none": "LongformerModel", "classification": "LongformerForSequenceClassification"}
CLASSES |= {"tokens": "LongformerForTokenClassification"}


def values_of(head: str) -> ConfigJson:
    """The config.json of a model with this head."""
    return TINY | {"architectures": [CLASSES[head]], "id2label": {"0": "a", "1": "b", "2": "c"}}


def theirs(head: str) -> Any:
    """transformers' model, every parameter perturbed."""
    model = getattr(transformers, CLASSES[head])(transformers.AutoConfig.for_model(**values_of(head))).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(generic(name, tensor))
    return model


def results(model: Any, head: str, tokens: Tensor, first: int = 0) -> Tensor:
    """What transformers returns for one document [S], whose positions count from `first`."""
    places = torch.arange(len(tokens)) + first + TINY["pad_token_id"] + 1
    with torch.no_grad():
        found = model(input_ids=tokens[None], position_ids=places[None])
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
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def by_position(segment_ids: Tensor, positions: Tensor) -> Tensor:
    """A planted bug: the first token is the one at position 0."""
    return (positions == 0) & (segment_ids > 0)


def by_place(segment_ids: Tensor, positions: Tensor) -> Tensor:
    """A planted bug: the first token is the first of the row."""
    return first_tokens(segment_ids, torch.arange(segment_ids.shape[1])[None])


@pytest.mark.parametrize("bug", [None, by_position, by_place])
def test_the_global_token_is_the_first_of_its_document_wherever_it_begins(
    bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed rows, left padding, positions from any number on, and tokens in any order."""
    if bug is not None:
        monkeypatch.setattr(longformer, "first_tokens", bug)
    model = theirs("classification")
    config = longformer.Config.from_hf(values_of("classification"))
    weights = params_of(model, config)
    begins = torch.zeros_like(ROWS)
    for row, segment, first in ((0, 1, 3), (0, 2, 5), (1, 2, 1)):
        begins[row][ROWS[row] == segment] = first
    tokens, positions = tokens_of(config, *ROWS.shape), positions_of(ROWS) + begins
    found = fnmodels.documents(ROWS)
    wanted = torch.stack(
        [
            results(model, "classification", tokens[row, ROWS[row] == segment], int(begins[row, first]))
            for row, segment, first in zip(found.row, found.segment, found.first, strict=True)
        ]
    )
    worst = 0.0
    for seed in (None, 0, 1):
        order = (
            torch.arange(ROWS.shape[1])
            if seed is None
            else torch.randperm(ROWS.shape[1], generator=torch.Generator().manual_seed(seed))
        )
        moved = {"positions": positions[:, order], "segment_ids": ROWS[:, order]}
        prepared = fnmodels.prepare(config, tokens[:, order], **moved)
        for kernel in ("math", "auto"):
            worst = max(worst, off(fnmodels.forward(weights, *prepared, config=config, kernel=kernel), wanted))
    assert (worst < 1e-5) == (bug is None), worst


def test_first_tokens_are_those_that_heads_pool_and_need_no_values() -> None:
    """Also under vmap and in a graph."""
    config = longformer.Config.from_hf(TINY | {"architectures": [CLASSES["classification"]]})
    order = torch.stack(
        [torch.randperm(ROWS.shape[1], generator=torch.Generator().manual_seed(seed)) for seed in (2, 3)]
    )
    ids, positions = ROWS.gather(1, order), (positions_of(ROWS) + 4).gather(1, order)
    first = first_tokens(ids, positions)
    found = fnmodels.documents(ids, positions)
    assert first.nonzero().tolist() == sorted(torch.stack((found.row, found.first), 1).tolist())

    def made(positions: Tensor, segment_ids: Tensor) -> tuple[Tensor, Tensor]:
        mask = longformer.attention_masks(config, positions, segment_ids)["sliding"]
        return mask["first"], mask["attention"].dense()

    for got in (
        torch.compile(made, fullgraph=True, backend="eager")(positions, ids),
        [each[:, 0] for each in torch.func.vmap(made)(positions[:, None], ids[:, None])],
    ):
        assert all(torch.equal(each, want) for each, want in zip(got, made(positions, ids), strict=True))
    assert torch.equal(made(positions, ids)[0] > 0, first)
    with pytest.raises(ValueError, match="First needs span ids"):
        build_mask(longformer.First(), positions, ids).dense()


def test_projections_of_global_tokens_are_kept_for_a_later_head_and_learn_in_that_alone(tmp_path: Path) -> None:
    model = transformers.LongformerForMaskedLM(transformers.AutoConfig.for_model(**TINY)).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(generic(name, tensor))
    model.save_pretrained(tmp_path)
    config, weights = P.load_pretrained(tmp_path)
    made, given = P.new_head(config, weights, head="classification", num_labels=3)
    kept = {path: leaf for path, leaf in P.flatten(weights).items() if ".global." in path}
    assert len(kept) == 6 * config.num_hidden_layers and all(P.flatten(given)[path] is kept[path] for path in kept)
    name = "longformer.encoder.layer.1.attention.self.value_global.weight"
    assert torch.equal(given["layers"][1]["attention"]["global"]["v_proj"], model.state_dict()[name])
    back, _ = P.new_head(made, given, head="tokens", num_labels=2)
    for each in (config, made, back):
        learning = {path for path, leaf in P.flatten(longformer.spec(each)).items() if leaf.trainable}
        assert (kept.keys() <= learning) == each.first_is_global == bool(kept.keys() & learning)


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
