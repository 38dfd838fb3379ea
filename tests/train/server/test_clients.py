"""The published clients of such servers: OpenAI's package, and lm-evaluation-harness' `local-completions`."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.served import Served, serving, write_checkpoint

pytest.importorskip("starlette")
openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("served") / "checkpoint")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with serving(folder, token="secret") as made:
        yield made


@pytest.fixture
def client(server: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as made:
        yield made


def test_completions_of_the_client(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 6, "seed": 1, "n": 2, "logprobs": 3}
    whole = client.completions.create(**asked)
    texts = ["", ""]
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        used = chunk.usage
    assert texts == [choice.text for choice in whole.choices] and used == whole.usage
    assert all(len(choice.logprobs.token_logprobs) <= 6 for choice in whole.choices)
    more = client.completions.create(**asked, extra_body={"top_k": 1, "repetition_penalty": 1.3})
    assert more.choices[0].text == more.choices[1].text  # of one token nothing is drawn


def test_chats_of_the_client(client: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    asked = {"model": "tiny", "messages": messages, "max_tokens": 40, "seed": 1}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(chunk.delta.content for chunk in chunks) == whole.choices[0].message.content
    assert chunks[0].delta.role == "assistant" and chunks[-1].finish_reason == whole.choices[0].finish_reason
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = client.chat.completions.create(**asked, response_format=form).choices[0].message.content
    assert json.loads(answer).keys() == {"yes"}


def test_errors_are_those_of_the_client(client: Any, server: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="the capacity is 256 tokens"):
        client.completions.create(model="tiny", prompt="a" * 300)
    with pytest.raises(openai.NotFoundError, match="There is no model 'other'"):
        client.completions.create(model="other", prompt="a")
    other = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with other, pytest.raises(openai.AuthenticationError):
        other.models.list()


def test_many_clients_get_the_answers_of_one(client: Any, server: Served) -> None:
    """Forty requests at once over eight slots: each answer is that of the request alone."""
    asked = [{"model": "tiny", "prompt": "abc"[: 1 + i % 3], "max_tokens": 3 + i % 9, "seed": i} for i in range(40)]
    alone = [client.completions.create(**one).choices[0].text for one in asked]
    found = [""] * len(asked)

    def ask(i: int) -> None:
        found[i] = client.completions.create(**asked[i]).choices[0].text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


QUESTIONS = [
    {"question": "One and one are", "choices": [" two", " three things", " 1"], "answer": 0, "line": "x"},
    {"question": "Ice is", "choices": [" cold", " hot", " a stone"], "answer": 2, "line": "y"},
    {
        "question": "A sentence that is longer than the others, which",
        "choices": [" yes", " no"],
        "answer": 1,
        "line": "z",
    },
]


def test_lm_eval_finds_what_it_finds_in_process(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities, choices, rolled texts and generated answers over HTTP are those of `harness.Checkpoint`."""
    lm_eval = pytest.importorskip("lm_eval")
    import datasets
    from lm_eval.tasks import TaskManager

    from train.eval.harness import Checkpoint

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    task = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}}
    task |= {"test_split": "test", "doc_to_text": "{{question}}"}
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
    choice |= {"metric_list": [{"metric": "acc"}]}
    kwargs = {"until": ["\n"], "max_gen_toks": 6, "do_sample": False, "temperature": 0.0}
    answer = {"output_type": "generate_until", "generation_kwargs": kwargs, "doc_to_target": "{{line}}"}
    answer |= {"metric_list": [{"metric": "exact_match"}]}
    for name, more in (("own_choice", choice), ("own_answer", answer)):
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **task, **more}))  # JSON is YAML
    known: dict[str, Any] = {"tasks": ["own_choice", "own_answer"], "bootstrap_iters": 0, "log_samples": True}
    known["task_manager"] = TaskManager(include_path=str(tmp_path), include_defaults=False)
    here = lm_eval.simple_evaluate(model=Checkpoint(folder), **known)
    with serving(folder) as server:
        arguments = {"model": "tiny", "base_url": f"{server.url}/v1/completions", "max_length": 255, "batch_size": 2}
        arguments |= {"tokenizer": str(folder), "tokenizer_backend": "huggingface"}
        there = lm_eval.simple_evaluate(model="local-completions", model_args=arguments, **known)
    assert there["results"]["own_choice"]["acc,none"] == here["results"]["own_choice"]["acc,none"]
    for name in known["tasks"]:
        for one, other in zip(here["samples"][name], there["samples"][name], strict=True):
            assert one["doc_id"] == other["doc_id"]
            for mine, theirs in zip(one["filtered_resps"], other["filtered_resps"], strict=True):
                if name == "own_answer":
                    assert mine == theirs
                else:
                    assert float(theirs[0]) == pytest.approx(float(mine[0]), rel=1e-6) and mine[1] == theirs[1]
