"""A process that raises or dies in the library form: the others name it, instead of gloo's words about a connection."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.support.forks import ROOT, Forks

PROGRAM = """
import functools, json, os, sys, warnings
import torch, torch.distributed as dist
import params as P, train
from tests.support.cases import generic_params
from tests.train.parallel.test_engine import placed_params
from tests.train.parallel.test_pipeline import batch_of
from tests.train.parallel.test_stages import even
from train.engine import Engine
from train.parallel import Mesh

folder, runs = sys.argv[1], json.loads(sys.argv[2])

def main(number, how, form, layout):
    # one of the runs, by two processes
    rank = 0 if os.fork() else 1
    dist.init_process_group("gloo", f"file://{folder}/store{number}", rank=rank, world_size=2)
    config, mesh = even("llama_tied"), Mesh.parse(layout)
    mesh.device_mesh("cpu")
    batch, optimizer, steps = batch_of(config, 4), train.sgd(0.1), []

    def loss(params, batch, config=config):
        fail()
        return train.next_token_loss(params, batch, config=config, kernel="math")

    def outputs(logp, entropy, batch):
        fail()
        return -logp.sum(), (batch["labels"] != -100).sum()

    def fail():
        if rank == 1 and len(steps) == 2:
            if how == "dies":
                os._exit(9)
            raise KeyError("advantages")

    warnings.simplefilter("ignore")
    params = placed_params(config, mesh, generic_params(config))
    try:
        if form == "step":
            step = train.make_step(functools.partial(loss, config=config), optimizer, mesh=mesh)
            state = train.init_state(params, optimizer)
            for number in range(2):
                steps.append(number)
                state, _ = step(state, batch)
        elif form == "outputs":
            run = train.logprob_loss(outputs, config=config, kernel="math")
            engine = Engine(config, params, optimizer, mesh=mesh)
            for number in range(2):
                steps.append(number)
                engine.forward_backward([batch, batch], run)
                engine.optim_step()
        elif form == "refused":
            run = functools.partial(loss, config=config)
            engine = Engine(config, params, optimizer, mesh=mesh)
            try:
                engine.infer([batch] * rank, run)
            except ValueError:
                print(f"rank {rank}: refused", flush=True)
            steps += [0, 1]
            engine.forward_backward([batch], run)
        else:
            run = functools.partial(loss, config=config)
            engine = Engine(config, params, optimizer, mesh=mesh)
            for number in range(2):
                steps.append(number)
                engine.forward_backward([batch], run)
                engine.optim_step()
    except Exception as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
    if not rank:
        os.wait()
    os._exit(0)

for number, run in enumerate(runs):
    print(f"run {number}", flush=True)
    if not (pid := os.fork()):
        main(number, *run)
    os.waitpid(pid, 0)
"""


# how, form, mesh, what the other says
RUNS = [
    ("raises", "step", "fsdp=2", "step 2: process 1 raised KeyError: 'advantages'. Make"),
    ("dies", "engine", "fsdp=2", "the gradients after step 1: process 1 has ended. Make"),
    ("raises", "outputs", "pp=2", "the gradients after step 1: process 1 raised KeyError: 'advantages'. Make"),
    ("dies", "outputs", "pp=2", "the gradients after step 1: process 1 has ended. Make"),
    # after a call of `infer` that both refuse, because one had nothing
    ("raises", "refused", "fsdp=2", "the gradients after step 0: process 1 raised KeyError: 'advantages'. Make"),
]


def test_the_others_name_it(forks: Forks, tmp_path: Path) -> None:
    """One program makes all runs, whose imports take longer than they do."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = forks.run([script, tmp_path, json.dumps([run[:3] for run in RUNS])], environment)
    outputs = re.split(r"^run \d\n", done.stdout, flags=re.MULTILINE)[1:]
    assert len(outputs) == len(RUNS), done.stdout + done.stderr
    for (how, form, _, said), output in zip(RUNS, outputs, strict=True):
        assert f"rank 0: RuntimeError: Process 0 lost its connection in {said}" in output, output + done.stderr
        assert ("rank 1: KeyError: 'advantages'" in output) == (how == "raises"), output
        assert output.count("refused") == (2 if form == "refused" else 0), output
