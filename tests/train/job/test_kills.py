"""Tests with real processes that are killed, interrupted or hit a full disk: valid files remain."""

import json
import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import params as P
from fnmodels import tree
from params.checkpoint.manifest import MANIFEST
from tests.damage import cuts
from tests.support.kill_server import CONFIG, KillServer, params_of, state_of
from train import checkpoint

pytestmark = pytest.mark.usefixtures("flushes")

SIZE = 200_000  # of each of three matrices, so that a save has some milliseconds in which it can be hit


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillServer]:
    made = KillServer(tmp_path_factory.mktemp("cache"))
    yield made
    made.close()


@pytest.fixture
def kill_server(shared: KillServer, tmp_path: Path) -> Iterator[KillServer]:
    shared.log = tmp_path / "log"
    yield shared
    shared.clear()


def seconds(save: Callable[[int], object]) -> float:
    """The duration of one save on this machine, so that kills are spread over a few saves."""
    begin = time.perf_counter()
    for step in (1, 2, 3):
        save(step)
    return (time.perf_counter() - begin) / 3


def equal(one: Any, two: Any) -> bool:
    flat, other = tree.flatten(one), tree.flatten(two)
    return flat.keys() == other.keys() and all(torch.equal(leaf, other[path]) for path, leaf in flat.items())


def whole(folder: Path, size: int = SIZE) -> int:
    """The step that `latest` finds without skipping a damaged one; its contents are checked."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = checkpoint.latest(folder)
    if found is None:
        return 0
    assert equal(checkpoint.load(found, state_of(0, size)), state_of(found.step, size))
    assert found.progress == {"seen": found.step}
    return found.step


@pytest.mark.slow
@pytest.mark.parametrize("command", ["save_steps", "save_steps_in_a_thread"])
def test_30_kills_while_saving_leave_a_whole_step(tmp_path: Path, kill_server: KillServer, command: str) -> None:
    folder, draw = tmp_path / "steps", random.Random(command)
    longest = 5 * seconds(lambda step: checkpoint.save(folder, step, state_of(step, SIZE), {"seen": step}, keep=2))
    reached, in_the_middle = 0, 0
    for _ in range(30):
        kill_server.start(command, folder=str(folder), size=SIZE)
        time.sleep(draw.uniform(0.0, longest))
        kill_server.kill()
        in_the_middle += any(folder.glob(".saving-*"))
        last, reached = reached, whole(folder)
        assert reached >= last
    assert reached > 8 and in_the_middle > 5, (reached, in_the_middle)
    checkpoint.save(folder, reached + 1, state_of(reached + 1, SIZE), {"seen": reached + 1}, keep=2)
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{n:08d}" for n in (reached, reached + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
@pytest.mark.parametrize("limits", [["5GB"], ["100KB"], ["5GB", "100KB"]], ids=["one file", "shards", "in turn"])
def test_kills_while_a_model_is_replaced(
    tmp_path: Path, kill_server: KillServer, limits: list[str], number: signal.Signals
) -> None:
    """The old model or the new one; where several files change, also an error, and the new model on request."""
    folder, draw = tmp_path / "model", random.Random(str(limits))
    longest = 5 * seconds(lambda _: P.save_pretrained(folder, CONFIG, params_of(0), max_shard_size=limits[0]))
    for _ in range(5):
        kill_server.start("save_models", folder=str(folder), limits=limits)
        time.sleep(draw.uniform(0.0, longest))
        if number == signal.SIGKILL:
            kill_server.kill()
        else:
            assert kill_server.interrupt() in (1, -number), kill_server.log.read_text()
        if limits != ["5GB"] and not (folder / "config.json").exists():
            with pytest.raises(FileNotFoundError, match="a save was cut short"):
                P.load_pretrained(folder)
            assert P.recover(folder)
        params = P.load_pretrained(folder)[1]
        assert equal(params, params_of(round(float(params["norm"][0])) - 1))  # norms begin at 1
        if (folder / MANIFEST).exists():
            P.verify(folder)


@pytest.mark.parametrize(
    ("size", "limit"),
    [(SIZE, 0), (SIZE, 100), (SIZE, 4096), (SIZE, 1_000_000), (SIZE, 12 * SIZE), (1, 200), (1, 300)],
)
def test_a_full_disk_leaves_the_older_steps(tmp_path: Path, kill_server: KillServer, size: int, limit: int) -> None:
    """A limit on file sizes that cuts the header, the data or (for a small state) the manifest."""
    folder = tmp_path / "steps"
    for step in (1, 2):
        checkpoint.save(folder, step, state_of(step, size), {"seen": step})
    largest = max(path.stat().st_size for path in (folder / "step-00000002").iterdir())
    assert limit < largest
    kill_server.start("save_one_limited", folder=str(folder), step=3, size=size, limit=limit)
    assert kill_server.ended() == 2
    text = "OSError: Step 3 was not saved (File too large); step 2 and what is before it is as it was\n"
    assert kill_server.log.read_text() == text
    assert whole(folder, size) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"]
    kill_server.start("save_one_limited", folder=str(folder), step=3, size=size, limit=largest)
    assert kill_server.ended() == 0
    assert checkpoint.steps(folder) == [1, 2, 3]


def test_a_full_disk_leaves_the_older_model(tmp_path: Path, kill_server: KillServer) -> None:
    folder = tmp_path / "model"
    P.save_pretrained(folder, CONFIG, params_of(0))
    for limit in (0, 5_000, 100_000):
        kill_server.start("save_model_limited", folder=str(folder), step=1, limit=limit)
        assert kill_server.ended() == 2
    assert (
        kill_server.log.read_text().count("The model was not saved (File too large); what the folder held before") == 3
    )
    P.verify(folder)
    assert equal(P.load_pretrained(folder)[1], params_of(0))
    assert len(list(folder.iterdir())) == 3


# The main job


STEPS = 30
SAME = ("model.safetensors", "config.json", MANIFEST, "metrics.jsonl", "summary.json")


def files(run: Path) -> dict[str, bytes]:
    """The files that must not depend on stops, the last saved step's parameters and optimizer included."""
    step = run / "steps" / f"step-{STEPS:08d}"
    return {path.name: path.read_bytes() for path in (*(run / name for name in SAME), *step.iterdir())}


