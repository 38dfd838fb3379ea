"""The examples that are scripts: their parts, and a short run from end to end."""

import dataclasses
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from train.generation.requests import Answer, Request


def example(name: str) -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_example", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def grpo() -> ModuleType:
    return example("grpo")


class _Letters:
    """Each token is a character."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("answer", "right", "of"),
    [
        (" 4 5 6\n12", 3, 24),
        (" 4 5? 6\n", 2, 24),
        (" 5 6\n", 0, 24),
        ("4 5\n", 0, 24),
        ("\n 4", 0, 24),
        ("".join(f" {n}" for n in range(4, 28)) + "\n", 24, 24),
        ("".join(f" {n}" for n in range(4, 34)) + "\n", 24, 30),
    ],
)
def test_the_next_numbers_without_a_mark_are_rewarded(grpo: Any, answer: str, right: int, of: int) -> None:
    prompt = [ord(c) for c in "3:"]
    found = Answer(0, Request(prompt, 100, stop_texts=("\n",)), _Letters())
    events = []
    for letter in answer:
        events.append(found.append(ord(letter), 0.0, 0.0))
        if events[-1].reason:
            break
    judged = grpo.judged(prompt, 3, found.tokens, "".join(event.text for event in events))
    assert judged.reward == right / of and len(judged.tokens) - 2 == answer.index("\n") + 1
    assert judged.learnt.tolist() == [False] * 2 + [True] * len(found.tokens)


def test_advantages_stand_at_the_tokens_that_were_chosen(grpo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo, "BUDGET", 512)
    found = []
    for i in range(grpo.PROMPTS * grpo.ANSWERS):
        tokens = torch.arange(6 + i % 3) + 1
        found.append(grpo.Rollout(tokens, torch.arange(len(tokens)) >= 4, float(i % grpo.ANSWERS == 0)))
    parts = grpo.microbatches(found)
    assert len(parts) == 2 and all(part["tokens"].shape[1] <= 512 for part in parts)
    gain = (7 / 8) / ((1 / 8) * (7 / 8)) ** 0.5
    learnt = torch.cat([part["advantages"][part["learnt"]] for part in parts])
    assert len(learnt) == sum(int(r.learnt.sum()) for r in found)
    torch.testing.assert_close(learnt.max(), torch.tensor(gain), rtol=1e-4, atol=0)
    assert all((part["labels"][part["learnt"]] > 4).all() for part in parts)
    assert all((part["advantages"][~part["learnt"]] == 0).all() for part in parts)


@pytest.mark.slow
def test_the_reward_rises(
    grpo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """From a policy that marks half of the numbers to one that counts, in numbers of one digit."""
    small = {"row_length": 64, "batch_rows": 4, "steps": 100, "eval_every": 100, "learning_rate": 4e-3}
    monkeypatch.setattr(grpo, "SMALL", dataclasses.replace(grpo.SMALL, **small))
    for name, value in {"FIRSTS": 4, "RUN": 5, "NEW": 14, "PROMPTS": 8}.items():
        monkeypatch.setattr(grpo, name, value)
    curves, learn = [], grpo.learn
    monkeypatch.setattr(grpo, "learn", lambda *given: curves.append(learn(*given)) or curves[-1])
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--folder", str(tmp_path), "--seeds", "1", "--updates", "9"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    grpo.main()
    (curve,) = curves
    assert sum(curve[-3:]) > 1.3 * sum(curve[:3]) > 0
    assert "seed 1: reward" in capsys.readouterr().out
    assert (tmp_path / "grpo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_tools_are_called_in_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """From nothing to a drawn curve, of both tasks; docs/environments.md has those of a full run."""
    tool_use: Any = example("tool_use")
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    groups = ("--prompts", "2", "--answers", "4")
    for name, value in {"SIZES": small, "DEMONSTRATIONS": 400, "GROUPS": groups}.items():
        monkeypatch.setattr(tool_use, name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["tool_use.py", "--folder", str(tmp_path), "--steps", "20", "--updates", "2"])
    for _ in range(2):  # the second time from the runs of the first
        tool_use.main()
    assert capsys.readouterr().out.count("curve: " + str(tmp_path / "tools.png")) == 2
    rows = [json.loads(line) for line in (tmp_path / "search-rl" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and (tmp_path / "calculator-rl" / "model.safetensors").exists()


def test_answers_are_json_of_a_schema() -> None:
    """The model has random weights, other rows run beside the answers, and other tokens are refused."""
    pytest.importorskip("llguidance")
    json_schema: Any = example("json_schema")
    texts = json_schema.main(answers=8)
    for text in texts:
        found = json.loads(text)
        assert found.keys() == {"name", "age", "colours"} and re.fullmatch("[A-Z][a-z]{1,7}", found["name"])
        assert type(found["age"]) is int and 0 <= found["age"] <= 120
        assert 1 <= len(found["colours"]) <= 3 and set(found["colours"]) <= {"red", "green", "blue"}
    assert len(set(texts)) == 8
    assert json_schema.main(answers=2) == texts[:2]
    tokenizer = json_schema.train_tokenizer(["{}[]"], 300)
    logits, how = torch.zeros(2, 300), {"vocab_size": 300, "end": 0}
    hook = json_schema.json_hook(tokenizer, json_schema.SCHEMA, **how)
    brace, one = (tokenizer.token_to_id(letter) for letter in "{1")
    assert hook(logits, [[], []]).isfinite().nonzero()[:, 1].tolist() == [brace, brace]
    assert hook(logits, [[], [brace]])[1, brace] == -torch.inf
    with pytest.raises(ValueError, match="has left the schema"):
        hook(logits, [[], [one]])
    with pytest.raises(ValueError, match="is not supported"):
        json_schema.json_hook(tokenizer, {"type": "no such type"}, **how)
