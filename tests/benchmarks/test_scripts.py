"""The benchmark scripts run at their smallest settings: nothing else calls them, so nothing else would see them rot."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _output(script: str, *flags: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "benchmarks" / script), *flags, "--threads", "1"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.slow
def test_train_step() -> None:
    out = _output("train_step.py", "--quick", "--contenders", "fnmodels", "--dtype", "float32")
    assert [line for line in out.splitlines() if line.startswith("| fnmodels |") and "MiB" in line], out
