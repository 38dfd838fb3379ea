"""A resized vocabulary: the old tokens' logits are unchanged, new ones get the mean or given values."""

import copy
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.errors import UnsupportedError
from fnmodels.models.common.family import field_of
from params import lora
from tests.support.cases import cases, generic, generic_params, richest
from tests.support.image_texts import image_cases
from tests.support.oracle import model_of, params_of

MODELS = [case for case in richest(lambda case: case.family) if hasattr(case.config, "vocab_size")]


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_every_model_takes_more_and_fewer_tokens(case: Any) -> None:
    config, params = case.config, generic_params(case.config)
    tokens = torch.arange(10).view(1, 10)
    if field_of(config, "ngram_size"):
        with pytest.raises(UnsupportedError, match="embeds n-grams by a hash that depends on the number of tokens"):
            P.resize_vocab(config, params, config.vocab_size + 3)
        return
    if hasattr(config, "embedding_rows"):
        with pytest.raises(UnsupportedError, match="rows beyond those of its head"):
            P.resize_vocab(config, params, config.vocab_size + 3)
        return
    wide, larger = P.resize_vocab(config, params, config.vocab_size + 3)
    assert P.count(wide) > P.count(config) and tree.flatten(larger).keys() == tree.flatten(params).keys()
    mean = params["embed_tokens"].mean(0)
    assert torch.allclose(larger["embed_tokens"][-3:], mean.expand(3, -1))
    narrow, again = P.resize_vocab(wide, larger, config.vocab_size)
    assert narrow == config
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(again), tree.leaves(params), strict=True))
    if fnmodels.family_of(config).__name__.rpartition(".")[2] in ("t5", "whisper"):
        return
    one, more = (
        fnmodels.forward(p, *fnmodels.prepare(c, tokens, length=16), config=c, kernel="math")
        for c, p in ((config, params), (wide, larger))
    )
    assert more.shape[-1] in (one.shape[-1], one.shape[-1] + 3)
    torch.testing.assert_close(more[..., : one.shape[-1]], one, rtol=1e-5, atol=1e-5)


def test_transformers_has_the_same_model() -> None:
    """By its own resizing, which draws new rows around the mean: here they are given."""
    case = next(case for case in cases() if case.name == "llama")
    model: Any = copy.deepcopy(model_of(case.values))
    params, size = params_of(model, case.config), case.config.vocab_size + 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.resize_token_embeddings(size)
    new = {"embed_tokens": model.model.embed_tokens.weight[-2:], "lm_head": model.lm_head.weight[-2:]}
    config, ours = P.resize_vocab(case.config, params, size, rows={name: rows.detach() for name, rows in new.items()})
    tokens = torch.tensor([[3, size - 1, 5, size - 2]])
    with torch.no_grad():
        theirs = model(input_ids=tokens).logits
    found = fnmodels.forward(ours, *fnmodels.prepare(config, tokens), config=config, kernel="math")
    torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-4)


def test_adapters_with_new_tokens_fit_a_resized_base(tmp_path: Path) -> None:
    """PEFT saves a resized embedding beside the adapters; the error says how to read it."""
    case = next(case for case in cases() if case.name == "llama_tied")
    params, size = params_of(model_of(case.values), case.config), case.config.vocab_size + 2
    model: Any = copy.deepcopy(model_of(case.values))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.resize_token_embeddings(size)
        with torch.no_grad():
            model.model.embed_tokens.weight.copy_(generic("new", model.model.embed_tokens.weight))
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        adapted.save_pretrained(tmp_path, save_embedding_layers=True)
    with pytest.raises(P.MismatchError, match=rf"resize_vocab\(config, params, {size}\)"):
        lora.load_adapters(tmp_path, case.config, params)
    config, resized = P.resize_vocab(case.config, params, size)
    ours = lora.load_adapters(tmp_path, config, resized)
    tokens = torch.tensor([[3, size - 1, 5, size - 2]])
    with torch.no_grad():
        theirs = adapted.eval()(input_ids=tokens).logits
    found = fnmodels.forward(ours, *fnmodels.prepare(config, tokens), config=config, kernel="math")
    torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-4)


def test_a_reader_of_images_has_the_vocabulary_of_its_text() -> None:
    for case in image_cases():
        wide, params = P.resize_vocab(case.config, case.params(), case.config.text.vocab_size + 1)
        assert wide.text.vocab_size == case.config.text.vocab_size + 1
        assert {path: leaf.shape for path, leaf in tree.flatten(params).items()} == {
            path: torch.Size(leaf.shape) for path, leaf in tree.flatten(fnmodels.family_of(wide).spec(wide)).items()
        }


def test_mistakes_are_named() -> None:
    config = next(case.config for case in cases() if case.name == "llama")
    params, size = generic_params(config), config.vocab_size + 2
    with pytest.raises(ValueError, match="size is 0"):
        P.resize_vocab(config, params, 0)
    with pytest.raises(ValueError, match=r"rows of embed_tokens is \[3, 32\]; it must be \[2, 32\]"):
        P.resize_vocab(config, params, size, rows=torch.zeros(3, 32))
    with pytest.raises(ValueError, match="rows names 'norm'"):
        P.resize_vocab(config, params, size, rows={"norm": torch.zeros(2, 32)})
    for rows in ("zeros", None, 5, [[0.0] * 32] * 2):
        with pytest.raises(ValueError, match=r"rows is .*; it is \"mean\", a tensor \[new tokens, D\]"):
            P.resize_vocab(config, params, size, rows=rows)
    with pytest.raises(ValueError, match="rows of embed_tokens is a list; it must be a tensor"):
        P.resize_vocab(config, params, size, rows={"embed_tokens": [[0.0] * 32] * 2})
    with pytest.raises(ValueError, match="hold adapters"):
        P.resize_vocab(config, lora.add(config, params, rank=2), size)
    with pytest.raises(P.UnsupportedError, match="embed_tokens is a"):
        P.resize_vocab(config, {**params, "embed_tokens": object()}, size)
