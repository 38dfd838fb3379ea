"""Runs programs in processes forked from one that has loaded verl, which takes seconds; compares verl_flow.py's finds.

    VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=train.integrations.verl OMP_NUM_THREADS=1 \\
      .venv-verl/bin/python tests/support/verl_runs.py      prints the table of benchmarks/dev/results/verl.md

With the argument "serve" it is the server: lines of JSON in, exit codes out. It never computes, for after a fork
torch's threads hang where the parent used them.
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FLOW = ROOT / "tests/support/verl_flow.py"
MODELS, MESHES = ("llama", "qwen3", "qwen3_moe", "lfm2"), ("", "fsdp=2", "tp=2", "cp=2", "pp=2", "ep=2")
Found = list[dict[str, Any]]


class Runs:
    """Runs programs, and `verl_flow.py` once for each set of arguments. Close it at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.known = folder, dict[str, Found]()
        environment = os.environ | {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "train.integrations.verl"}
        command = [sys.executable, __file__, "serve"]
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        options: dict[str, Any] = {"env": environment, "text": True, "start_new_session": True}
        self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)

    def program(self, arguments: list[Any], processes: int, device: str = "cpu") -> str:
        """What `python *arguments` prints in rank 0. device: "cuda" for verl's own engine, which is registered so."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {"VERL_ENGINE_DEVICE": device, "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
        with tempfile.TemporaryDirectory() as place:
            request = {"arguments": [*map(str, arguments)], "processes": processes, "env": environment, "place": place}
            assert self.server.stdin is not None and self.server.stdout is not None
            print(json.dumps(request), file=self.server.stdin, flush=True)
            codes = json.loads(self.server.stdout.readline())
            said = [(Path(place) / str(rank)).read_text() for rank in range(processes)]
        assert not any(codes), "\n".join(text[-3000:] for code, text in zip(codes, said, strict=True) if code)
        return said[0]

    def __call__(self, model: str, processes: int = 1, /, **settings: Any) -> Found:
        """What each rank with outputs found."""
        settings = {name: value for name, value in settings.items() if value != ""}  # mesh="" is the default
        key = json.dumps([model, processes, settings], sort_keys=True)
        if key not in self.known:
            if not (self.folder / model).exists():
                runpy.run_path(str(FLOW))["write_model"](model, self.folder / model)
            out = self.folder / f"found{len(self.known)}"
            device = "cpu" if settings["strategy"] == "fnmodels" else "cuda"
            self.program([FLOW, self.folder / model, out, json.dumps(settings)], processes, device)
            import torch

            files = sorted(self.folder.glob(f"{out.name}.*"))
            self.known[key] = [torch.load(file, weights_only=False) for file in files]
        return self.known[key]

    def pair(self, model: str, mesh: str) -> tuple[Found, Found]:
        """(ours on a mesh, verl's FSDP2 engine). Its mini-batches are of each rank's rows, so it has as many ranks."""
        theirs: dict[str, Any] = {"strategy": "fsdp2"}
        if model == "lfm2":  # in packed rows transformers' convolutions read the sequence before
            theirs |= {"use_remove_padding": False, "model": {"use_remove_padding": False}}
        rows = 2 if mesh in ("fsdp=2", "ep=2") else 1
        return self(model, 2 if mesh else 1, strategy="fnmodels", mesh=mesh), self(model, rows, **theirs)

    def close(self) -> None:
        os.killpg(self.server.pid, signal.SIGKILL)  # and programs that a failed test has left
        self.server.communicate()


def joined(found: Found, name: str) -> list[Any]:
    """Per-token outputs of all sequences, without each one's last, of which verl's and ours differ."""
    return [sequence[:-1] for rank in found for sequence in rank[name]]


def differences(ours: Found, theirs: Found, *outputs: str) -> dict[str, float]:
    """{output, "loss", "grad_norm", "lr" or "weights": largest difference}.

    That of norms is relative, and that of weights at the end is relative to the largest change of a weight.
    """
    found = dict.fromkeys((*outputs, "loss", "grad_norm", "lr"), 0.0)
    for name in outputs:
        for one, other in zip(joined(ours, name), joined(theirs, name), strict=True):
            found[name] = max(found[name], float((one - other).abs().max()))
    for one, other in zip(ours[0]["steps"], theirs[0]["steps"], strict=True):
        assert one.keys() == other.keys()
        for name in {"loss", "grad_norm", "lr"} & one.keys():
            for x, y in zip(_list(one[name]), _list(other[name]), strict=True):
                found[name] = max(found[name], abs(x - y) / (y if name == "grad_norm" else 1))
    before, after = theirs[0]["before"], theirs[0]["after"]
    names = ours[0]["before"].keys() & before.keys()  # verl sends a tied head too
    assert before.keys() - names <= {"lm_head.weight"} and ours[0]["before"].keys() == names
    assert all(bool((ours[0]["before"][name] == before[name]).all()) for name in names)
    moved = max(float((after[name] - before[name]).abs().max()) for name in names)
    assert moved > 1e-3
    return found | {"weights": max(float((ours[0]["after"][n] - after[n]).abs().max()) for n in names) / moved}


def _list(value: Any) -> list[float]:
    return value if isinstance(value, list) else [value]


def child(rank: int, arguments: list[str], env: dict[str, str], place: str) -> None:
    """Runs a program with its streams in the file place/rank; never returns."""
    out = os.open(f"{place}/{rank}", os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(out, number)
    os.environ.update(env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    runpy.run_path(str(Path(__file__).with_name("forks.py")))["execute"](arguments)


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is imported prints
    import transformers.models.auto.modeling_auto  # noqa: F401
    import verl.workers.engine_workers  # noqa: F401

    sys.stdout.flush()
    for line in sys.stdin:
        request = json.loads(line)
        processes, pids = request.pop("processes"), []
        for rank in range(processes):
            pid = os.fork()
            if not pid:
                child(rank, **request)
            pids.append(pid)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), file=answers, flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder))
        print("| model | mesh | log-probs | entropies | losses | norms, relative | weights, of what they moved |")
        print("|---|---|---|---|---|---|---|")
        for model in MODELS:
            for mesh in MESHES:
                if mesh == "ep=2" and model != "qwen3_moe":
                    continue
                try:
                    found = differences(*runs.pair(model, mesh), "log_probs", "entropy")
                except AssertionError as error:  # a mesh that is refused: the sentence
                    print(f"| {model} | {mesh} | {str(error).strip().splitlines()[-1]} |", flush=True)
                    continue
                values = (found[name] for name in ("log_probs", "entropy", "loss", "grad_norm", "weights"))
                row = " | ".join(f"{value:.1e}" for value in values)
                print(f"| {model} | {mesh or '1 process'} | {row} |", flush=True)
        runs.close()


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main()
