"""Tests of the lm-evaluation-harness adapter, offline, against direct log-probs and the harness's `hf` model."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import fnmodels
import params as P
from fnmodels import llama
from fnmodels.errors import UserError
from tests.support.cases import generic_params
from tests.train.eval.test_scoring import direct
from train.commands import tasks
from train.generation.requests import Request

CONFIG = llama.Config(260, 32, 48, 2, 4, 2, max_position_embeddings=24, tie_word_embeddings=True)
QUESTIONS = [
    {"question": "One and one are", "choices": [" two", " three things", " 1"], "answer": 0, "line": "x"},
    {"question": "Ice is", "choices": [" cold", " hot", " a stone"], "answer": 2, "line": "y"},
    {"question": "a much longer question than the model can take at once, so", "choices": [" yes", " no", " so"]}
    | {"answer": 1, "line": "z"},
]
LONG = "A text that is longer than one window of the model, by far: " + "ab " * 12
TEXTS = [{"text": "A short text."}, {"text": LONG}]


def _tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<bos>", "<eos>", "<end>"])
    return made


def _write(path: Path, tokenizer: Tokenizer, **named: str) -> Path:
    P.save_pretrained(path, CONFIG, generic_params(CONFIG))
    tokenizer.save(str(path / "tokenizer.json"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"bos_token_id": 256, "eos_token_id": 257}))
    if named:
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (path / "tokenizer_config.json").write_text(json.dumps(kind | named))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(tmp_path_factory.mktemp("checkpoint"), _tokenizer())


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    pytest.importorskip("lm_eval")
    from train.eval.harness import Checkpoint

    return Checkpoint(folder)


@pytest.fixture
def own_tasks(tmp_path: Path) -> Path:
    for name, rows in (("questions", QUESTIONS), ("texts", TEXTS)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write(name: str, data: str, **more: Any) -> None:
        source = {"test": str(tmp_path / f"{data}.jsonl")}
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": source}, "test_split": "test"}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task | more))  # JSON is YAML

    choice = {"doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
    write("own_choice", "questions", output_type="multiple_choice", **choice, metric_list=[{"metric": "acc"}])
    rolling = [{"metric": "bits_per_byte"}]
    write("own_texts", "texts", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}")
    task = json.loads((tmp_path / "own_texts.yaml").read_text())
    (tmp_path / "own_texts.yaml").write_text(json.dumps(task | {"metric_list": rolling}))
    answer = {"doc_to_text": "{{question}}", "doc_to_target": "{{line}}", "metric_list": [{"metric": "exact_match"}]}
    kwargs = {"until": ["\n"], "max_gen_toks": 4, "do_sample": False, "temperature": 0.0}
    write("own_answer", "questions", output_type="generate_until", generation_kwargs=kwargs, **answer)
    return tmp_path


def _ids(text: str) -> list[int]:
    return _tokenizer().encode(text).ids


def _logp(context: list[int], continuation: list[int]) -> float:
    kept = [*context, *continuation][-(CONFIG.max_position_embeddings + 1) :]
    return direct(generic_params(CONFIG), CONFIG, kept[: len(kept) - len(continuation)], continuation)[0]


@pytest.mark.slow
def test_the_harness_gets_our_numbers(
    folder: Path, model: Any, own_tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: Any
) -> None:
    """The command on all three kinds of request, without a network."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    out = tmp_path / "results.json"
    given = [str(folder), "--include", str(own_tasks), "--out", str(out), "--tasks", "own_choice,own_texts,own_answer"]
    assert tasks.main(given) == 0, capsys.readouterr().err
    found = json.loads(out.read_text())
    chosen = [
        max(range(3), key=lambda i, row=row: _logp(_ids(row["question"]), _ids(row["choices"][i]))) for row in QUESTIONS
    ]
    right = sum(pick == row["answer"] for pick, row in zip(chosen, QUESTIONS, strict=True))
    assert found["own_choice"]["acc,none"] == pytest.approx(right / 3)
    nats, size = 0.0, 0
    for row in TEXTS:
        ids, window = _ids(row["text"]), CONFIG.max_position_embeddings
        size += len(row["text"].encode())
        for begin in range(0, len(ids), window):  # as many tokens before each window as fit beside it
            part = ids[begin : begin + window]
            before = ids[max(0, begin + len(part) - window - 1) : begin] if begin else [256]
            nats += _logp(before, part)
    assert found["own_texts"]["bits_per_byte,none"] == pytest.approx(-nats / math.log(2) / size, rel=1e-5)
    assert 0 <= found["own_answer"]["exact_match,none"] <= 1
    assert "own_choice" in capsys.readouterr().out


class _Request:
    def __init__(self, *args: Any) -> None:
        self.args = args


def test_log_likelihoods_are_those_of_one_text(model: Any) -> None:
    pairs = [("One and", " one"), ("spaces go over ", "there"), ("", "from nothing"), ("  ", "x")]
    found = model.loglikelihood([_Request(*pair) for pair in pairs])
    wanted = [
        (_ids("One and"), _ids(" one")),
        (_ids("spaces go over"), _ids(" there")),
        ([256], _ids("from nothing")),
        ([256], _ids("  x")),
    ]
    assert [logp for logp, _ in found] == pytest.approx([_logp(*pair) for pair in wanted], rel=1e-5)


