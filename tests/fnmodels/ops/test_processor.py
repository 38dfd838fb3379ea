"""Products where the processor has no bf16 instructions, as torch's libraries see one that is held to AVX2."""

import os
import platform
import subprocess
import sys

import pytest

from tests.project.test_readme import ROOT

AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="AVX2 is of x86 processors")
def test_products_without_bf16_instructions_are_right_or_skipped_with_the_reason() -> None:
    tests = "tests/fnmodels/ops/test_linear.py"
    arguments = ["-m", "pytest", "-q", "-n", "0", "-rs", "-p", "no:cacheprovider", tests]
    done = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **AVX2}, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout
    assert "oneDNN has no bf16 products on this CPU" in done.stdout
