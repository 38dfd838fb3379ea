"""Targets outside of the vocabulary, and tokens that are no ids: a sentence with the value, its place and the size."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
import params as P
import train
from fnmodels import bert
from fnmodels.embedding import Embedder
from tests.support.cases import batch_of, cases, generic_params, segments
from tests.support.encoder_losses import SETTINGS, SIZES, weights_of
from train.losses import logprobs
from train.losses.lm_head import head_loss
from train.losses.multi_token import look_ahead, mtp_loss

CASE = next(case for case in cases() if case.name == "llama")
MTP = replace(next(case for case in cases() if case.name == "deepseek_v3").config, num_nextn_predict_layers=1)
V = CASE.config.vocab_size


def batch(config: Any = CASE.config) -> dict[str, Tensor]:
    made = batch_of(config, segments((5, 4), (7, 2)))
    return made.batch()


def on_states(function: Callable[..., Any]) -> Callable[..., Any]:
    """A loss of one's own that gives `function` the hidden states."""

    def loss(params: Any, batch: Any, *, config: Any) -> Any:
        x = fnmodels.hidden(params, *fnmodels.prepare(config, batch["tokens"], length=24), config=config)
        return function(params, x, batch["labels"], config=config)

    return loss


def on_logits(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, batch, config: function(torch.zeros(*batch["labels"].shape, V), batch["labels"])


TEXT_LOSSES: dict[str, Callable[..., Any]] = {
    "next_token": train.next_token_loss,
    "unchunked": functools.partial(train.next_token_loss, chunk=None),
    "logprobs": train.token_logprobs,
    "policy": lambda params, batch, config: train.logprob_loss(
        lambda logp, entropy, batch: (logp.sum(), torch.tensor(logp.numel())), config=config
    )(params, batch),
    "distill": lambda params, batch, config: train.distill(params, batch, config=config, teacher=params),
    "head_loss": on_states(head_loss),
    "head_logprobs": on_states(logprobs.head_logprobs),
    "cross_entropy": on_logits(train.cross_entropy),
    "logprobs_of_logits": on_logits(logprobs.logprobs),
}


def refused(run: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as error:
        run()
    return str(error.value)


@pytest.mark.parametrize("value", [V, V + 10**9, -1, -99, -101])
@pytest.mark.parametrize("name", TEXT_LOSSES)
def test_label_outside_the_vocabulary_is_named(name: str, value: int) -> None:
    params, given = generic_params(CASE.config), batch()
    given["labels"] = given["labels"].clone()
    given["labels"][1, 3] = value
    said = refused(lambda: TEXT_LOSSES[name](params, given, config=CASE.config))
    assert said.startswith(f"labels[1, 3] is {value}, but the vocabulary has {V} entries, 0 to {V - 1};")


@pytest.mark.parametrize("mapped", [False, True])
def test_label_outside_the_vocabulary_is_named_under_transforms(mapped: bool) -> None:
    given = batch()
    given["labels"] = torch.full_like(given["labels"], V)

    def loss(params: Any, batch: Any) -> Tensor:
        found: Tensor = train.next_token_loss(params, batch, config=CASE.config, kernel="math")[0]
        return found

    run = torch.func.grad(loss)
    if mapped:
        run, given = torch.func.vmap(run, (None, 0)), fnmodels.rows(given)
    said = refused(lambda: run(generic_params(CASE.config), given))
    assert re.match(rf"labels\[[\d, ]+\] is {V}, but the vocabulary has {V} entries", said)


def test_label_of_a_further_token_is_named() -> None:
    given = look_ahead(batch(MTP), 1)
    given["next_labels"][0, 2, 0] = -3
    said = refused(lambda: mtp_loss(generic_params(MTP), given, config=MTP))
    assert said.startswith("next_labels[0, 2, 0] is -3, but the vocabulary has ")


@pytest.mark.parametrize(
    ("name", "entry", "value", "message"),
    [
        ("classification", "labels", 4, "is 4, but the set of classes has 4 entries, 0 to 3"),
        ("classification", "labels", -2, "is -2, but the set of classes has 4 entries, 0 to 3"),
        ("shared", "labels", 4, "is 4, but the set of classes has 4 entries, 0 to 3"),
        ("pictures", "labels", 3, "is 3, but the set of classes has 3 entries, 0 to 2"),
        ("pairs", "labels", 64, "is 64, but the vocabulary has 64 entries, 0 to 63"),
        ("sound", "labels", -1, "is -1, but the vocabulary has 64 entries, 0 to 63"),
        ("bert", "labels", 64, "is 64, but the vocabulary has 64 entries, 0 to 63"),
        ("none", "labels", -2, "is -2, but it must be 0 or more"),
        ("none", "roles", -1, "is -1, but it must be 0 or more"),
        ("images", "labels", -7, "is -7, but it must be 0 or more"),
        ("siglip", "labels", -7, "is -7, but it must be 0 or more"),
    ],
)
def test_target_of_other_losses_is_named(name: str, entry: str, value: int, message: str) -> None:
    config, loss, halves = SETTINGS[name]()
    given = {**halves[0], entry: halves[0][entry].clone()}
    given[entry][0, 1] = value
    said = refused(lambda: loss(weights_of(config), given))
    assert said.startswith(f"{entry}[0, 1] {message}")


def test_class_of_a_token_is_named() -> None:
    config = bert.Config(vocab_size=64, max_position_embeddings=16, head="tokens", num_labels=3, **SIZES)
    given = train.document_batch([[3, 4, 5]], 4, labels=[1])
    given["labels"][0, 2] = 3
    said = refused(lambda: train.losses.token_classification_loss(P.init(config, 0), given, config=config))
    assert said.startswith("labels[0, 2] is 3, but the set of classes has 3 entries, 0 to 2")


def test_labels_that_a_loss_does_not_read_are_not_checked() -> None:
    """A critic's batch has the labels of its policy."""
    config, params = P.new_head(CASE.config, generic_params(CASE.config), head="tokens", num_labels=1)
    assert train.losses.values.token_values(params, batch(), config=config).shape == (2, 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.complex64])
def test_tokens_that_are_no_integers_are_refused(dtype: torch.dtype) -> None:
    params, given = generic_params(CASE.config), batch()
    prepared = fnmodels.prepare(CASE.config, given["tokens"], length=24)
    wrong = given["tokens"].to(dtype)
    said = refused(lambda: fnmodels.prepare(CASE.config, wrong))
    assert said == f"tokens are {str(dtype)[6:]} [2, 9]: ids [B, S] are integers, and vectors [B, S, D] are floating."
    said = refused(lambda: fnmodels.forward(params, wrong, *prepared[1:], config=CASE.config))
    assert said == f"Token ids [B, S] are integers, not {dtype}; vectors [B, S, D] are floating."
    said = refused(lambda: train.next_token_loss(params, given | {"tokens": wrong}, config=CASE.config))
    assert said.startswith(f"tokens are {str(dtype)[6:]} [2, 9]")
    cache = fnmodels.init_cache(CASE.config, 2, 9, length=24)
    assert refused(lambda: fnmodels.prepare_step(CASE.config, wrong, cache)).startswith("tokens are ")


def test_vectors_of_integers_are_refused() -> None:
    said = refused(lambda: fnmodels.prepare(CASE.config, torch.ones(1, 3, 32, dtype=torch.int64)))
    assert said.startswith("tokens are int64 [1, 3, 32]: ids [B, S] are integers")


def test_decoder_tokens_that_are_no_integers_are_refused() -> None:
    config, loss, halves = SETTINGS["pairs"]()
    wrong = halves[0] | {"decoder_tokens": halves[0]["decoder_tokens"].float()}
    assert refused(lambda: loss(weights_of(config), wrong)).startswith("decoder_tokens are float32 [")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.uint16])
