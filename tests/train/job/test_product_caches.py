"""Products of ever new shapes do not fill the memory of the main job."""

import os
import subprocess
import sys

import pytest

from train.job.product_caches import CAPACITY, VARIABLES, bound_product_caches

# Large enough for oneDNN. Without the bound this keeps 0.8 MB of each shape: 640 MB more at the end, not 180.
_PRODUCTS = """
import torch
from fnmodels.ops.linear import linear
from train.job.product_caches import bound_product_caches

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