@pytest.mark.slow
def test_interrupted_at_a_random_step_and_resumed_is_uninterrupted(tmp_path: Path, kill_server: KillServer) -> None:
    """Ctrl-C and SIGTERM save and exit with 130; a kill leaves the last save that the thread had finished."""
    text, draw = tmp_path / "text.txt", random.Random(5)
    text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(200)))

    def start(run: Path, *more: str) -> int:
        flags = ["--run", str(run), "--data", str(text), "--steps", str(STEPS), "--save-every", "5", *more]
        return kill_server.start("run_job", flags=flags)

    def rows(run: Path) -> int:
        return (run / "metrics.jsonl").read_text().count("\n") if (run / "metrics.jsonl").exists() else 0

    start(tmp_path / "whole")
    assert kill_server.ended() == 0, kill_server.log.read_text()
    expected = files(tmp_path / "whole")
    stopped_at = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        run = tmp_path / f"{number.name}-{len(stopped_at)}"
        target, until = draw.randrange(2, 20), time.monotonic() + 120
        pid = start(run)
        while rows(run) < target:
            assert time.monotonic() < until, kill_server.log.read_text()
            time.sleep(0.002)
        time.sleep(draw.uniform(0.0, 0.02))
        os.kill(pid, number)
        assert kill_server.ended() == (-9 if number == signal.SIGKILL else 130), kill_server.log.read_text()
        stopped_at.append(max(checkpoint.steps(run / "steps"), default=0))
        start(run, "--resume")
        assert kill_server.ended() == 0, kill_server.log.read_text()
        assert files(run) == expected
        rewritten = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert rewritten == list(range(1, STEPS + 1))
    assert "Traceback" not in kill_server.log.read_text()
    assert len(set(stopped_at)) > 1, stopped_at


@pytest.mark.slow
def test_a_run_that_ends_before_a_change_of_its_folder_and_is_resumed_is_uninterrupted(
    tmp_path: Path, kill_server: KillServer
) -> None:
    """With averaged weights, so that a save has a step, two checkpoints and their companions."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(200)))

    def start(run: Path, command: str, *more: str, **options: Any) -> int:
        flags = ["--run", str(run), "--data", str(text), "--steps", "4", "--save-every", "2", "--ema", "0.5", *more]
        kill_server.start(command, flags=flags, **options)
        return kill_server.ended()

    def content(run: Path) -> dict[str, bytes]:
        names = (*SAME, "ema/model.safetensors", "ema/tokenizer.json", "steps/step-00000004/state.safetensors")
        return {name: (run / name).read_bytes() for name in names}

    assert start(tmp_path / "whole", "run_job") == 0, kill_server.log.read_text()
    expected, ended = content(tmp_path / "whole"), 0
    for change in range(5, 400, 43):
        run = tmp_path / str(change)
        code = start(run, "run_job_cut", change=change)
        if code == 0:
            break
        assert code == cuts.CUT, kill_server.log.read_text()
        ended += 1
        assert start(run, "run_job", "--resume") == 0, kill_server.log.read_text()
        assert content(run) == expected, change
        assert not [path for pattern in (".saving*", ".writing*") for path in run.rglob(pattern)]
    assert ended >= 4