def test_token_ids_of_any_integer_type_are_read(dtype: torch.dtype) -> None:
    params, tokens = generic_params(CASE.config), batch()["tokens"]
    inputs, *rest = fnmodels.prepare(CASE.config, tokens, length=24)
    wanted = fnmodels.forward(params, inputs, *rest, config=CASE.config)
    prepared = fnmodels.prepare(CASE.config, tokens.to(dtype), length=24)
    assert torch.equal(fnmodels.forward(params, *prepared, config=CASE.config), wanted)
    assert torch.equal(fnmodels.forward(params, tokens.to(dtype), *rest, config=CASE.config), wanted)


def test_documents_to_embed_are_ids() -> None:
    config = bert.Config(vocab_size=64, max_position_embeddings=16, head="none", **SIZES)
    said = refused(
        lambda: fnmodels.embed_documents(
            P.init(config, 0), [torch.tensor([1.5, 2.0])], config=config, embedder=Embedder(("mean",))
        )
    )
    assert "token ids are integers" in said


@pytest.mark.parametrize(
    "prompt", [[1.5, 2.0], [True, False], torch.tensor([True, True]), torch.tensor([1.0, 2.0]), ["a"]]
)
def test_prompts_that_are_no_ids_are_refused(prompt: Any) -> None:
    said = refused(lambda: train.generate(generic_params(CASE.config), CASE.config, [prompt], max_new=2))
    assert said.startswith("Token 0 of the prompt of request 0 is ") and f"integers from 0 to {V - 1}" in said