@pytest.mark.parametrize("as_harness", [False, True])
def test_rolled_texts_begin_once_unless_the_harnesss_number_is_asked_for(as_harness: bool, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from train.eval.harness import Checkpoint

    tokenizer = _tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A <eos>", None, [("<bos>", 256), ("<eos>", 257)])
    model = Checkpoint(_write(tmp_path, tokenizer, bos_token="<bos>", eos_token="<eos>"), as_harness=as_harness)
    targets = [256, *_ids("One"), 257] if as_harness else _ids("One")
    assert model.loglikelihood_rolling([_Request("One")]) == pytest.approx([_logp([256], targets)], rel=1e-5)


def answer(model: Any, settings: dict[str, Any]) -> str:
    (text,) = model.generate_until([_Request("Ice is", settings)], disable_tqdm=True)
    return str(text)


def test_answers_are_the_likeliest_tokens_up_to_a_stop(model: Any) -> None:
    params, ids = generic_params(CONFIG), _ids("Ice is")
    new: list[int] = []
    for _ in range(6):
        row = fnmodels.prepare(CONFIG, torch.tensor([(ids + new)[-CONFIG.max_position_embeddings :]]))
        new.append(int(fnmodels.forward(params, *row, config=CONFIG, kernel="math")[0, -1].argmax()))
        if new[-1] == 257:
            new.pop()
            break
    text = _tokenizer().decode(new)
    assert len(text) > 2
    settings = {"until": [], "max_gen_toks": 6, "do_sample": False}
    assert model.generate_until([_Request("Ice is", settings)]) == [text]
    stop = text[1]
    assert answer(model, settings | {"until": [stop]}) == text[: text.index(stop)]
    assert answer(model, settings | {"until": stop, "temperature": 0.0}) == text[: text.index(stop)]
    drawn = {"do_sample": True, "temperature": 0.9, "top_k": 5, "max_gen_toks": 3}
    assert answer(model, drawn) == answer(model, drawn)
    assert answer(model, settings | {"top_p": 0.5}) == text  # which says nothing of the likeliest
    assert answer(model, drawn | {"top_p": 1e-6}) == answer(model, settings | {"max_gen_toks": 3})
    with pytest.raises(UserError, match="the task also sets typical_p"):
        answer(model, drawn | {"typical_p": 0.5})
    with pytest.raises(UserError, match=r"max_gen_toks 256 .* takes 24 tokens"):
        answer(model, {"until": ["x"]})


def test_a_request_that_is_there_several_times_is_drawn_several_times(model: Any) -> None:
    """As tasks do that take the best or the most frequent of many answers."""
    drawn = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 6}
    found = model.generate_until([_Request("Ice is", drawn)] * 8)
    assert len(set(found)) > 4
    assert found == model.generate_until([_Request("Ice is", drawn)] * 8)
    warm = {"temperature": 1.0, "max_gen_toks": 6}  # a temperature alone says to draw
    assert model.generate_until([_Request("Ice is", warm)] * 8) == found


def test_requests_are_answered_alike_alone_and_together(model: Any) -> None:
    """Contexts of all lengths, settings and stops in one batch, more than it has rows."""
    settings = [{"max_gen_toks": 5, "do_sample": False}, {"max_gen_toks": 9, "temperature": 1.3, "until": ["a"]}]
    texts = ["Ice", "Ice is", "a much longer question than fits, so that it is cut from the left", "", "x"]
    requests = [_Request(text, settings[i % 2]) for i, text in enumerate(texts * 3)]
    found = model.generate_until(requests, disable_tqdm=True)
    rows, model.batch_tokens = model.batch_tokens, 30
    try:
        assert model.generate_until(requests, disable_tqdm=True) == found
    finally:
        model.batch_tokens = rows
    assert [model.generate_until([request], disable_tqdm=True) for request in requests[:1]] == [found[:1]]


def test_a_special_token_stops_an_answer(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although decoded answers do not contain it."""
    ids = iter([*_ids("so"), 258, *_ids("far")])

    def next_of(logits: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(logits).index_fill(-1, torch.tensor([next(ids)]), 1.0)

    eager_step = fnmodels.cache.eager_step

    def stepped(*args: Any, **how: Any) -> Any:
        step = eager_step(*args, **how)

        def one(*tensors: Any, **given: Any) -> Any:
            logits, cache = step(*tensors, **given)
            return next_of(logits), cache

        return one

    monkeypatch.setattr(fnmodels.cache, "eager_step", stepped)
    assert answer(model, {"until": ["<end>"], "max_gen_toks": 6}) == "so"
    assert next(ids) == _ids("far")[0]


def test_an_answer_that_ends_within_a_character_keeps_the_others(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tokens are bytes, as for Korean in Llama 2's tokenizer; the harness's model loses all of them."""
    tokenizer = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, []))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    monkeypatch.setattr(model, "_tokenizer", tokenizer)
    ids = list("안녕하".encode()[:-1])
    assert model._text(Request([1], 9, stop_texts=("하",)), ids) == "안녕" + "\ufffd" * 2
    assert model._text(Request([1], 9, stop_texts=("녕",)), ids) == "안"
    monkeypatch.setattr(model, "_ids", dataclasses.replace(model._ids, as_harness=True))
    assert model._text(Request([1], 9), ids) == tokenizer.decode(ids) == "\ufffd" * 8


