"""A process that raises or dies in the library form: the others name it, instead of gloo's words about a connection."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forks import ROOT, Forks

PROGRAM = """
import functools, os, sys, warnings
import torch, torch.distributed as dist
import params as P, train
from tests.support.cases import generic_params
from tests.train.parallel.test_engine import placed_params
from tests.train.parallel.test_pipeline import batch_of
from tests.train.parallel.test_stages import even
from train.engine import Engine
from train.parallel import Mesh

how, form, layout, folder = sys.argv[1:]
rank = 0 if os.fork() else 1
dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
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
os._exit(0)
"""


@pytest.mark.parametrize(
    ("how", "form", "mesh", "said"),
    [
        ("raises", "step", "fsdp=2", "step 2: process 1 raised KeyError: 'advantages'. Make"),
        ("dies", "engine", "fsdp=2", "the gradients after step 1: process 1 has ended. Make"),
        ("raises", "outputs", "pp=2", "the gradients after step 1: process 1 raised KeyError: 'advantages'. Make"),
        ("dies", "outputs", "pp=2", "the gradients after step 1: process 1 has ended. Make"),
        # after a call of `infer` that both refuse, because one had nothing
        ("raises", "refused", "fsdp=2", "the gradients after step 0: process 1 raised KeyError: 'advantages'. Make"),
    ],
)
def test_the_others_name_it(how: str, form: str, mesh: str, said: str, forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    environment = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = forks.run([script, how, form, mesh, tmp_path], environment)
    assert f"rank 0: RuntimeError: Process 0 lost its connection in {said}" in done.stdout, done.stdout + done.stderr
    assert ("rank 1: KeyError: 'advantages'" in done.stdout) == (how == "raises")
    assert done.stdout.count("refused") == (2 if form == "refused" else 0)
