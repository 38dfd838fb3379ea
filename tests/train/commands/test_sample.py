import io
import json

import pytest
import torch
from tokenizers import Tokenizer, models

import fnmodels
import params as P
import train
from fnmodels import llama
from fnmodels.errors import UserError
from train.commands.sample import main
from train.data import tokenizer
from train.data.chat import render
from train.data.turns.marks import END
from train.eval.pretrained import generation_defaults, load_tokenizer
from train.generation import compile_choice
from train.generation.sampling import Sampling
from train.generation.text import complete, fitted, prompt_ids

CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 40,
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


def _greedy(model, ids, new):
    config, params = model
    found = list(ids)
    for _ in range(new):
        with torch.no_grad():
            logits = fnmodels.forward(params, *fnmodels.prepare(config, torch.tensor([found])), config=config)
        found.append(int(logits[0, -1].argmax()))
        if found[-1] == 0:
            break
    return found


def test_the_command_streams_the_prompt_and_what_follows(checkpoint, model, capsys, monkeypatch):
    written = []
    monkeypatch.setattr("sys.stdout.write", written.append, raising=False)
    assert main([str(checkpoint), "--prompt", "some é", "--tokens", "8", "--temperature", "0"]) == 0
    encoder = load_tokenizer(checkpoint)
    ids = encoder.encode("some é").ids
    assert "".join(written) == encoder.decode(_greedy(model, ids, 8)) + "\n"
    assert len([piece for piece in written if piece]) > 4


def test_a_seed_fixes_the_draws(checkpoint, capsys):
    def drawn(*more):
        assert main([str(checkpoint), "--prompt", "some é", "--tokens", "12", *more]) == 0
        return capsys.readouterr().out

    assert drawn("--seed", "3") == drawn("--seed", "3") != drawn("--seed", "4")
    assert drawn("--top-k", "1") == drawn("--temperature", "0") == drawn("--top-p", "0.000001")
    assert drawn("--temperature", "0", "--repetition-penalty", "50") != drawn("--temperature", "0")
    greedy = drawn("--temperature", "0").removeprefix("some é").rstrip("\n")
    assert drawn("--temperature", "0", "--stop", greedy[3:5]) == f"some é{greedy[: greedy.index(greedy[3:5])]}\n"


def test_compiled_steps_and_int8_caches(checkpoint, capsys, monkeypatch):
    def drawn(*more):
        assert main([str(checkpoint), "--prompt", "some é", "--tokens", "12", "--temperature", "0", *more]) == 0
        return capsys.readouterr().out

    # What is compiled, to files too, is compared in tests/contract.
    monkeypatch.setattr(compile_choice, "saved_step", lambda *_, **options: None)
    steps, real = [], fnmodels.compiled_step
    monkeypatch.setattr(fnmodels, "compiled_step", lambda *args, **options: steps.append(1) or real(*args, **options))
    with torch.compiler.set_stance("force_eager"):
        assert drawn("--compile") == drawn() and drawn("--kv-dtype", "int8")
    assert len(steps) == 1


def test_several_prompts_are_answered_in_their_order(checkpoint, capsys):
    assert main([str(checkpoint), "--prompt", "some", "--tokens", "5"]) == 0
    alone = capsys.readouterr().out
    assert main([str(checkpoint), "--prompt", "some", "--prompt", "text to", "--tokens", "5", "--slots", "1"]) == 0
    first, second = capsys.readouterr().out.split("--- 2 of 2\n")
    assert first == f"--- 1 of 2\n{alone}\n" and second.startswith("text to")


