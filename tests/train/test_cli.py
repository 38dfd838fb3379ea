import functools
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import train
from train import command_line
from train.cli import main
from train.commands.sample import main as sample
from train.job.settings import SETTING_TYPES, flag

ROOT = Path(train.__file__).parents[1]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def files(path):
    (path / "file").write_text("text")
    (path / "short").write_text("a text of no length\n" * 9)
    (path / "long").write_text("a text of some length\n" * 999)
    (path / "a.toml").write_text("stepz = 3")
    (path / "nothing").mkdir()
    (path / "binary").write_bytes(bytes(range(256)))


def errors(path):
    """{name: (flags, part of the message)} of errors that are found before anything is computed."""
    run = ["--run", str(path / "run")]
    return {
        "no run": ([], "--run"),
        "no steps": ([*run, "--steps", "0"], "'0' is not a whole number from 1"),
        "words": ([*run, "--steps", "many"], "'many' is not a whole number"),
        "negative seed": ([*run, "--seed", "-1"], "'-1' is not a whole number from 0"),
        "never saved": ([*run, "--save-every", "0"], "--save-every"),
        "nothing kept": ([*run, "--keep", "0"], "--keep: '0' is not a whole number from 1"),
        "typing error": ([*run, "--stepz", "3"], "there is no flag --stepz; the nearest is --steps"),
        "half a flag": ([*run, "--step", "3"], "there is no flag --step; the nearest is --steps"),
        "a word too many": ([*run, "fast"], "there is no argument fast"),
        "betas": ([*run, "--betas", "0.9"], "--betas: '0.9' is not two numbers from 0 to below 1"),
        "dtype": ([*run, "--dtype", "fp8"], "'fp8' is not one of bfloat16, float32"),
        "no file of settings": ([*run, "--config", str(path / "absent")], "settings cannot be read (No such file"),
        "no TOML": ([*run, "--config", str(path / "file")], "file is not TOML"),
        "unknown setting": (
            [*run, "--config", str(path / "a.toml")],
            "no setting 'stepz'; the nearest is steps",
        ),
        "sizes beside init": (
            [*run, "--init", str(path), "--hidden-size", "8"],
            f"--hidden-size 8 is for a new model, and --init {path} names a checkpoint",
        ),
        "heads": (
            [*run, "--data", str(path / "long"), "--num-attention-heads", "3"],
            "num_attention_heads 3 is not a multiple of num_key_value_heads",
        ),
        "short data": ([*run, "--data", str(path / "short")], "too little text"),
        "adapters of nothing": ([*run, "--lora", "r=2,targets=q_proj"], "name one with --init"),
        "no tokenizer": ([*run, "--init", str(path / "nothing")], "has no tokenizer.json"),
        "mesh": ([*run, "--mesh", "fsdp=2", "--nproc", "3"], "--nproc 3"),
        "nothing to resume": (
            ["--run", str(path / "noting"), "--resume"],
            f"there is no such folder, so --resume has no run to continue: leave it out to start one; "
            f"the nearest is {path / 'nothing'}",
        ),
        "run is a file": (["--run", str(path / "file")], "cannot be created"),
        "run below a file": (["--run", str(path / "file" / "run")], "cannot be created"),
        "no data": ([*run, "--data", str(path / "absent")], "no such file or folder"),
        "empty data": ([*run, "--data", str(path / "nothing")], "no text"),
        "binary data": ([*run, "--data", str(path / "binary")], "binary"),
        "no checkpoint": ([*run, "--data", str(path / "file"), "--init", str(path / "absent")], "no such checkpoint"),
    }


@pytest.mark.parametrize("name", errors(Path()))
def test_a_mistake_is_one_sentence_and_exit_code_2(tmp_path, capsys, name):
    files(tmp_path)
    flags, named = errors(tmp_path)[name]
    assert main(flags) == 2
    out, error = capsys.readouterr()
    assert named in error
    read = name in ("empty data", "binary data", "short data")  # what is wrong with a text is known when it was read
    assert out == ("reading the text\n" if read else "")
    assert error.startswith("python -m train: ")
    assert error.endswith(".\n")
    assert error.count("\n") == 1


def test_a_mistake_leaves_nothing_that_was_not_there(tmp_path):
    assert main(["--run", str(tmp_path / "runs" / "run"), "--data", str(tmp_path / "absent")]) == 2
    assert list(tmp_path.iterdir()) == []
    for left in ([], [".lock"]):
        (tmp_path / "run").mkdir(exist_ok=True)
        for name in left:
            (tmp_path / "run" / name).touch()
        assert main(["--run", str(tmp_path / "run"), "--mesh", "fsdp=2", "--nproc", "3"]) == 2
        assert [path.name for path in (tmp_path / "run").iterdir()] == left


def test_missing_packages_are_named_with_their_extra(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command_line, "find_spec", lambda name: None if name in ("rich", "tokenizers") else object())
    assert main(["--run", str(tmp_path / "run")]) == 2
    assert (
        'tokenizers and rich must be installed for this: pip install "fnmodels[log,text]".' in capsys.readouterr().err
    )
    assert sample([str(tmp_path), "--prompt", "a"]) == 2
    assert 'pip install "fnmodels[text]".' in capsys.readouterr().err


def test_a_failing_disk_is_a_sentence_too(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", str(tmp_path / "run" / "metrics.jsonl"))

    monkeypatch.setattr("train.job.run.train_run", full)
    assert main(["--run", str(tmp_path / "run")]) == 2
    said = f"{tmp_path}/run/metrics.jsonl: No space left on device.\n"
    assert capsys.readouterr().err == f"python -m train: {said}"
    monkeypatch.setattr(sys, "argv", ["bin/fnmodels-train"])  # which is then its name
    assert main(["--run", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == f"fnmodels-train: {said}"


def test_a_cache_that_cannot_be_written_is_named(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("text\n" * 40)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert main(["--run", str(tmp_path / "run"), "--data", str(tmp_path / "file")]) == 2
    assert "set XDG_CACHE_HOME" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["train", "train.sample"])
def test_help_names_every_flag(forks, module):
    shown = forks.run(["-m", module, "--help"])
    assert (shown.returncode, shown.stderr) == (0, "")
    flags = {
        "train": (
            "--run DIR",
            "--config TOML",
            "--steps N",
            "--seed N",
            "--data PATH",
            "--init CHECKPOINT",
            "--resume",
            "--save-every N",
            "--keep N",
        ),
        "train.sample": (
            "CHECKPOINT_FOLDER",
            "--prompt TEXT",
            "--tokens N",
            "--temperature T",
            "--top-k K",
            "--seed N",
        ),
    }[module]
    assert [name for name in flags if name not in shown.stdout] == []
    if module == "train":
        assert [name for name in SETTING_TYPES if flag(name) not in shown.stdout] == []


def test_the_module_exits_with_the_code_of_main(tmp_path):
    command = [sys.executable, "-m", "train", "--run", str(tmp_path / "run"), "--data", str(tmp_path / "absent")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("module", ["train", "train.sample"])
def test_ctrl_c_while_torch_is_imported_is_one_line(module):
    command = [sys.executable, "-X", "importtime", "-m", module, "--help"]
    heeded = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # background jobs of a shell ignore it
    how = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    running = subprocess.Popen(command, preexec_fn=heeded, **how)
    assert running.stderr is not None and any(" torch." in line for line in running.stderr)
    running.send_signal(signal.SIGINT)
    rest = [line for line in running.stderr if not line.startswith("import time:")]
    assert (running.wait(), rest) == (130, [f"python -m {module}: stopped\n"])
