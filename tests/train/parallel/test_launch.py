"""Tests of runs by several processes: the losses of one process, output of rank 0 only, checkpoints for any number."""

import contextlib
import datetime
import hashlib
import io
import json
import math
import os
import re
import shutil
import socket
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors
import torch
import torch.distributed as dist
from torch import Tensor

import params as P
import train.job.processes.worker
from fnmodels import llama, tree
from fnmodels.errors import UserError
from tests.support.forks import Forks
from tests.support.one_process import config_of
from tests.support.pictures import leave_out_pixels
from tests.support.ranks_pool import LIMIT, ROOT, Ranks
from tests.train.job.test_finetune import checkpoint_of
from tests.train.parallel.test_load import read_by_process
from tests.train.parallel.test_simulate import compare, counted, size
from train import adamw, init_state, sharded
from train.batch import Entries
from train.checkpoint.saved_steps import Checkpoint
from train.cli import main
from train.comm import torchrun
from train.comm.dtensor import local_tree
from train.comm.failures import peer_failure
from train.eval import pretrained
from train.job import run_folder as folder
from train.job.mesh_flags import MeshSetup, resolve_mesh
from train.job.processes import controller
from train.job.processes import launch as joining
from train.job.recipe import resolved, with_optimizer_defaults
from train.job.settings import Settings
from train.job.tasks.language_model import blueprint
from train.job.tasks.language_model_checks import check_model_fits
from train.optim.base import with_paths
from train.parallel import Mesh, Strategy
from train.parallel.whole_model import fetching
from train.simulate import Work, simulate
from train.state import State

SIZES = {
    "vocab-size": 300,
    "hidden-size": 32,
    "intermediate-size": 64,
    "num-hidden-layers": 2,
    "row-length": 32,
    "batch-rows": 4,
    "steps": 6,
    "save-every": 3,
    "eval-every": 3,
    "eval-rows": 3,  # which two ranks do not divide
    "sample-tokens": 4,
    "dtype": "float32",
}

MODEL = ("vocab-size", "hidden-size", "intermediate-size", "num-hidden-layers")  # of a new one


def words(path: Path, *flags: str) -> list[str]:
    """The main job's command line, on a text beside the run folder."""
    text = path.parent / "text.txt"
    if not text.exists():
        text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(200)))
    given = {name: value for name, value in SIZES.items() if "--init" not in flags or name not in MODEL}
    sizes = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return ["--run", str(path), "--data", str(text), *sizes, *flags]


KILLED = """\
import dataclasses, logging, os, signal, sys
from torch.distributed import run
from pytest import MonkeyPatch
from tests.support.pictures import leave_out_pixels
from train import cli
from train.job.processes.worker import Worker

leave_out_pixels(MonkeyPatch())
step, made, configured = Worker.step, [], run.config_from_args

def process(*arguments):
    again = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"

    def killed(worker, batch):
        made.append(batch)
        if len(made) == 5 and os.environ["RANK"] == "3" and not again:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(worker, batch)

    Worker.step = killed
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the launcher's handler, which a fork has too
    sys.argv = [*arguments[1:-1], "fsdp=2,tp=2" if again else arguments[-1]]
    sys.exit(cli.main())

def forked(args):
    config, _, arguments = configured(args)
    return dataclasses.replace(config, start_method="fork"), process, arguments

run.config_from_args = forked
logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # its tracebacks are not those of processes
run.main()
"""


