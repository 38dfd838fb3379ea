"""Scores of documents and of tokens by a decoder equal transformers' of each document alone."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES

import fnmodels
import params as P
import train
from fnmodels.models.common.family import traits_of
from tests.support.cases import Case, cases, generic_params, positions_of, richest, seed_of, segments, tokens_of
from tests.support.oracle import assert_close, model_of, save

LABELS = {"0": "bad", "1": "fair", "2": "good"}
ROWS = segments((-3, 9, 5, -1), (18,))  # left padding, two documents in a row, and one alone
BY_TYPE = richest(lambda case: case.config.model_type if case.values else "")
TRAITS = {case: traits_of(fnmodels.family_of(case.config)) for case in BY_TYPE}
DECODERS = [case for case in BY_TYPE if TRAITS[case].causal and "classification" in TRAITS[case].heads]
OTHERS = ("kimi_linear", "olmo_hybrid")  # whose files transformers writes with other tensors than are published
KNOWN = [case for case in DECODERS if case.values and case.config.model_type in CLASSES]


def values_of(case: Case) -> dict[str, Any]:
    return case.values | {"architectures": [CLASSES[case.config.model_type]], "id2label": LABELS}


@pytest.mark.parametrize("case", KNOWN, ids=str)
def test_scores_and_files(case: Case, tmp_path: Path) -> None:
    model = model_of(values_of(case))
    save(model, tmp_path / "theirs")
    config, weights = P.load_pretrained(tmp_path / "theirs")
    assert (config.head, config.num_labels, weights["score"].shape[0]) == ("classification", 3, 3)
    tokens = tokens_of(config, *ROWS.shape, seed=seed_of(case))
    prepared = fnmodels.prepare(config, tokens, positions=positions_of(ROWS), segment_ids=ROWS)
    got, found = fnmodels.forward(weights, *prepared, config=config), fnmodels.documents(ROWS)
    alone = []
    for row, segment in zip(found.row, found.segment, strict=True):
        with torch.no_grad():  # a batch of one, of which the last token is read; a fresh dynamic rope each
            one = tokens[row, ROWS[row] == segment][None]
            alone.append(model_of(values_of(case))(input_ids=one, use_cache=False).logits[0])
    assert_close(got, torch.stack(alone))
    P.save_pretrained(tmp_path / "ours", config, weights)
    again = getattr(transformers, CLASSES[config.model_type]).from_pretrained(tmp_path / "ours")
    state = again.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert again.config.id2label == {int(i): name for i, name in LABELS.items()}


@pytest.mark.parametrize("case", [case for case in KNOWN if case.family not in OTHERS], ids=str)
def test_a_class_without_a_head_returns_hidden_states(case: Case, tmp_path: Path) -> None:
    """The folder of the ...Model of any decoder; with a head of its own in it, as in older files, logits."""
    model = model_of(case.values)
    model.base_model.save_pretrained(tmp_path)
    config, weights = P.load_pretrained(tmp_path)
    assert config == dataclasses.replace(case.config, head="none") == P.load_config(tmp_path)
    tokens = tokens_of(config, 2, 12, seed=seed_of(case))
    hidden = fnmodels.forward(weights, *fnmodels.prepare(config, tokens), config=config, kernel="math")
    with torch.no_grad():
        assert_close(hidden, model.base_model(input_ids=tokens, use_cache=False).last_hidden_state)
    P.save_pretrained(tmp_path / "ours", config, weights)
    assert P.load_config(tmp_path / "ours") == config
    again = type(model.base_model).from_pretrained(tmp_path / "ours").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.base_model.state_dict().items())


def test_an_older_file_of_a_class_without_a_head_may_have_one(tmp_path: Path) -> None:
    for name, head in (("llama", "lm"), ("llama_tied", "none")):
        (case,) = (case for case in cases() if case.name == name)
        P.save_pretrained(tmp_path / name, case.config, generic_params(case.config))
        values = json.loads((tmp_path / name / "config.json").read_text()) | {"architectures": ["LlamaModel"]}
        (tmp_path / name / "config.json").write_text(json.dumps(values))
        assert P.load_pretrained(tmp_path / name)[0] == dataclasses.replace(case.config, head=head)


@pytest.mark.parametrize("name", ["llama_tied", "gemma2"])
def test_scores_of_tokens_and_their_files(name: str, tmp_path: Path) -> None:
    (case,) = (case for case in cases() if case.name == name)
    kind = CLASSES[case.config.model_type].replace("Sequence", "Token")
    model = model_of(case.values | {"architectures": [kind], "id2label": LABELS})
    torch.nn.init.normal_(model.score.bias)
    save(model, tmp_path / "theirs")
    config, weights = P.load_pretrained(tmp_path / "theirs")
    assert (config.head, config.num_labels, len(weights["score_bias"])) == ("tokens", 3, 3)
    tokens = tokens_of(config, *ROWS.shape, seed=seed_of(case))
    got = fnmodels.forward(
        weights, *fnmodels.prepare(config, tokens, positions=positions_of(ROWS), segment_ids=ROWS), config=config
    )
    for row, segment in ((0, 1), (0, 2), (1, 1)):
        here = ROWS[row] == segment
        with torch.no_grad():
            assert_close(got[row, here], model(input_ids=tokens[row, here][None]).logits[0])
    P.save_pretrained(tmp_path / "ours", config, weights)
    state = getattr(transformers, kind).from_pretrained(tmp_path / "ours").state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


# Not named `case`, which would count as parity with transformers in docs/models.md: the reference is our own head.
@pytest.mark.parametrize("decoder", DECODERS, ids=str)
def test_nothing_between_the_norm_and_the_scores(decoder: Case) -> None:
    """For model types that transformers has no class for too: no factor, bias or soft-cap of logits."""
    config = dataclasses.replace(decoder.config, head="classification", num_labels=3)
    weights, language = generic_params(config), generic_params(decoder.config)
    tokens = tokens_of(config, *ROWS.shape, seed=seed_of(decoder))
    prepared = fnmodels.prepare(config, tokens, positions=positions_of(ROWS), segment_ids=ROWS)
    if "norm" in language:
        _, taps = fnmodels.forward(language, *prepared, config=decoder.config, taps=("final.norm",))
        normed = taps["final.norm"]
    else:  # a norm without a weight has no tap
        bare = dataclasses.replace(decoder.config, head="none")
        normed = fnmodels.forward(generic_params(bare), *prepared, config=bare)
    last = normed[[0, 0, 1], [11, 16, 17]].to(weights["score"].dtype)
    assert torch.equal(fnmodels.forward(weights, *prepared, config=config), last @ weights["score"].T)


def test_refusals() -> None:
    (case,) = (case for case in cases() if case.name == "llama")
    config = dataclasses.replace(case.config, head="classification", num_labels=1)
    packed = fnmodels.pack([torch.tensor([3, 4, 5])], 3)
    batch = packed.batch()
    with pytest.raises(ValueError, match="This loss is of tokens, but the model's head is 'classification'"):
        train.next_token_loss(generic_params(config), batch, config=config)
    with pytest.raises(fnmodels.errors.ConfigError, match="num_labels is 0; the head classification needs"):
        dataclasses.replace(case.config, head="classification")
    with pytest.raises(
        fnmodels.errors.ConfigError, match="head is 'masked_lm'; this family's must be one of lm, none, classification"
    ):
        dataclasses.replace(case.config, head="masked_lm")
    (wrapped,) = (case for case in cases() if case.name == "gemma4_wrapped")
    with pytest.raises(fnmodels.errors.ConfigError, match="'gemma4' cannot express this model's head, num_labels"):
        dataclasses.replace(wrapped.config, head="classification", num_labels=2).to_hf()
