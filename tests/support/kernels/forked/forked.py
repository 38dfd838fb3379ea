"""A Jupyter kernel that is a fork of a process with torch loaded, which saves five seconds per notebook of `make test`.

Jupyter starts `python forked.py CONNECTION_FILE`. That process has the server of its parent fork, hands signals on, and
ends when the kernel ends. The first one starts the server, `python forked.py --serve SOCKET PARENT`, which ends with
the parent. The server never computes: after a fork torch's threads hang where it used them.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading

# The backend of matplotlib is loaded by the kernel, for it looks for one.
LOADED = ("torch._dynamo", "matplotlib.pyplot", "ipykernel.kernelapp", "params", "train.job.run")


def start(connection_file: str) -> None:
    """What Jupyter takes for the kernel: a process that lives as long as the fork does."""
    parent = os.getppid()
    kernel = connected(os.path.join(tempfile.gettempdir(), f"fnmodels-kernels-{parent}"), parent)
    order = {"file": connection_file, "environment": dict(os.environ), "folder": os.getcwd()}
    socket.send_fds(kernel, [b"streams"], [1, 2])
    answers = kernel.makefile("rw")
    print(json.dumps(order), file=answers, flush=True)
    pid = int(answers.readline())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda which, _: os.kill(pid, which))
    answers.read()  # until the kernel ends


def connected(path: str, parent: int) -> socket.socket:
    """A connection to the server of this parent, which is started if there is none."""
    kernel = socket.socket(socket.AF_UNIX)
    try:
        kernel.connect(path)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.bind(path)
            waiting.listen()
            command = [sys.executable, __file__, "--serve", path, str(parent), str(waiting.fileno())]
            subprocess.Popen(command, pass_fds=[waiting.fileno()], start_new_session=True)
        kernel.connect(path)  # answered when all is loaded
    return kernel


def serve(path: str, parent: int, number: int) -> None:
    """Forks a kernel for each connection until the parent has ended."""
    root = os.path.abspath(os.path.join(__file__, *[os.pardir] * 5))
    sys.path[0] = root
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # as a kernel sets it before imports
    gc.disable()
    for name in LOADED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    waiting = socket.socket(fileno=number)
    waiting.settimeout(1.0)
    while lives(parent):
        with contextlib.suppress(TimeoutError):
            client, _ = waiting.accept()
            if not os.fork():
                waiting.close()
                run(client)
            client.close()
    os.unlink(path)


def lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def run(client: socket.socket) -> None:
    """The fork: a kernel as `python -m ipykernel_launcher -f FILE` starts one; never returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    client.settimeout(None)
    for number, stream in zip((1, 2), socket.recv_fds(client, len(b"streams"), 2)[1], strict=True):
        os.dup2(stream, number)
    answers = client.makefile("rw")
    order = json.loads(answers.readline())
    print(os.getpid(), file=answers, flush=True)
    threading.Thread(target=lambda: (answers.read(), os._exit(1)), daemon=True).start()  # killed with its client
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.argv = ["ipykernel_launcher", "-f", order["file"]]
    del sys.path[0]
    from ipykernel import kernelapp

    try:
        kernelapp.launch_new_instance()
    finally:
        os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        start(sys.argv[1])