def launch(forks: Forks, path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """The main job in four processes under torchrun, which restarts them after one is killed in its fifth step.

    The restart uses another mesh; the last of `flags` is the mesh of the first start. torchrun forks them: to start
    nine interpreters takes longer than all they do.
    """
    program = path.parent / "killed.py"
    program.write_text(KILLED)
    how = ["--standalone", "--nproc-per-node", "4", "--max-restarts", "1"]
    environment = {"XDG_CACHE_HOME": str(path.parent / "cache"), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return forks.run([program, *how, program, "--", *words(path, *flags)], environment | {"PYTHONPATH": str(ROOT)})


def run_main(path: str, *flags: str) -> tuple[int, str, str]:
    """The main job in the pool's processes and their process group: (exit code, output, errors)."""
    said, errors = io.StringIO(), io.StringIO()
    environment = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    environment["XDG_CACHE_HOME"] = str(Path(path).parent / "cache")
    leave_out_pixels(pytest.MonkeyPatch())  # in this rank
    with (
        mock.patch.dict(os.environ, environment),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(errors),
        pytest.warns(UserWarning, match="The process group that is there is used as it is") as warned,
    ):
        code = main(words(Path(path), *flags))
    assert len(warned) == 1 and dist.is_initialized()
    return code, said.getvalue(), errors.getvalue()


def job(path: str, *flags: str) -> dict[str, Any]:
    """A run's output, loaded values and local shards, and the messages of a step."""
    workers: list[train.job.processes.worker.Worker] = []
    loaded: dict[str, str] = {}
    messages: dict[str, Counter[str]] = {}

    class Watched(train.job.processes.worker.Worker):
        def __init__(self, work: train.job.processes.worker.WorkerConfig) -> None:
            super().__init__(work)
            workers.append(self)

        def step(self, batch: Entries) -> tuple[State, dict[str, Any]]:
            with counted() as found:
                result = super().step(batch)
            messages.update(found)
            return result

        def load(self, found: Checkpoint) -> State:
            state = super().load(found)
            for name, values in held(state).items():
                paths, fetch = fetching(values)
                loaded.update({f"{name}.{path}": digest(fetch(path)) for path in paths})
            return state

    with mock.patch.object(controller, "Worker", Watched):
        code, said, errors = run_main(path, *flags)
    assert code == 0, errors
    (worker,) = workers
    shapes = {name: list(leaf.shape) for name, leaf in tree.flatten(local_tree(worker.state.params)).items()}
    own = {"parameters": worker.state.params, "optimizer": worker.state.opt_state}
    sizes = {name: size(local_tree(values)) for name, values in own.items()}
    return {"said": said, "loaded": loaded, "shapes": shapes, **messages, **sizes}


def held(state: State) -> dict[str, Any]:
    """The sharded leaves of a State."""
    return {"params": state.params} | {name: state.opt_state[name] for name in ("exp_avg", "exp_avg_sq")}


def digest(leaf: Tensor) -> str:
    return hashlib.sha256(leaf.numpy().tobytes()).hexdigest()


def losses(path: Path) -> list[float]:
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "grad_norm", "heldout_loss", "tokens", "sequence_balance", "router_z", "expert_load")
    return [row[name] for row in rows for name in names if name in row]


def assert_close(found: list[float], expected: list[float]) -> None:
    assert len(found) == len(expected)
    assert all(abs(a - b) < 1e-4 * abs(b) for a, b in zip(found, expected, strict=True)), (found, expected)


@pytest.mark.slow
def test_four_processes_make_the_run_of_one_and_any_number_goes_on_with_it(
    ranks: Ranks, forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(words(tmp_path / "one")) == 0
    expected, path = losses(tmp_path / "one"), tmp_path / "four"
    done = launch(forks, path, "--mesh", "pp=2,fsdp=2")
    assert done.returncode == 0, done.stderr
    assert_close(losses(path), expected)
    # of the first start and of the second one
    assert done.stdout.count("reading the text") == 2 and done.stdout.count("resuming at step 3 of 6") == 1
    assert len(re.findall(r"^step 6/6", done.stdout, re.MULTILINE)) == 1
    # The others have ended by themselves, and not by torchrun half a minute later. It asks them to end, which the first
    # one heeds when it is on its way out already, and then says nothing more.
    ends = re.findall(
        r"^python -m train: process (\d) of the run ends, for another has ended", done.stderr, re.MULTILINE
    )
    assert sorted(ends) == ["1", "2"], done.stderr
    assert done.stderr.count("Traceback") == 0, done.stderr
    (config, weights), (_, plain) = P.load_pretrained(path), P.load_pretrained(tmp_path / "one")
    same_weights(weights, plain)
    whole = tree.flatten(plain)
    for step, mesh in ((3, Mesh(pp=2, fsdp=2)), (6, Mesh(fsdp=2, tp=2))):  # before the kill, and after it
        files = sorted((path / "steps" / f"step-{step:08d}").glob("*.safetensors"))
        assert len(files) == 4
        for rank, file in enumerate(files):
            with safetensors.safe_open(file, "pt") as opened:  # what the process had: parts of its stage's matrices
                wrote = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118 - no dict
            parts = {
                f"{part}.{name}": leaf.numel() // mesh.fsdp // mesh.tp
                for part in ("params", "opt_state.exp_avg", "opt_state.exp_avg_sq")
                for name, leaf in whole.items()
                if name.endswith("_proj") and (mesh.pp == 1 or name.startswith(f"layers.{rank // 2}."))
            }
            assert {name: math.prod(shape) for name, shape in wrote.items() if name.endswith("_proj")} == parts

    shutil.rmtree(path / "steps" / "step-00000006")
    found = sharded.latest(path / "steps")
    assert found is not None and found.step == 3
    optimizer = adamw(0.1, spec=llama.spec(config))
    state = sharded.load(found, init_state(plain, optimizer))
    values = {f"{name}.{path}": leaf for name, part in held(state).items() for path, leaf in tree.flatten(part).items()}
    saved = {name: digest(leaf) for name, leaf in values.items()}
    flags = {"pp=2,fsdp=2": ("--schedule", "GPipe", "--microbatches", "2")}
    for mesh in ("pp=2,fsdp=2", "fsdp=2", None):  # and fsdp=2,tp=2 above, after the kill
        if mesh is None:
            assert main([*words(path), "--resume"]) == 0
        else:
            results = ranks(Mesh.parse(mesh).world)(job, str(path), "--resume", "--mesh", mesh, *flags.get(mesh, ()))
            assert all(result["loaded"] == saved for result in results)
            assert "resuming at step 3 of 6" in results[0]["said"] and not any(result["said"] for result in results[1:])
            check_parts(mesh, [result["shapes"] for result in results], whole)
            check_messages(Mesh.parse(mesh), results, config)
            # One that trains the whole model is none of them.
            kept = {"parameters": size(plain), "optimizer": size(state.opt_state)}
            alone = {
                "shapes": {name: list(leaf.shape) for name, leaf in whole.items()},
                "count": {},
                "bytes": {},
                **kept,
            }
            with pytest.raises(AssertionError):
                check_parts(mesh, [*(result["shapes"] for result in results[:-1]), alone["shapes"]], whole)
            with pytest.raises(AssertionError):
                check_messages(Mesh.parse(mesh), [*results[:-1], alone], config)
            with pytest.raises(AssertionError):
                check_messages(Mesh.parse(mesh), [results[0] | kept, *results[1:]], config)
        assert_close(losses(path), expected)
        shutil.rmtree(path / "steps" / "step-00000006")


@pytest.mark.slow
def test_experts_are_balanced_and_adapters_train_as_in_one_process(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    init = ("--init", str(checkpoint_of(tmp_path / "base", config_of("deepseek", 4))))
    init += ("--steps", "4", "--save-every", "2", "--eval-every", "2")

    def run(name: str, mesh: str, *flags: str) -> None:
        results = ranks(Mesh.parse(mesh).world)(run_main, str(tmp_path / name), *init, *flags, "--mesh", mesh)
        assert all(code == 0 for code, *_ in results), results

    balance = ("--balance-loss", "0.5", "--router-z-loss", "0.25", "--balance-rate", "0.125")
    balance += ("--ema", "0.8", "--label-smoothing", "0.1", "--z-loss", "1e-3")
    assert main(words(tmp_path / "alone", *init, *balance)) == 0
    run("experts", "pp=2,ep=2", *balance)
    assert len(losses(tmp_path / "alone")) == 4 * 6 + 2
    assert_close(losses(tmp_path / "experts"), losses(tmp_path / "alone"))
    for part in ("", "ema"):  # the last weights, and their average, of which the held-out losses are
        same_weights(*(P.load_pretrained(tmp_path / name / part)[1] for name in ("experts", "alone")))

    adapters = ("--lora", "r=2,alpha=8,targets=layers.3.*.q_b_proj+layers.3.*.o_proj", "--learning-rate", "0.03")
    adapters += ("--ema", "0.8")
    assert main(words(tmp_path / "one", *init, *adapters)) == 0
    expected, path = pretrained.load_model(tmp_path / "one")[1], tmp_path / "four"

    def same_adapters() -> None:
        assert_close(losses(path), losses(tmp_path / "one"))
        same_weights(pretrained.load_model(path)[1], expected)
        same_weights(*(pretrained.load_model(run / "ema")[1] for run in (path, tmp_path / "one")))
        for file in ("adapter_config.json", "tokenizer.json"):
            assert (path / file).read_bytes() == (tmp_path / "one" / file).read_bytes()
        assert not (path / "config.json").exists() and not (path / "model.safetensors").exists()

    how = ("--mesh", "cp=2,tp=2", "--sequence", "--context", "ulysses", "--order", "head_tail")
    for result in ranks(4)(job, str(path), *init, *adapters, *how):
        assert {"reduce_scatter", "all_to_all"} <= result["count"].keys()  # of columns between sublayers, and of heads
    same_adapters()
    moved = tree.flatten(P.lora.adapters(expected))
    assert all(leaf.abs().max() > 0.01 for leaf in moved.values())  # b began at 0
    wrote = set[str]()
    for file in (path / "steps" / "step-00000002").glob("*.safetensors"):
        with safetensors.safe_open(file, "pt") as opened:
            wrote |= set(opened.keys())
    moments = ("opt_state.inner.exp_avg", "opt_state.inner.exp_avg_sq", "opt_state.ema")
    saved = {f"{part}.{name}" for part in ("params", *moments) for name in moved}
    assert wrote == saved | {"step", "opt_state.inner.step"}
    for mesh in ("pp=2,fsdp=2", None):  # where one process has no adapter
        shutil.rmtree(path / "steps" / "step-00000004")
        if mesh is None:
            assert main([*words(path, *init), "--resume"]) == 0
        else:
            run("four", mesh, "--resume", "--schedule", "Interleaved1F1B", "--virtual", "2")
        same_adapters()


def same_weights(found: Any, expected: Any) -> None:
    flat = tree.flatten(expected)
    for name, leaf in tree.flatten(found).items():
        torch.testing.assert_close(leaf, flat.pop(name), rtol=0, atol=1e-4, msg=name)
    assert not flat


def begun(folder: str | None, base: str) -> tuple[int, int]:
    """(bytes that a rank reads to initialize, number of its leaves that equal their shard of the full model)."""
    mesh, config = Mesh(pp=2, fsdp=2), P.load_config(base)
    settings = resolved(Settings(dtype="float32", learning_rate=1e-3, init=folder, seed=5))
    worker_config = train.job.processes.worker.WorkerConfig(MeshSetup(mesh), settings, blueprint(config, settings))
    worker = train.job.processes.worker.Worker(worker_config)
    before = read_by_process()
    state = worker.initialize(True)
    read = read_by_process() - before
    whole = pretrained.load_model(Path(folder), merge=True)[1] if folder else P.init(config, 5)
    plans, flat = tree.flatten(worker.programs.plan), tree.flatten(whole)
    here = tree.flatten(local_tree(state.params))
    assert here.keys() == plans.keys()
    assert all(torch.equal(leaf, flat[path][plans[path].local_box()]) for path, leaf in here.items())
    return read, len(here)


def test_each_process_reads_or_draws_its_own_part(ranks: Ranks, tmp_path: Path) -> None:
    base, adapters = tmp_path / "base", tmp_path / "adapters"
    config = llama.Config(512, 64, 256, 4, 4, 2)
    params = P.init(config, 1)
    P.save_pretrained(base, config, params)
    adapted = with_paths(lambda p, x: x + 1 if p.endswith(".b") else x, P.lora.add(config, params, rank=2))
    P.lora.save_adapters(adapters, config, adapted, base=str(base))
    size = (base / "model.safetensors").stat().st_size
    for init in (str(base), str(adapters), None):
        for read, leaves in ranks(4)(begun, init, str(base)):
            assert 10 < leaves < len(tree.leaves(params)) and read < 0.4 * size


def check_parts(mesh: str, shapes: list[dict[str, list[int]]], whole: dict[str, Tensor]) -> None:
    """Each rank has only the shards of its own layers; the tied embedding is on the first and last stage."""
    sizes = Mesh.parse(mesh)
    for rank, own in enumerate(shapes):
        stage = rank * sizes.pp // sizes.world
        ends = {"embed_tokens"} if stage == 0 else {"embed_tokens", "norm"}
        if sizes.pp > 1:
            assert own.keys() == ends | {name for name in whole if name.startswith(f"layers.{stage}.")}
        else:
            assert own.keys() == whole.keys()
        for name, shape in own.items():
            if name.endswith("_proj") or name == "embed_tokens":
                assert sizes.fsdp * sizes.tp * math.prod(shape) == whole[name].numel(), name


def check_messages(mesh: Mesh, results: list[dict[str, Any]], config: Any) -> None:
    """The messages of a run's steps, in number and size as simulated, and the memory of each rank."""
    parts = 2 if mesh.pp > 1 else 1
    work = Work(SIZES["batch-rows"], SIZES["row-length"], parts, dtype=torch.float32)
    for place, facts in enumerate(simulate(config, mesh, work)):
        same = mesh.world // mesh.pp
        compare(results[place * same : (place + 1) * same], facts)


def test_a_mistake_is_one_sentence_and_all_end(ranks: Ranks, tmp_path: Path) -> None:
    (code, _, said), (other, *nothing) = ranks(2)(run_main, str(tmp_path / "run"), "--mesh", "fsdp=3")
    assert code == other == 2 and nothing == ["", ""]
    assert said == (
        "python -m train: --mesh fsdp=3 is of 3 processes, and there are 2: give torchrun "
        "--nproc-per-node 3, or leave torchrun out: fnmodels-train starts them itself.\n"
    )
    whole = ("--mesh", "fsdp=2", "--optimizer", "adafactor", "--ema", "0.9")
    (code, _, said), (other, *nothing) = ranks(2)(run_main, str(tmp_path / "run"), *whole)
    assert code == other == 2 and nothing == ["", ""]
    assert said.startswith("python -m train: --mesh fsdp=2: The optimizer needs full leaves, and embed_tokens is")


def test_a_failed_rendezvous_is_reported_and_ends_the_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each rank reports it, as rank 0 may be the missing one."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun has one
    with socket.socket() as bound:  # no process listens
        bound.bind(("127.0.0.1", 0))
        places = {"torchrun": store.port, "closed port": bound.getsockname()[1]}
        monkeypatch.setattr(joining, "JOIN_TIMEOUT", datetime.timedelta(seconds=0.7))
        monkeypatch.setenv("WORLD_SIZE", "3")
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        for rank, place, expected in (
            (1, None, "environment variable MASTER_ADDR expected, but not set."),
            (1, "closed port", f"(127.0.0.1, {places['closed port']})"),
            (0, "torchrun", "could not join the others: of them 1, 2 did not come in 0.7 seconds."),
            (0, "own start", "could not join the others: of them 1, 2 did not come in 0.7 seconds."),
        ):
            monkeypatch.setenv("RANK", str(rank))
            if place == "own start":
                monkeypatch.setenv(torchrun.STORE, str(tmp_path / "store"))
            elif place:
                monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
                monkeypatch.setenv("MASTER_PORT", str(places[place]))
            assert main(words(tmp_path / "run", "--mesh", "fsdp=3")) == 2
            (said,) = re.findall(rf"^python -m train: process {rank} of 3 .*$", capfd.readouterr().err, re.MULTILINE)
            assert expected in said
    assert not dist.is_initialized() and not (tmp_path / "run").exists()


def hung() -> list[str | None]:
    """[rank 0's error about the other rank, which is late, and the last value that came in time]."""
    limit, late = datetime.timedelta(seconds=0.2), dist.get_rank() == 1
    box = [None if late else "in time"]
    group = dist.new_group()
    joining.set_timeout(limit, dist.group.WORLD, group)
    time.sleep(0.0 if late else 0.7)  # reading the text
    with joining.with_long_timeout(limit):
        dist.broadcast_object_list(box, src=0)
    joining.set_timeout(LIMIT, dist.group.WORLD)
    try:
        time.sleep(0.7 if late else 0.0)
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        return [peer_failure(error), box[0]]
    finally:
        dist.destroy_process_group(group)
    return [None, box[0]]


def test_a_process_that_hangs_is_waited_for_as_long_as_is_said_but_the_first_longer(ranks: Ranks) -> None:
    (first, _), (second, came) = ranks(2)(hung)
    assert "Timed out waiting 200ms" in first and second and came == "in time"


def test_only_what_torchrun_has_begun_is_gone_on_with_unasked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.json").touch()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for begun, said in (
        ("none elsewhere 1", "the folder is not empty: add --resume to continue its run"),
        (torchrun.launch_id(), "the folder holds files that no run wrote"),  # as with --resume
    ):
        folder.acquire(path, begun)
        assert main(words(path)) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "where", "raised", "sent"),
    [
        (RuntimeError("[gloo/tcp/pair.cc:537] Broken pipe"), "command", UserError, ["setup", "initialize"]),
        (RuntimeError("Application timeout caused pair closure"), "command", UserError, ["setup", "initialize"]),
        (dist.DistNetworkError("Socket closed"), "command", UserError, ["setup", "initialize"]),
        (KeyError("a bug"), "command", KeyError, ["setup", "initialize"]),
        (KeyboardInterrupt(), "command", KeyboardInterrupt, ["setup", "initialize"]),
        (KeyError("a bug"), "between", KeyError, ["end"]),
        (RuntimeError("[gloo/tcp/pair.cc:537] Broken pipe"), "between", RuntimeError, ["end"]),
    ],
)
def test_the_end_of_a_run_is_sent_between_commands_only(
    error: BaseException, where: str, raised: type[BaseException], sent: list[str]
) -> None:
    """During a command another message would be taken for part of it; the others notice that rank 0 has ended."""

    def run() -> int:
        if where == "between":
            raise error
        controller.Controller(mock.Mock(mesh_setup=MeshSetup(Mesh(fsdp=2))), fresh=True)
        raise AssertionError

    acts: list[str] = []
    worker = mock.Mock(**{"return_value.initialize.side_effect": error})
    with (
        mock.patch.object(controller, "_send", lambda message: acts.append(message[0])),
        mock.patch.object(controller, "Worker", worker),
        pytest.raises(raised) as caught,
    ):
        controller.lead(run)
    assert acts == sent
    if raised is UserError:
        assert str(caught.value).startswith("another process of the run has ended or hangs, and so this one ends: ")
    else:
        assert caught.value is error