def test_files_of_prompts(checkpoint, tmp_path, capsys):
    lines = [{"prompt": "some", "id": 1}, {"prompt": "text"}, {"prompt": "é"}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    flags = ["--prompts", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", "--tokens", "6", "--samples", "2"]
    assert main([str(value) for value in (checkpoint, *flags, "--slots", 2)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["sample"]) for row in rows] == [(x["prompt"], i) for x in lines for i in range(2)]
    assert rows[0]["id"] == 1 and all(len(row["tokens"]) == len(row["logp"]) <= 6 for row in rows)
    assert rows[0]["tokens"] != rows[1]["tokens"]
    assert "6/6 answers" in capsys.readouterr().err
    encoder = load_tokenizer(checkpoint)
    for row in rows:
        kept = row["tokens"][:-1] if row["reason"] == "stop_id" else row["tokens"]
        assert row["prompt"] + row["text"] == encoder.decode(encoder.encode(row["prompt"]).ids + kept)


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def test_a_chat_keeps_its_history(checkpoint, capsys, monkeypatch):
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    seen = []

    def spy(template, messages, **options):
        marked = any(END in message["content"] for message in messages)  # to prove that short texts are written
        seen.extend([] if marked else [list(messages)])
        return render(template, messages, **options)

    monkeypatch.setattr("train.data.chat.render", spy)
    monkeypatch.setattr("sys.stdin", io.StringIO("some\n\ntext\n"))
    assert main([str(checkpoint), "--chat", "--system", "é", "--tokens", "4", "--temperature", "0"]) == 0
    first, second = (part for part in capsys.readouterr().out.split("> ") if part.strip())
    assert [message["content"] for message in seen[1]] == ["é", "some", first.rstrip("\n"), "text"]
    assert [message["role"] for message in seen[1]] == ["system", "user", "assistant", "user"]
    assert main([str(checkpoint), "--chat", "--prompt", "some", "--tokens", "4", "--temperature", "0"]) == 0
    assert second and capsys.readouterr().out and seen[2] == [{"role": "user", "content": "some"}]


def test_generation_config_says_how_and_flags_override_it(checkpoint, capsys):
    path = checkpoint / "generation_config.json"

    def defaults(**values):
        path.write_text(json.dumps(values))
        return generation_defaults(checkpoint)

    assert defaults(eos_token_id=0).sampling is None
    assert defaults(do_sample=False, temperature=0.6, max_new_tokens=3).sampling == Sampling(temperature=0.0)
    assert defaults(do_sample=True, temperature=0.6, top_p=0.9).sampling == Sampling(0.6, 50, 0.9)
    assert defaults(do_sample=True, top_k=0, repetition_penalty=1.2).sampling == Sampling(repetition=1.2)
    assert defaults(num_beams=4, typical_p=1.0, length_penalty=1.0).unused == ("num_beams",)
    with pytest.raises(UserError, match="temperature is -1"):
        defaults(do_sample=True, temperature=-1)
    assert defaults(do_sample=False, max_new_tokens=3, no_repeat_ngram_size=2).max_new == 3
    assert main([str(checkpoint), "--prompt", "some"]) == 0
    printed = capsys.readouterr()
    assert "no_repeat_ngram_size: not applied" in printed.err
    path.unlink()
    assert main([str(checkpoint), "--prompt", "some", "--temperature", "0", "--tokens", "3"]) == 0
    assert capsys.readouterr().out == printed.out


def test_a_text_is_completed_within_the_context(checkpoint, model):
    config, params = model
    encoder = load_tokenizer(checkpoint)
    ids = encoder.encode("some text to learn from, é\n" * 9).ids
    assert len(ids) > 40
    assert fitted(config, ids, 10) == (ids[-30:], 10)
    assert fitted(config, ids, 100) == (ids[-20:], 20)
    assert fitted(config, ids[:5], 100) == (ids[:5], 35)
    with pytest.raises(UserError, match="the prompt is empty"):
        prompt_ids(Tokenizer(models.BPE()), "")
    text = complete(params, config, encoder, "some é", (), tokens=5, sampling=Sampling(temperature=0))
    found = train.generate(params, config, [encoder.encode("some é").ids], max_new=5, sampling=Sampling(temperature=0))
    assert text == encoder.decode(encoder.encode("some é").ids + found.tokens[0])


def test_mistakes_are_sentences(checkpoint, tmp_path, capsys):
    def said(*arguments):
        assert main([str(argument) for argument in arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("python -m train.sample: ")
        assert error.count("\n") == 1
        return error

    assert "no such checkpoint folder" in said(tmp_path / "absent", "--prompt", "a")
    assert "nothing to answer" in said(checkpoint)
    assert "both" in said(checkpoint, "--prompt", "a", "--prompts", "b")
    assert "--system" in said(checkpoint, "--prompt", "a", "--system", "b")
    assert "--out" in said(checkpoint, "--chat", "--out", "b")
    assert "--compile is for" in said(checkpoint, "--chat", "--compile")
    assert "no chat template" in said(checkpoint, "--chat", "--prompt", "a")
    for line, words in (
        ("{", "line 1 is not JSON"),
        ("[1]", "line 1 must be"),
        ('{"messages": []}', "line 1 must be"),
        ('{"prompt": "a", "system": "b"}', "line 1: 'system' stands beside the turns"),
    ):
        (tmp_path / "in.jsonl").write_text(line)
        assert words in said(checkpoint, "--prompts", tmp_path / "in.jsonl")
    assert "'2' is not a number above 0 and at most 1" in said(checkpoint, "--prompt", "a", "--top-p", "2")
    assert "'-1' is not a number from 0" in said(checkpoint, "--prompt", "a", "--temperature", "-1")
    assert "'nan' is not a number" in said(checkpoint, "--prompt", "a", "--temperature", "nan")
    assert "--top-k" in said(checkpoint, "--prompt", "a", "--top-k", "-1")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"model_type": "rwkv"}))
    assert "rwkv" in said(checkpoint, "--prompt", "a")
    (checkpoint / "config.json").write_text("{")
    assert "not valid JSON" in said(checkpoint, "--prompt", "a") or "not JSON" in said(checkpoint, "--prompt", "a")
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "tokenizer.json").unlink()
    assert "no tokenizer.json" in said(checkpoint, "--prompt", "a")


def test_a_vocabulary_that_does_not_fit_the_model_is_refused(checkpoint, capsys):
    tokenizer.train_tokenizer([f"word{i} " * 3 for i in range(400)], 500).save(str(checkpoint / "tokenizer.json"))
    assert main([str(checkpoint), "--prompt", "word399"]) == 2
    assert "vocabulary has 300 entries" in capsys.readouterr().err
