"""Products of ever new shapes do not fill the memory of the main job, and its freed buffers are used again."""

import os
import subprocess
import sys

import pytest

from train.job.cpu_memory import CAPACITY, MALLOC, VARIABLES, bound_product_caches

# Large enough for oneDNN. Without the bound this keeps 0.8 MB of each shape: 640 MB more at the end, not 180.
_PRODUCTS = """
import torch
from fnmodels.ops.linear import linear
from train.job.cpu_memory import bound_product_caches

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

bound_product_caches()
torch.set_num_threads(1)
weights = [torch.randn(512, 64), torch.randn(64, 512)]
for count in range(600, 1000):
    for weight in weights:
        linear(torch.randn(count, weight.shape[1]), weight)
    if count == 600:
        begin = resident()
print(resident() - begin)
"""

_BUFFERS = """
import os, resource, subprocess, sys
import torch
from train.job.cpu_memory import keep_freed_memory

if "main" in sys.argv:
    keep_freed_memory()
torch.zeros(2**24)
begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.zeros(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin, flush=True)
if "starts another" in sys.argv:
    subprocess.run([sys.executable, "-c", os.environ["PROGRAM"]], check=True)
"""


def test_variables_that_are_set_already_stay(monkeypatch):
    monkeypatch.setenv(VARIABLES[0], "7")
    monkeypatch.delenv(VARIABLES[1], raising=False)
    bound_product_caches()
    assert [os.environ[name] for name in VARIABLES] == ["7", str(CAPACITY)]


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc")
def test_new_shapes_of_products_take_no_more_memory():
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    found = subprocess.run(
        [sys.executable, "-c", _PRODUCTS], env=environment, check=True, capture_output=True, text=True
    )
    assert float(found.stdout) < 300


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_buffers_are_used_again_by_the_main_program_and_those_it_starts():
    environment = {name: value for name, value in os.environ.items() if name not in MALLOC} | {"PROGRAM": _BUFFERS}

    def faults(*arguments: str, **variables: str) -> list[int]:
        command, given = [sys.executable, "-c", _BUFFERS, *arguments], environment | variables
        found = subprocess.run(command, env=given, check=True, capture_output=True, text=True)
        return [int(line) for line in found.stdout.split()]

    pages = 20 * 2**26 // os.sysconf("SC_PAGE_SIZE")
    assert faults()[0] > pages // 2
    assert max(faults("main", "starts another")) < pages // 10
    assert faults("main", MALLOC_TRIM_THRESHOLD_="100000")[0] > pages // 2  # what the environment says stays