def test_what_an_error_in_a_stage_came_of_is_said() -> None:
    bug, wrapped = ValueError("a bug"), RuntimeError("[Stage 1] failed to run forward")
    assert peer_failure(bug) is None
    wrapped.__cause__ = bug
    assert peer_failure(wrapped) is None
    bug.__context__ = RuntimeError(
        "[gloo/pair.cc:537] Read error: reset by peer. This is typically caused by a worker."
    )
    assert peer_failure(wrapped) == "[gloo/pair.cc:537] Read error: reset by peer"


@pytest.mark.parametrize(
    ("mesh", "settings", "said"),
    [
        (None, {}, "there are 4 processes: say how they share the work, as with --mesh fsdp=4"),
        ("fdsp=4", {}, "--mesh fdsp=4: 'fdsp' is no dimension of a mesh"),
        ("fsdp=2", {}, "--mesh fsdp=2 is of 2 processes, and there are 4"),
        ("dp=4", {"accumulate": 2}, "leaves each rank 1 of the 4 rows of a batch: too few for --accumulate 2"),
        ("dp=4", {"compile": "whole"}, "cannot be compiled into one graph: take --compile block"),
        ("ep=4", {"compile": "block"}, "reads how many tokens each expert has: leave --compile block out"),
        ("dp=4", {"compile": "block", "remat": "selective"}, "--remat selective selects single operations"),
        ("dp=4", {"lora": "r=2,dora"}, "--mesh dp=4: DoRA is for one process: leave dora out of --lora r=2,dora"),
        ("pp=4", {"accumulate": 2}, "a pipeline accumulates over --microbatches"),
        ("dp=4", {"batch_rows": 6}, "splits the rows of a batch over 4 ranks, and --batch-rows is 6"),
        ("dp=4", {"schedule": "GPipe"}, "--schedule GPipe is for pipelines, and --mesh dp=4 has none"),
        ("dp=4", {"sequence": True}, "--sequence is for tensor parallelism, and --mesh dp=4 has none"),
        ("tp=4", {"order": "mask"}, "--order mask is for context parallelism, and --mesh tp=4 has none: leave it out"),
        ("cp=4", {"virtual": 2}, "--virtual 2 is for pipelines, and --mesh cp=4 has none"),
        ("cp=4", {"context": "ring", "compile": "block"}, 'context="ring" asks the host'),
        ("pp=4", {"schedule": "GPipes"}, "--schedule GPipes is not one of GPipe, 1F1B, "),
        ("pp=2,dp=2", {"microbatches": 3}, "--microbatches 3 does not divide the 2 rows of a batch that a stage has"),
    ],
)
def test_what_cannot_be_shared_so_is_said_before_the_text_is_read(
    monkeypatch: pytest.MonkeyPatch, mesh: str | None, settings: dict[str, Any], said: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    names = ("schedule", "virtual", "microbatches", "context", "order", "sequence")
    flags = {name: settings.pop(name) for name in names if name in settings}
    with pytest.raises(UserError, match=re.escape(said)):
        resolve_mesh(mesh, Settings(**settings), **flags)


def test_flags_beside_the_mesh_are_its_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    flags = {"sequence": True, "order": "head_tail", "schedule": "LoopedBFS", "virtual": 3}
    found = resolve_mesh("pp=2,cp=2,tp=2", Settings(), context="ring", microbatches=2, **flags)
    assert found == MeshSetup(Mesh(pp=2, cp=2, tp=2), Strategy(context="ring", **flags), 2)
    unsaid = dict.fromkeys(flags) | {"sequence": False}
    ulysses = resolve_mesh("cp=8", Settings(), context="ulysses", **unsaid)
    assert ulysses.strategy == Strategy(context="ulysses", order=None)
    assert resolve_mesh("cp=8", Settings(), context=None, **unsaid).strategy == Strategy()


@pytest.mark.parametrize(
    ("mesh_setup", "said"),
    [
        (MeshSetup(Mesh(cp=4)), "splits the tokens of a row over 4 ranks, and a row has 30"),
        (MeshSetup(Mesh(tp=3)), "--mesh tp=3: .*not a multiple of 3"),
        (
            MeshSetup(Mesh(cp=2), Strategy(order="head_tail")),
            "--mesh cp=2: head-tail order on 2 ranks needs",
        ),
        (MeshSetup(Mesh(tp=2, cp=2), Strategy(context="ulysses")), "--context ulysses distributes heads, and --mesh "),
        (MeshSetup(Mesh(pp=2), Strategy(virtual=2), 4), "--mesh pp=2: virtual is 2; 1F1B has 1 stages per rank"),
        (MeshSetup(Mesh(pp=3), microbatches=4), "--mesh pp=3: 3 ranks .* more than the model's 2 layers"),
        (MeshSetup(Mesh(pp=2)), "--mesh pp=2: 1F1B needs at least as many microbatches as stages, 2, not 1"),
        (MeshSetup(Mesh(tp=2)), "--mesh tp=2: .*leave it out of the targets of --lora r=2,targets=lm_head"),
    ],
)
def test_a_model_that_does_not_divide_is_named(mesh_setup: MeshSetup, said: str) -> None:
    config = llama.Config(64, 16, 24, 2, 4, 2, max_position_embeddings=30)
    settings = with_optimizer_defaults(Settings(lora="r=2,targets=lm_head", dtype="float32"))
    check_model_fits(MeshSetup(Mesh(cp=2), Strategy(context="ulysses", order=None)), settings, config)
    with pytest.raises(UserError, match=said):
        check_model_fits(mesh_setup, settings, config)
