"""`python -m train.rl`: a reward that can be learned is, a stopped run continues with the same bits, and refusals."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import params as P
from tests.train.job.test_run import TINY
from train.cli import main as main_job
from train.losses.policy import policy_loss
from train.rl import command, loop
from train.rl.pictures import Seen
from train.rl.prompts import CHECKERS, checker_of, read_prompts


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has seen turns of the default chat template, with prompts beside it."""
    folder = tmp_path_factory.mktemp("base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        turns = "".join(f"User: say {word}\nAssistant: {word}\n" for word in ("yes", "no") for _ in range(150))
        (folder / "text.txt").write_text(turns)
        assert main_job(["--run", str(folder / "run"), "--data", str(folder / "text.txt")], defaults=TINY) == 0
    records = [{"messages": [{"role": "user", "content": f"say {n}"}], "answer": "e"} for n in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def reinforce(base: Path, run: Path, *flags: Any) -> int:
    sizes = ["--prompts", "4", "--answers", "4", "--tokens", "6", "--save-every", "2", "--learning-rate", "0.01"]
    given = ["--init", str(base / "run"), "--data", str(base / "prompts.jsonl"), "--checker", "contains", *sizes]
    return command.main(["--run", str(run), *given, *map(str, flags)])


def rewards(run: Path) -> list[float]:
    return [json.loads(line)["reward"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_stopped_run_continues_to_the_bits_of_one_that_learned_its_reward(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reinforce(base, tmp_path / "whole", "--updates", 12) == 0
    found = rewards(tmp_path / "whole")
    assert sum(found[-3:]) > sum(found[:3]) + 0.5  # the letter that the checker asks for is drawn more often
    real = command.stop_requests

    @contextmanager
    def stopping() -> Iterator[Any]:
        updates = count(1)
        with real():
            yield lambda: next(updates) >= 5

    with monkeypatch.context() as patch:
        patch.setattr(command, "stop_requests", stopping)
        assert reinforce(base, tmp_path / "run", "--updates", 12) == 130
    assert reinforce(base, tmp_path / "run", "--updates", 12, "--resume") == 0
    for name in ("model.safetensors", "metrics.jsonl", "summary.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["heldout_prompts"] == 1 and len(summary["samples"]) == 1
    config, _ = P.load_pretrained(tmp_path / "run")
    assert config.hidden_size == TINY.hidden_size


def test_gradient_is_of_the_answers_tokens_alone() -> None:
    (batch,) = loop.microbatches([Seen([5, 6, 7]), Seen([8])], [[1, 2], [3, 4, 9]], torch.tensor([1.0, -2.0]))
    taught = batch["labels"][batch["learnt"]]
    assert sorted(taught.tolist()) == [1, 2, 3, 4, 9]
    gains = batch["advantages"][batch["learnt"]]
    assert sorted(gains.tolist()) == [-2.0] * 3 + [1.0] * 2
    logp = torch.zeros(batch["labels"].shape, requires_grad=True)
    policy_loss(logp, logp.detach(), batch["advantages"], batch["learnt"])[0].backward()
    assert logp.grad is not None and torch.equal(logp.grad != 0, batch["learnt"])


def test_checkers_compare_with_the_answer_of_the_record(tmp_path: Path) -> None:
    record = {"answer": "12"}
    table = {" 12\n": (1, 1, 1), "it is 12": (0, 1, 1), "12 and 13": (0, 1, 0), "12.0": (0, 1, 1), "none": (0, 0, 0)}
    for answer, expected in table.items():
        assert tuple(CHECKERS[name](answer, record) for name in ("equal", "contains", "number")) == expected, answer
    (tmp_path / "mine.py").write_text("def judge(answer, record):\n    return len(answer) / 2\n")
    assert checker_of(f"{tmp_path / 'mine.py'}:judge")("four", {}) == 2


def test_heldout_prompts_do_not_depend_on_their_order(base: Path, tmp_path: Path) -> None:
    lines = (base / "prompts.jsonl").read_text().splitlines()
    (tmp_path / "other.jsonl").write_text("\n".join(reversed(lines)))
    one, other = read_prompts(base / "prompts.jsonl", "equal"), read_prompts(tmp_path / "other.jsonl", "equal")
    assert one.heldout == other.heldout and len(one.train) == 11


REFUSED = {
    '{"messages": []}': "has no list of `messages`",
    "{": "is not JSON",
    '{"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "add"}]}': "'tools' stands beside the turns",
    '{"messages": [{"role": "user", "content": "x"}]}': "has no `answer`, with which --checker contains compares",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_line_that_is_no_prompt_is_named(
    line: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    assert reinforce(base, tmp_path / "run", "--data", path) == 2
    message = capsys.readouterr().err
    assert REFUSED[line] in message and f"{path}, line 1" in message


def test_another_checker_or_other_flags_are_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reinforce(base, tmp_path / "run", "--checker", "wrong") == 2
    assert "--checker wrong: it is none of equal, contains, number" in capsys.readouterr().err
    assert reinforce(base, tmp_path / "run", "--updates", 1) == 0
    assert reinforce(base, tmp_path / "run", "--updates", 2, "--resume") == 2
    assert "--updates differs from that of the run" in capsys.readouterr().err
    assert reinforce(base, tmp_path / "run", "--updates", 1) == 2
    assert "the folder is not empty" in capsys.readouterr().err


def test_a_failing_checker_is_named_with_the_update_and_its_traceback_is_kept(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(
        "def judge(answer, record):\n    raise KeyError('x')\n\n\ndef word(answer, record):\n    return 'good'\n"
    )
    for name, said in {"judge": "KeyError: 'x' in own.py, line 2", "word": "ValueError: could not convert"}.items():
        run = tmp_path / name
        assert reinforce(base, run, "--checker", f"{tmp_path / 'own.py'}:{name}") == 2
        err = capsys.readouterr().err
        assert f"own.py:{name} failed: {said}" in err and f"traceback: {run / 'failure.txt'}" in err
        assert (run / "failure.txt").exists()
