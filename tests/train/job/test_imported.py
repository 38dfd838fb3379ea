"""Losses, optimizers and schedules of the user's own by import path, from the command line only."""

import json
from pathlib import Path

import pytest

from fnmodels.errors import UserError
from tests.support.forks import Forks
from train.imported import Imported, absolute, is_import_path

OWN = """
import train
from fnmodels import tree


def loss(params, batch, *, config):
    total, count = train.next_token_loss(params, batch, config=config)
    return 2 * total, count


def sign(rate, *, spec):
    def update(grads, opt_state, params):
        step = opt_state["step"] + 1
        return tree.map(lambda grad: -rate(step) * grad.sign(), grads), {"step": step}

    def init(params):
        import torch

        return {"step": torch.zeros((), dtype=torch.int64)}

    return train.Optimizer(init, update)


def half(step, steps):
    return 0.5


NUMBER = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "text.txt").write_text("The same words again and again. " * 400)
    return tmp_path / "own.py"


def command(own: Path, run: str, *flags: str) -> list[str | Path]:
    sizes = ["--hidden-size", "32", "--intermediate-size", "32", "--num-hidden-layers", "1", "--vocab-size", "300"]
    shape = ["--row-length", "32", "--steps", "3", "--dtype", "float32", "--warmup", "0"]
    return ["-m", "train", "--run", own.parent / run, "--data", own.parent / "text.txt", *sizes, *shape, *flags]


def rows(own: Path, run: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (own.parent / run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_trains_with_functions_of_a_file_and_asks_for_them_again(own: Path, forks: Forks) -> None:
    flags = ("--loss", f"{own}:loss", "--optimizer", f"{own}:sign", "--decay-shape", f"{own}:half")
    for run, given in {"plain": (), "own": flags, "half": flags[4:]}.items():
        done = forks.run(command(own, run, *given))
        assert done.returncode == 0, done.stderr
    plain, other = rows(own, "plain"), rows(own, "own")
    assert other[0]["loss"] == pytest.approx(2 * plain[0]["loss"], rel=1e-6)
    assert other[1]["loss"] != pytest.approx(2 * plain[1]["loss"], rel=1e-6)
    assert [row["lr"] for row in rows(own, "half")] == pytest.approx([0.5 * 3e-3] * 3)
    again = ["-m", "train", "--run", own.parent / "own", "--resume", "--steps", "3"]
    done = forks.run(again)
    assert done.returncode == 2
    assert "code that a folder may not run: give it again" in done.stderr and "--" in done.stderr
    assert forks.run([*again, *flags]).returncode == 0
    assert "own.py" not in (own.parent / "own" / "settings.toml").read_text()
    (own.parent / "a.toml").write_text(f'loss = "{own}:loss"\n')
    done = forks.run(command(own, "third", "--config", str(own.parent / "a.toml")))
    assert done.returncode == 2 and "names code" in done.stderr and not (own.parent / "third").exists()


def test_what_is_no_function_is_a_sentence(own: Path) -> None:
    assert Imported(f"{own}:half", "--decay-shape")(1, 2) == 0.5
    for path, said in [
        (f"{own}:nosuch", "has no function 'nosuch'"),
        (f"{own}:NUMBER", "has no function 'NUMBER'"),
        (f"{own.parent / 'nosuch.py'}:half", "there is no such file"),
        ("nosuch_module:half", r"there is no module 'nosuch_module'; a file is named FILE.py:half"),
    ]:
        with pytest.raises(UserError, match=f"^--loss .*{said}"):
            _ = Imported(path, "--loss").function
    assert Imported("math:sqrt", "--loss")(4.0) == 2.0


def test_the_form_of_import_paths() -> None:
    assert all(map(is_import_path, ("a.b:c", "x.py:f", "/a/b.py:f", "m:f")))
    assert not any(map(is_import_path, ("adamw", "a b:c", ":f", "m:", "a/b:f", 3, None, "m:1")))
    assert absolute("x.py:f", Path("/a")) == "/a/x.py:f" and absolute("m:f", Path("/a")) == "m:f"
