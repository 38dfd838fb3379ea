"""Tests of train.compare: where the losses of two runs diverge, in a table and a plot."""

import json
import subprocess
from pathlib import Path

import pytest

from train.commands import compare, plot
from train.job.recipe import fast_dtype


def _run(folder: Path, losses: list[float | None]) -> Path:
    folder.mkdir()
    rows = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    losses = [5 - 0.01 * step for step in range(100)]
    other = [loss + (0.25 if step == 60 else 1e-3 if step >= 40 else 0) for step, loss in enumerate(losses)]
    return _run(tmp_path / "a", losses), _run(tmp_path / "b", other)


def test_the_first_and_the_largest_difference_are_reported(runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([str(run) for run in runs]) == 0
    out = capsys.readouterr().out
    assert "100 steps; the first difference is at step 41, the largest 2.500e-01 at 61" in out
    assert out.splitlines()[1].split() == ["1", "5.000000", "5.000000", "0.000e+00"]
    assert len(out.splitlines()) == compare.SHOWN + 2


def test_equal_runs_are_called_equal(runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([str(runs[0]), str(runs[0]), "--within", "0"]) == 0
    assert "equal to the last digit" in capsys.readouterr().out


def test_a_bound_decides_the_exit_code(runs) -> None:
    pair = [str(run) for run in runs]
    assert compare.main([*pair, "--within", "0.3"]) == 0
    assert compare.main([*pair, "--within", "0.2"]) == 1


def test_a_loss_that_is_not_finite_and_steps_that_are_missing_are_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = _run(tmp_path / "whole", [3.0, 2.0, 1.0, 0.5])
    lost, short = _run(tmp_path / "lost", [3.0, None, 1.0, 0.5]), _run(tmp_path / "short", [3.0, 2.0])
    for other, words in ((lost, "the largest inf at 2"), (short, f"{whole} alone made 2 steps, 3 to 4")):
        for pair in ((whole, other), (other, whole)):
            assert compare.main([*map(str, pair), "--within", "9"]) == 1
            assert words in capsys.readouterr().out
    assert compare.main([str(lost), str(lost), "--within", "0", "--out", str(tmp_path / "a.png")]) == 0


def test_pictures_of_several_runs(runs, rendered: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot.main([*map(str, runs), "--out", str(tmp_path / "new" / "both.png")]) == 0
    assert compare.main([*map(str, runs), "--out", str(tmp_path / "two.png")]) == 0
    for picture in (tmp_path / "new" / "both.png", tmp_path / "two.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{a}"], "give either a second run or --ref"),
        (["{a}", "{b}", "--ref", "HEAD"], "give either a second run or --ref"),
        (["{a}", "nowhere"], "nowhere is no run folder: it has no metrics.jsonl"),
        (["{a}", "--ref", "HEAD"], "has no run.json"),
        (["{a}", "{b}", "--within", "-1"], "'-1' is not a number"),
    ],
)
def test_mistakes_are_one_sentence(runs, arguments, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"a": runs[0], "b": runs[1]}
    assert compare.main([argument.format(**names) for argument in arguments]) == 2
    err = capsys.readouterr().err
    assert words in err and len(err.splitlines()) == 1


def test_no_run_is_made_for_a_picture_that_cannot_be(runs, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(compare, "run_at", lambda *_: pytest.fail("a run was made"))
    assert compare.main([str(runs[0]), "--ref", "HEAD", "--out", "both.xyz"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "--out both.xyz: the name of a picture ends in .png" in err


def test_settings_that_differ_are_reported(runs, capsys: pytest.CaptureFixture[str]) -> None:
    """With --init the sizes are those of its model, whatever the settings hold: unused sizes, and longer rows."""
    settings = {"learning_rate": 1e-3, "seed": 0, "hidden_size": 64, "row_length": 512, "init": None}
    other = settings | {"learning_rate": 2e-3, "hidden_size": 256, "row_length": 1024, "init": "base"}
    for run, chosen, layers in zip(runs, (settings, other), (2, 4), strict=True):
        model = {"hidden_size": 64, "num_hidden_layers": layers, "max_position_embeddings": 512}
        (run / "run.json").write_text(json.dumps({"settings": chosen, "config": model}))
    assert compare.main([str(run) for run in runs]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("the settings differ in ")]
    assert [line.removeprefix("the settings differ in ") for line in lines] == [
        "init: None and base",
        "learning_rate: 0.001 and 0.002",
        "the model's num_hidden_layers: 2 and 4",
    ]


def test_another_revision_makes_the_run_again(runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository whose `train` writes losses that depend on its revision."""
    repository = tmp_path / "repository"
    (repository / "train").mkdir(parents=True)
    (repository / "train" / "__init__.py").touch()
    body = (
        "import json, sys\nfrom pathlib import Path\nassert sys.argv[1::2] == ['--run', '--steps', '--betas']\n"
        "run = Path(sys.argv[2]); run.mkdir()\n"
        "(run / 'betas').write_text(sys.argv[6])\n"
        "rows = [json.dumps({'step': s, 'loss': LOSS}) + chr(10) for s in range(1, int(sys.argv[4]) + 1)]\n"
        "(run / 'metrics.jsonl').write_text(''.join(rows))\n"
    )

    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *arguments], cwd=repository, check=True, capture_output=True)

    git("init")
    for tag, loss in (("old", "4.0"), ("new", "3.0")):
        (repository / "train" / "__main__.py").write_text(body.replace("LOSS", loss))
        git("add", ".")
        git("commit", "-m", tag)
        git("tag", tag)
    monkeypatch.chdir(repository)
    chosen = {"steps": 3, "seed": 0, "data": None, "learning_rate": 3e-3, "betas": [0.5, 0.9]}
    (runs[0] / "run.json").write_text(json.dumps({"settings": chosen | {"dtype": fast_dtype()}}))
    made = compare.run_at("old", runs[0], tmp_path / "made")
    assert compare.all_losses(made) == dict.fromkeys((1, 2, 3), 4.0)
    assert (made / "betas").read_text() == "0.5,0.9"
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # which would find the `train` of these tests instead
    assert compare.all_losses(compare.run_at("old", runs[0], tmp_path / "safe")) == dict.fromkeys((1, 2, 3), 4.0)
    assert compare.main([str(runs[0]), "--ref", "nonsense"]) == 2
    assert not list((repository / ".git").glob("worktrees/*"))
