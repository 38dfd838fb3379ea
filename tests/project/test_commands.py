"""Tests of all commands with every kind of user error: one sentence on standard error, exit code 2, no traceback."""

import fcntl
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

import params.compare
import params.convert
import params.inspect
import train.cache
import train.cli
import train.compare
import train.plot
import train.recipe.run
import train.rl.command
import train.sample
import train.server.command
import train.simulate
from params.command_line import Parser, run_command
from tests.support.forks import Forks
from tests.support.kill_server import TINY, KillServer

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": lambda argv: train.cli.main(argv, defaults=TINY),
    "train.plot": train.plot.main,
    "train.cache": train.cache.main,
    "train.compare": train.compare.main,
    "train.recipe": train.recipe.run.main,
    "train.rl": train.rl.command.main,
    "train.sample": train.sample.main,
    "train.server": train.server.command.main,
    "train.simulate": train.simulate.main,
    "params.inspect": params.inspect.main,
    "params.compare": params.compare.main,
    "params.convert": params.convert.main,
}

# (command, its arguments, what the sentence names); {} is a folder with the files of `place`
MISTAKES = [
    ("train.cache", "--clean", "no flag --clean; the nearest is --clear"),
    ("train.cache", "{}/nowhere", "{}/nowhere"),
    ("train.recipe", "{}/nowhere.toml", "{}/nowhere.toml: the recipe cannot be read"),
    ("train.recipe", "{}/wrong.toml", "{}/wrong.toml: "),
    ("train.rl", "--run {}/new --init {}/odd --data {}/nowhere --checker equal", "--data {}/nowhere"),
    ("train", "", "the following arguments are required: --run"),
    ("train", "--run {}/new --stepz 3", "no flag --stepz; the nearest is --steps"),
    ("train", "--run {}/new --steps 0", "--steps: '0' is not a whole number from 1"),
    ("train", "--run {}/new --seed 99999999999999999999", "--seed: '99999999999999999999' is not a whole number"),
    ("train", "--run {}/new --steps", "--steps: expected one argument"),
    ("train", "--run {}/new --learning-rate inf", "--learning-rate: 'inf' is not a number from 0"),
    ("train", "--run {}/new --dtype int8", "'int8' is not one of bfloat16, float32"),
    ("train", "--run {}/new --mesh fsdp=2 --nproc 3", "--nproc 3"),
    ("train", "--run {}/new --mesh x", "--mesh x"),
    ("train", "--run {}/new --data {}/nowhere", "--data {}/nowhere"),
    ("train", "--run {}/new --data {}/text --init {}/nowhere", "{}/nowhere: there is no such checkpoint folder"),
    ("train", "--run {}/new --data {}/text --init {}/text", "{}/text: there is no such checkpoint folder"),
    ("train", "--run {}/new --data {}/text --init {}/odd", "{}/odd/tokenizer.json is not a tokenizer"),
    ("train", "--run {}/new --data {}/text --init {}/cut", "model.safetensors"),
    ("train", "--run {}/new --data {}/text --num-attention-heads 3", "of --num-attention-heads 3"),
    ("train", "--run {}/new --data {}/text --hidden-size 1000000000000", "'hidden_size' is 1000000000000, but"),
    ("train", "--run {}/new --data {}/text --row-length 999999999", "too little text in {}/text"),
    ("train", "--run {}/new --data {}/text --lora r=8", "--lora r=8: adapters need the weights of a checkpoint"),
    ("train", "--run {}/new --accumulate 9", "--accumulate 9 splits a batch into more microbatches than it has rows"),
    ("train", "--run {}/new --remat every:0", "--remat: 'every:0' is not one of none, full, selective, every:N"),
    ("train", "--run {}/new --data {}/text --balance-loss 1", "--balance-loss 1.0 is for models with experts"),
    ("train", "--run {}/new --data {}/text --balance-rate 1", "--balance-rate 1.0 moves the selection bias of"),
    ("train", "--run {}/new --lora rank=8", "--lora: 'rank=8' is not adapters as r=8,alpha=16,targets=q_proj+v_proj"),
    ("train", "--run {}/new --config {}/nowhere.toml", "{}/nowhere.toml: the file of settings cannot be read"),
    ("train", "--run {}/new --config {}/broken.toml", "{}/broken.toml is not TOML: "),
    (
        "train",
        "--run {}/new --config {}/odd.toml",
        "{}/odd.toml: there is no setting 'batch_row'; the nearest is batch_rows",
    ),
    ("train", "--run {}/new --config {}/wrong.toml", "{}/wrong.toml: steps is '3', which is not a whole number from 1"),
    ("train", "--run {}/new --config {}", "{}: the file of settings cannot be read (A folder stands where a file "),
    ("train", "--run {}/text", "--run {}/text: the folder cannot be created or written"),
    ("train", "--run {}", "--run {}: the folder is not empty"),
    ("train", "--run {}/odd --resume", "--run {}/odd: the folder holds files that no run wrote"),
    ("train", "--run {}/locked", "--run {}/locked: the folder is in use by another process"),
    ("train.plot", "", "the following arguments are required: RUN"),
    ("train.plot", "{}/nowhere", "{}/nowhere is no run folder"),
    ("train.plot", "{}/empty", "{}/empty/metrics.jsonl has no loss in it yet"),
    ("train.plot", "{}/run --out {}/text/a.png", "{}/text"),
    ("train.plot", "{}/run --out {}/a.foo", "--out {}/a.foo: the name of a picture ends in .png"),
    ("train.plot", "{}/run --outt a.png", "no flag --outt; the nearest is --out"),
    ("train.compare", "{}/run", "give either a second run or --ref"),
    ("train.compare", "{}/run {}/nowhere", "{}/nowhere is no run folder"),
    ("train.compare", "{}/run --ref nonsense", "{}/run has no run.json"),
    ("train.compare", "{}/run {}/run --within x", "--within: 'x' is not a number from 0"),
    ("train.compare", "{}/run {}/run --out {}/a.foo", "--out {}/a.foo"),
    ("train.sample", "{}/nowhere --prompt a", "{}/nowhere: there is no such checkpoint folder"),
    ("train.sample", "{}/cut", "there is nothing to answer"),
    ("train.sample", "{}/odd --prompt a", "{}/odd/tokenizer.json is not a tokenizer"),
    ("train.sample", "{}/cut --prompt a", "model.safetensors"),
    ("train.sample", "{}/lost --prompt a", "{}/lost holds adapters, and the folder of their base model"),
    ("train.sample", "{}/cut --prompt a --tokens 0", "--tokens: '0' is not a whole number from 1"),
    ("train.sample", "{}/cut --prompt a --tokenz 0", "no flag --tokenz; the nearest is --tokens"),
    ("train.simulate", "", "the following arguments are required: --preset"),
    ("train.simulate", "--preset nowhere", "There is no preset 'nowhere'"),
    ("train.simulate", "--preset qwen3-0.6b --mesh fdsp=2", "fdsp"),
    ("train.simulate", "--preset qwen3-0.6b --mesh fsdp=x", "fsdp is 'x'"),
    ("train.simulate", "--preset qwen3-0.6b --mesh tp=3", "3"),
    ("train.simulate", "--preset qwen3-0.6b --schedule 2F1B", "there is no schedule '2F1B'"),
    ("train.simulate", "--preset qwen3-0.6b --lenght 4", "no flag --lenght; the nearest is --length"),
    ("params.inspect", "", "the following arguments are required: FOLDER"),
    ("params.inspect", "{}/nowhere", "{}/nowhere: "),
    ("params.inspect", "{}/text", "{}/text: "),
    ("params.inspect", "{}/odd", "{}/odd: "),
    ("params.inspect", "{}/cut", "model.safetensors"),
    ("params.inspect", "{}/cut --verfy", "no flag --verfy; the nearest is --verify"),
    ("params.convert", "{}/nowhere", "the following arguments are required: FOLDER"),
    ("params.convert", "{}/nowhere.gguf {}/new", "{}/nowhere.gguf: "),
    ("params.convert", "{}/cut/config.json {}/new", "config.json begins with"),
    ("params.convert", "{}/text {}/new --dtype int4", "--dtype: invalid choice: 'int4'"),
    ("params.compare", "", "the following arguments are required: CHECKPOINT_FOLDER"),
    ("params.compare", "{}/nowhere", "{}/nowhere: There is no such checkpoint folder"),
    ("params.compare", "{}/odd", "{}/odd"),
    ("params.compare", "{}/cut", "model.safetensors"),
    ("params.compare", "{}/cut --length 3", "--length is 3, but must be at least 4"),
    ("params.compare", "{}/cut --length x", "--length: invalid int value: 'x'"),
    ("params.compare", "{}/cut --against jax", "--against: invalid choice: 'jax'"),
]
if find_spec("uvicorn"):  # the extra `serve`
    MISTAKES += [
        ("train.server", "{}/cut --host 0.0.0.0", "--host 0.0.0.0 is reached by other machines: set a token"),
        ("train.server", "{}/cut --slotz 2", "no flag --slotz; the nearest is --slots"),
        ("train.server", "{}/cut --slots 0", "--slots: '0' is not a whole number from 1"),
        ("train.server", "{}/nowhere", "{}/nowhere: there is no such checkpoint folder"),
        ("train.server", "{}/cut", "model.safetensors"),
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A truncated checkpoint, an unreadable one, adapters alone, a locked run"""
    path = tmp_path_factory.mktemp("place")
    (path / "text").write_text("def f(x):\n    return x\n" * 500)
    files = {
        "broken.toml": "steps = ",
        "odd.toml": "batch_row = 4",
        "wrong.toml": 'steps = "3"',
        "odd/config.json": "[",
        "odd/tokenizer.json": "{}",
        "odd/model.safetensors": "no tensors",
        "lost/adapter_config.json": '{"peft_type": "LORA", "base_model_name_or_path": "/nowhere"}',
        "locked/.lock": "",
        "empty/metrics.jsonl": "",
        "run/metrics.jsonl": '{"step": 1, "loss": 2.0}\n',
    }
    for name, text in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    cache = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(path / "cache")
    try:
        assert COMMANDS["train"](["--run", str(path / "cut"), "--data", str(path / "text"), "--steps", "1"]) == 0
        (path / "lost" / "tokenizer.json").write_bytes((path / "cut" / "tokenizer.json").read_bytes())
        weights = path / "cut" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        (path / "cut" / "fnmodels_manifest.json").unlink()
        with open(path / "locked" / ".lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield path
    finally:
        os.environ.pop("XDG_CACHE_HOME")
        os.environ.update({} if cache is None else {"XDG_CACHE_HOME": cache})


def is_sentence(error: str, place: Path, words: str) -> None:
    assert error.count("\n") == 1 and error.endswith(".\n"), error
    assert words.replace("{}", str(place)) in error, error
    assert "Traceback" not in error and "usage" not in error


@pytest.mark.parametrize(("command", "arguments", "words"), MISTAKES, ids=lambda text: str(text)[:60] or "nothing")
def test_a_mistake_is_one_sentence(
    place: Path, capsys: pytest.CaptureFixture[str], command: str, arguments: str, words: str
) -> None:
    assert COMMANDS[command](arguments.replace("{}", str(place)).split()) == 2
    is_sentence(capsys.readouterr().err, place, words)
    assert not (place / "new" / "run.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_process_exits_with_the_code(place: Path, forks: Forks, command: str) -> None:
    found = next(
        (arguments, words) for name, arguments, words in MISTAKES if name == command and "nowhere" in arguments
    )
    arguments = found[0].replace("{}", str(place)).split()
    done = forks.run(["-m", command, *arguments])
    assert done.returncode == 2
    is_sentence(done.stderr, place, found[1])


@pytest.mark.slow
@pytest.mark.parametrize("limit", [4_000, 60_000])
def test_a_full_disk_is_one_sentence_wherever_it_is_met(
    tmp_path: Path, place: Path, kill_server: KillServer, limit: int
) -> None:
    """A run writes a tokenizer, token ids, JSON, weights and a plot; its output here is smaller than any of them."""
    flags = ["--run", str(tmp_path / "run"), "--data", str(place / "text"), "--steps", "2"]
    kill_server.start("run_job_limited", flags=flags, limit=limit)
    assert kill_server.ended() == 2, kill_server.log.read_text()
    last = kill_server.log.read_text().splitlines()[-1]
    assert (
        last.startswith("python -m train: ") and last.endswith(".") and "Traceback" not in kill_server.log.read_text()
    )


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillServer]:
    made = KillServer(tmp_path_factory.mktemp("cache"))
    yield made
    made.close()


@pytest.fixture
def kill_server(shared: KillServer, tmp_path: Path) -> Iterator[KillServer]:
    shared.log = tmp_path / "log"
    shared.log.touch()
    yield shared
    shared.clear()


def test_what_is_no_mistake_of_the_user_is_not_hidden() -> None:
    def broken(_: object) -> int:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run_command("name", Parser, broken, [])


def test_too_little_memory_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    def large(_: object) -> int:
        return len(torch.empty(2**55))  # more than a process has addresses for

    assert run_command("name", Parser, large, []) == 2
    assert capsys.readouterr().err == "name: there is not enough memory for this.\n"


def test_a_panic_of_a_library_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """A regular expression of a tokenizer.json, for one, that takes more steps than its library allows."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, [], unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    assert run_command("name", Parser, lambda _: len(tokenizer.encode("a" * 40 + "b").ids), []) == 2
    assert capsys.readouterr().err.startswith("name: a library failed: ")


def test_ctrl_c_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    def stopped(_: object) -> int:
        raise KeyboardInterrupt

    assert run_command("name", Parser, stopped, []) == 130
    assert capsys.readouterr().err == "name: stopped\n"
