"""Recipes: what a file of stages becomes, a killed recipe, and a report that stands alone."""

import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fnmodels.errors import UserError
from tests.support.forks import ROOT, Forks
from train.recipe import run
from train.recipe.charts import Curve, chart
from train.recipe.checks import check_stages
from train.recipe.report import write_report
from train.recipe.stages import read_recipe

EXAMPLE = ROOT / "examples" / "recipes" / "tiny_chat.toml"
TINY = """
title = "Tiny <chat>"
folder = "nowhere"

[pretraining]
command = "train"
data = "{here}/text.txt"
steps = 3
vocab_size = 300
hidden_size = 32
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
row_length = 32
sample_tokens = 3

[chat]
command = "train"
init = "{pretraining}"
data = "{here}/chats.jsonl"
steps = 2
sample_tokens = 3

[reward]
command = "rl"
init = "{chat}"
data = "{here}/prompts.jsonl"
checker = "contains"
updates = 2
prompts = 2
answers = 2
tokens = 3

[evaluation]
command = "eval"
checkpoint = "{reward}"
data = "{here}/text.txt"

[answers]
command = "sample"
checkpoint = "{reward}"
chat = true
prompt = ["1 + 1", "2 + 2"]
tokens = 3
"""


class Checked(HTMLParser):
    """Finds what a page refers to, and whether its elements are closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("line", "polyline")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("".join(f"User: {n} + {n}\nAssistant: {2 * n}\n" for n in range(400)))
    shutil.copy(EXAMPLE.parent / "tiny_chat" / "chats.jsonl", tmp_path)
    lines = (EXAMPLE.parent / "tiny_chat" / "prompts.jsonl").read_text().splitlines()[:8]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.mark.slow
def test_a_killed_recipe_continues_and_ends_with_a_report(
    recipe: Path, tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made"
    commands: list[str] = []

    def in_fork(command: list[str], stdout: int | None) -> tuple[int, str]:
        assert command[:3] == [sys.executable, "-P", "-m"]
        commands.append(command[3])
        if len(commands) == 3:
            raise KeyboardInterrupt  # as a kill would end it
        done = forks.run(command[2:], env={"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        return done.returncode, done.stdout

    monkeypatch.setattr(run, "run_process", in_fork)
    assert run.main([str(recipe), "--folder", str(folder)]) == 130
    assert run.main([str(recipe), "--folder", str(folder)]) == 0
    assert commands == ["train", "train", "train.rl", "train.rl", "train.eval", "train.sample"]
    page = (folder / "report.html").read_text()
    checked = Checked(page)
    assert checked.open == [] and all(reference.startswith("#") for reference in checked.references)
    assert page.count("<svg") == 3 and "<script" not in page and "Tiny &lt;chat&gt;" in page
    assert "held-out bits per byte" in page and "reward of held-out prompts" in page and "bits per byte  " in page
    assert run.main([str(recipe), "--folder", str(folder)]) == 0 and len(commands) == 6  # nothing is left to do
    recipe.write_text(TINY.replace("steps = 2", "steps = 5"))
    assert run.main([str(recipe), "--folder", str(folder)]) == 2
    assert "[chat] differs from what was run" in capsys.readouterr().err
    assert run.main([str(recipe), "--folder", str(folder), "--set", "chat.steps=2"]) == 0


def test_the_example_is_a_recipe_of_commands_with_their_flags() -> None:
    found = read_recipe(EXAMPLE, Path("made"))
    assert [stage.name for stage in found.stages] == ["pretraining", "chat", "reward", "evaluation", "answers"]
    assert "--init=made/pretraining" in found.stages[1].flags
    assert f"--data={EXAMPLE.parent}/tiny_chat/chats.jsonl" in found.stages[1].flags
    assert found.stages[4].shown[:4] == ["python", "-m", "train.sample", "made/reward"]
    assert (
        found.stages[4].flags.count("--chat") == 1 and sum("--prompt=" in flag for flag in found.stages[4].flags) == 5
    )


def test_the_examples_data_is_what_its_script_writes(tmp_path: Path, forks: Forks) -> None:
    done = forks.run([EXAMPLE.parent / "tiny_chat_data.py", tmp_path])
    assert done.returncode == 0, done.stderr
    for name in ("chats.jsonl", "prompts.jsonl"):
        assert (tmp_path / name).read_bytes() == (EXAMPLE.parent / "tiny_chat" / name).read_bytes()
    questions = [
        {json.loads(line)["messages"][0]["content"] for line in (tmp_path / name).read_text().splitlines()}
        for name in ("chats.jsonl", "prompts.jsonl")
    ]
    assert len(questions[1] - questions[0]) > 40  # prompts that no conversation has


REFUSED = {
    "folder = 'x'": "there is no stage",
    "[a]\ncommand = 'train'": "there is no folder",
    "folder = 'x'\n[a]\ncommand = 'rm'": "[a] has the command 'rm', which is none of train, rl, eval, sample",
    "folder = 'x'\n[a]\ncommand = 'eval'": "[a] needs a checkpoint",
    "folder = 'x'\n[a]\ncommand = 'train'\ncheckpoint = 'b'": "[a] makes a checkpoint, and its source is init",
    "folder = 'x'\n[a]\ncommand = 'train'\ninit = '{b}'": "[a] names {b}, which is no stage before it",
    "folder = 'x'\n[a]\ncommand = 'train'\nrun = 'b'": "[a] has run, which the recipe itself gives",
    "folder = 'x'\n[a]\ncommand = 'train'\nloss = 'os:system'": "[a] loss names code, os:system, which no file may run",
    "folder = 'x'\n[a]\ncommand = 'train'\ndata = 'b,mine.py:f:2'": "[a] data names code, b,mine.py:f:2",
    "folder = 'x'\n[a]\ncommand = 'train'\nfamily = 'mine.py'": "[a] family names code, mine.py",
    "folder = 'x'\n[a]\ncommand = 'rl'\nchecker = 'mine.py:f'": "give --set a.checker=mine.py:f",
    "folder = 'x'\n[a]\ncommand = 'train'\nmirror = 's3://b'": "[a] has mirror, which sends data elsewhere",
    "folder = 'x'\n[a]\ncommand = 'eval'\ncheckpoint = 'b'\n[c]\ncommand = 'train'\ninit = '{a}'": "[c] names {a}",
    "folder = 'x'\n[a]\ncommand = 'train'\nsteps = {b = 1}": "[a] steps is {'b': 1}",
    "folder = 'x'\nsteps = 3": "steps stands outside of a stage",
    "folder = 'x'\n[A-b]\ncommand = 'train'": "a stage is called 'A-b'",
    "folder =": "is not TOML",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_file_that_is_no_recipe_is_refused_with_the_reason(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(UserError, match=re.escape(REFUSED[text])):
        read_recipe(tmp_path / "r.toml")


REFUSED_BY_STAGES = [
    ("updates = 2", "updatess = 2", "[reward] there is no flag --updatess; the nearest is --updates"),
    ("steps = 2", 'steps = "few"', "[chat] argument --steps: 'few' is not a whole number from 1"),
    ("chat = true", 'chat = "yes"', "[answers] argument --chat: ignored explicit argument 'yes'"),
    ("[evaluation]\n", "[evaluation]\nlimit = 0.5\n", "[evaluation] argument --limit: invalid int value: '0.5'"),
    ("chats.jsonl", "none.jsonl", "[chat] --data HERE/none.jsonl: there is no such file or folder"),
    ("prompts.jsonl", "none.jsonl", "[reward] --data HERE/none.jsonl: the file cannot be read"),
    ("prompts.jsonl", "text.txt", "[reward] HERE/text.txt, line 1 is not JSON"),
    ('"contains"', '"containss"', "[reward] --checker containss: it is none of equal, contains, number"),
    ('init = "{chat}"', 'init = "nowhere/else"', "[reward] nowhere/else: There is no such checkpoint folder"),
    ('init = "{pretraining}"', 'init = "/nowhere"', "[chat] /nowhere: there is no such checkpoint folder"),
    (
        'init = "{pretraining}"',
        'init = "{pretraining}"\nvocab_size = 300',
        "[chat] --vocab-size 300 is for a new model",
    ),
    ("num_attention_heads = 2", "num_attention_heads = 3", "[pretraining] --hidden-size 32 is not a multiple"),
    ("steps = 2", 'mesh = "fsdp=3"', "[chat] --mesh fsdp=3 splits the rows of a batch over 3 ranks"),
    ('prompt = ["1 + 1", "2 + 2"]', "", "[answers] a stage has no terminal for a conversation: give prompt"),
    ('prompt = ["1 + 1", "2 + 2"]', 'prompts = "none.jsonl"', "[answers] none.jsonl: No such file or directory"),
    ("[evaluation]\n", '[evaluation]\ndevice = "abacus"\n', "[evaluation] --device abacus: torch cannot compute there"),
]


@pytest.mark.parametrize(("of", "wrong", "said"), REFUSED_BY_STAGES)
def test_what_a_late_stage_would_refuse_is_said_before_the_first_stage_runs(
    recipe: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    of: str,
    wrong: str,
    said: str,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    recipe.write_text(TINY.replace(of, wrong))
    assert run.main([str(recipe), "--folder", str(tmp_path / "made")]) == 2
    captured = capsys.readouterr()
    assert said.replace("HERE", str(tmp_path)) in captured.err and captured.err.count("\n") == 1
    assert captured.out == "" and not (tmp_path / "made").exists()


def test_the_example_passes_the_checks_of_its_stages(tmp_path: Path) -> None:
    check_stages(read_recipe(EXAMPLE, tmp_path), [])


def test_checks_pass_a_recipe_whose_checkpoints_are_made_by_its_stages(recipe: Path, tmp_path: Path) -> None:
    check_stages(read_recipe(recipe, tmp_path / "made"), [])
    (tmp_path / "made" / "reward").mkdir(parents=True)
    (tmp_path / "made" / "reward" / "notes.txt").touch()
    with pytest.raises(UserError, match=r"\[reward\] --run .*reward: the folder is not empty"):
        check_stages(read_recipe(recipe, tmp_path / "made"), [])
    check_stages(read_recipe(recipe, tmp_path / "made"), ["pretraining", "chat", "reward"])


def test_the_command_line_changes_stages_and_may_name_code(recipe: Path, tmp_path: Path) -> None:
    changes = ["reward.checker=mine.py:f", "chat.batch-rows=8", "answers.chat=false", "chat.init=/a"]
    found = {stage.name: stage.flags for stage in read_recipe(recipe, tmp_path, changes).stages}
    assert "--checker=mine.py:f" in found["reward"] and "--batch-rows=8" in found["chat"]
    assert "--init=/a" in found["chat"] and "--chat" not in found["answers"]
    for change, said in {
        "rewards.checker=f": "there is no stage rewards; the nearest is reward",
        "checker=f": "a change is written as STAGE.KEY=VALUE",
    }.items():
        with pytest.raises(UserError, match=said):
            read_recipe(recipe, tmp_path, [change])


def test_a_request_to_stop_is_passed_on_to_the_stage(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    program = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        f"pathlib.Path({str(ready)!r}).touch()\ntime.sleep(60)\n"
    )

    def stop() -> None:
        while not ready.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    assert run.run_process([sys.executable, "-c", program], None) == (7, "")
    thread.join()


def test_charts_place_points_by_their_values() -> None:
    picture = chart([Curve("a < b", [(0, 1.0), (10, 3.0), (5, float("nan"))]), Curve("none", [])], "step", "loss")
    assert Checked(picture).open == [] and picture.count("<polyline") == 1 and "a &lt; b" in picture
    points = re.search(r'points="([^"]*)"', picture)
    assert points
    (x0, y0), (x1, y1), _ = (tuple(map(float, point.split(","))) for point in points[1].split())
    assert x0 == 56 and x1 == 628 and y0 > y1  # larger values stand higher
    assert "no points yet" in chart([Curve("none", [(1, float("inf"))])], "step", "loss")


def test_a_report_of_a_recipe_that_has_not_begun_is_a_page(tmp_path: Path) -> None:
    page = write_report(read_recipe(EXAMPLE, tmp_path), {})
    assert Checked(page).open == [] and "0 stages" in page
