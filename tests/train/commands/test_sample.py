import json

import pytest
import torch

import fnmodels
import params as P
from fnmodels import llama
from train.commands.sample import main
from train.data import tokenizer
from train.eval.generate import continuation, sample_token

CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 12,
    "initializer_range": 0.5,
    "eos_token_id": 0,
}


@pytest.fixture(scope="module")
def model():
    config = llama.Config.from_hf(CONFIG)
    return config, P.init(config, 0)


@pytest.fixture
def checkpoint(tmp_path, model):
    P.save_pretrained(tmp_path / "model", *model)
    tokenizer.train_tokenizer(["some text to learn from, é\n" * 9], 280).save(
        str(tmp_path / "model" / "tokenizer.json")
    )
    return tmp_path / "model"


def test_at_temperature_0_each_token_is_the_best_one(model):
    config, params = model
    ids = [5, 6, 7]
    for token in continuation(params, config, ids, tokens=5, temperature=0):
        with torch.no_grad():
            logits = fnmodels.forward(params, *fnmodels.prepare(config, torch.tensor([ids])), config=config)
        assert token == int(logits[0, -1].argmax())
        ids = [*ids, token]


def test_a_seed_fixes_the_draws_and_the_context_is_cut_to_what_the_model_knows(model):
    config, params = model
    draw = lambda seed: list(continuation(params, config, [1] * 30, tokens=20, temperature=2.0, seed=seed))  # noqa: E731
    assert draw(1) == draw(1) != draw(2)
    short = list(continuation(params, config, [1] * 12, tokens=1, temperature=0))
    assert list(continuation(params, config, [9] * 50 + [1] * 12, tokens=1, temperature=0)) == short


def test_only_the_best_k_are_drawn_and_an_end_stops(model):
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.0, 3.0, 2.0, -1.0, 2.5])
    assert {sample_token(logits, 1.0, 3, generator) for _ in range(200)} == {1, 2, 4}
    assert {sample_token(logits, 0.5, 1, generator) for _ in range(20)} == {1}
    assert {sample_token(logits, 5.0, None, generator) for _ in range(400)} == {0, 1, 2, 3, 4}
    assert sample_token(logits, 0, 3, generator) == 1
    config, params = model
    first = next(continuation(params, config, [3], tokens=1, temperature=0))
    assert list(continuation(params, config, [3], tokens=5, temperature=0, end=[first])) == []
    with pytest.raises(ValueError, match="ids is empty"):
        next(continuation(params, config, [], tokens=1))


def test_the_command_prints_the_prompt_and_what_follows(checkpoint, capsys):
    assert main([str(checkpoint), "--prompt", "some é", "--tokens", "8", "--seed", "3"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("some é")
    assert main([str(checkpoint), "--prompt", "some é", "--tokens", "8", "--seed", "3"]) == 0
    assert capsys.readouterr().out == first


def test_mistakes_are_sentences(checkpoint, tmp_path, capsys):
    def said(*arguments):
        assert main([str(argument) for argument in arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("python -m train.sample: ")
        assert error.count("\n") == 1
        return error

    assert "no such checkpoint folder" in said(tmp_path / "absent", "--prompt", "a")
    assert "--prompt" in said(checkpoint)
    assert "'-1' is not a number from 0" in said(checkpoint, "--prompt", "a", "--temperature", "-1")
    assert "'nan' is not a number" in said(checkpoint, "--prompt", "a", "--temperature", "nan")
    assert "--top-k" in said(checkpoint, "--prompt", "a", "--top-k", "0")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"model_type": "mamba2"}))
    assert "mamba2" in said(checkpoint, "--prompt", "a")
    (checkpoint / "config.json").write_text("{")
    assert "not valid JSON" in said(checkpoint, "--prompt", "a") or "not JSON" in said(checkpoint, "--prompt", "a")
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "tokenizer.json").unlink()
    assert "no tokenizer.json" in said(checkpoint, "--prompt", "a")


def test_a_vocabulary_that_does_not_fit_the_model_is_refused(checkpoint, capsys):
    tokenizer.train_tokenizer([f"word{i} " * 3 for i in range(400)], 500).save(str(checkpoint / "tokenizer.json"))
    assert main([str(checkpoint), "--prompt", "word399"]) == 2
    assert "vocabulary has 300 entries" in capsys.readouterr().err
