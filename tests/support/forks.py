"""Runs Python programs in forked processes that have torch and transformers loaded already, to save start-up time.

    done = forks.run([ROOT / "benchmarks" / "save.py", "--size", "1"])    # a script, or
    done = forks.run(["-m", "train", "--help"])                           # a module

The result is that of `subprocess.run([sys.executable, ...])`, but faster: exit code and both streams. A program that
depends on what is imported or on how Python was started needs its own interpreter.

`python -m tests.support.forks` is the server: lines of JSON in and out. It never computes, for after a fork
torch's threads hang where the parent used them.
"""

import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# slow imports, done before forking
PRELOADED = ("torch._dynamo", "transformers.models.auto.modeling_auto", "params", "train.job.run")
PRELOADED += ("train.job.processes.spawn", "torch.distributed.fsdp", "torch.distributed.tensor")
PRELOADED += ("pytest", "tests.support.status")


class Forks:
    """The client; starts the server at the first call."""

    def __init__(self) -> None:
        self.server: subprocess.Popen[str] | None = None

    def run(
        self, arguments: list[str | Path], env: dict[str, str] | None = None, cwd: Path = ROOT
    ) -> subprocess.CompletedProcess[str]:
        """Runs `python *arguments` (a script, or -m and a module) in `cwd`. env: additions to the environment."""
        if self.server is None:
            command = [sys.executable, "-m", "tests.support.forks"]
            self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.server.stdin and self.server.stdout
        words = [str(word) for word in arguments]
        with tempfile.TemporaryDirectory() as place:
            request = {"arguments": words, "env": {**os.environ, **(env or {})}, "cwd": str(cwd), "place": place}
            self.server.stdin.write(json.dumps(request) + "\n")
            self.server.stdin.flush()
            code = int(self.server.stdout.readline())
            out, err = ((Path(place) / name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(words, code, out, err)

    def close(self) -> None:
        if self.server is not None:
            self.server.kill()  # it is idle between two programs
            self.server.communicate()


def child(arguments: list[str], env: dict[str, str], cwd: str, place: str) -> None:
    """Runs the program as the interpreter would; never returns."""
    for number, name in ((0, os.devnull), (1, f"{place}/out"), (2, f"{place}/err")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    beside = cwd if arguments[0] == "-m" else str(Path(arguments[0]).parent)
    sys.path[:1] = [beside, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.orig_argv = [sys.executable, *arguments]  # what a program that starts itself again goes by
    execute(arguments)


def execute(arguments: list[str]) -> None:
    """Runs a script, or -m and a module, as the interpreter would; never returns."""
    code: Any = 0
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else bool(code))


def serve() -> None:
    gc.disable()
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # programs that collect garbage do not look at the modules: that takes 0.2 s each time
    gc.enable()
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            child(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