WORDS = "cold", "ice", "is", "one", "and", "two", "three", "times", "a", "stone", "that", "falls"
TURNS = """\
{%- if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ bos_token }}
{%- for turn in messages %}<{{ turn.role }}>{{ turn.content }}<end>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


def _text(start: int, words: int) -> str:
    return " ".join(WORDS[(start * 7 + i * 3) % len(WORDS)] for i in range(words))


@pytest.mark.slow
@pytest.mark.parametrize("begun", [False, True], ids=["as_it_is", "begun"])
@pytest.mark.parametrize(
    "named", [{"bos_token": "<bos>", "eos_token": "<eos>"}, {"eos_token": "<end>"}], ids=["bos", "end"]
)
def test_as_the_harness_reads_the_same_folder_by_transformers(
    tmp_path: Path, begun: bool, named: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Special tokens at the start, truncation, windows, conversations, stop texts."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from lm_eval.models.huggingface import HFLM

    from train.eval.harness import Checkpoint

    tokenizer = _tokenizer()
    if begun:
        tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", None, [("<bos>", 256)])
    folder = _write(tmp_path, tokenizer, chat_template=TURNS, **named)
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1)
    ours = Checkpoint(folder, as_harness=True)
    assert ours.chat_template(True) == theirs.chat_template(True)

    pairs = [(_text(i, i % 5 + 1), " " + _text(i + 3, 1 + i % 2)) for i in range(10)]
    pairs += [
        ("", "of nothing"),
        ("spaces  ", "x"),
        ("a\n", "b"),
        ("<bos>begun", " so"),
        ("", "<bos>x"),
        ("", "<end>y"),
    ]
    requests = [_Request(*pair) for pair in pairs]
    found, wanted = ours.loglikelihood(requests), theirs.loglikelihood(requests, disable_tqdm=True)
    assert [logp for logp, _ in found] == pytest.approx([logp for logp, _ in wanted], abs=1e-4)
    assert [likeliest for _, likeliest in found] == [likeliest for _, likeliest in wanted]

    if "bos_token" in named:  # where the two agree on what is in front
        assert Checkpoint(folder).loglikelihood(requests) == found

    texts = [_text(0, 1), _text(1, 20), "x" * 23, "x" * 24, "x" * 25, "é" * 30, "<bos>begun"]
    requests = [_Request(text) for text in texts]
    wanted = theirs.loglikelihood_rolling(requests, disable_tqdm=True)
    assert ours.loglikelihood_rolling(requests) == pytest.approx(wanted, abs=1e-3)

    conversation = [{"role": "user", "content": "Ice?"}, {"role": "assistant", "content": "It is"}]
    asked = [{"role": "system", "content": "Be brief."}, conversation[0]]
    chats = [ours.apply_chat_template(asked), ours.apply_chat_template(conversation, add_generation_prompt=False)]
    assert chats[0] == theirs.apply_chat_template(asked)
    assert chats[1] == theirs.apply_chat_template(conversation, add_generation_prompt=False)
    if not begun:
        silent = "{% for m in messages if m.role == 'user' %}<{{ m.content }}>{% endfor %}"
        with pytest.raises(UserError, match=r"leaves out the text of turn 1 of 2: 'Be brief\."):
            Checkpoint(_write(tmp_path / "silent", tokenizer, chat_template=silent)).apply_chat_template(asked)
    for until in ([], ["e", "\n"], "1"):
        settings = {"until": until, "max_gen_toks": 8, "do_sample": False}
        contexts = [*chats, *(_text(i, i + 1) for i in range(4))]
        found = ours.generate_until([_Request(context, settings) for context in contexts], disable_tqdm=True)
        requests = [_Request(context, dict(settings)) for context in contexts]
        assert found == theirs.generate_until(requests, disable_tqdm=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tasks", "own_choise"], "there is no task own_choise; the nearest is own_choice"),
        (["--tasks", "own_choice", "--limit", "0"], "0"),
        (["--tasks", "own_choice", "--chat"], "has no chat template"),
    ],
)
def test_mistakes_are_one_sentence(
    folder: Path, model: Any, own_tasks: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture
) -> None:
    assert tasks.main([str(folder), "--include", str(own_tasks), *flags]) == 2
    assert re.search(re.escape(words), capsys.readouterr().err)


def test_a_missing_harness_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("train.command_line.find_spec", lambda name: None if name == "lm_eval" else name)
    assert tasks.main(["folder", "--tasks", "any"]) == 2
    assert 'pip install "fnmodels[eval]"' in capsys.readouterr().err
