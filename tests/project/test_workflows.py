"""The files of .github and the hooks of pre-commit: their form, by the published schemas, and what they name."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "vendor.github-issue-forms": sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")),
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
}


def schema_faults(schema: str, paths: list[Path]) -> list[dict[str, str]]:
    if find_spec("check_jsonschema") is None:
        pytest.skip("check-jsonschema is not installed: make bridges installs it")
    command = [sys.executable, "-m", "check_jsonschema", "--output-format", "json", "--builtin-schema", schema]
    done = subprocess.run([*command, *map(str, paths)], capture_output=True, text=True)
    report = json.loads(done.stdout)
    return [*report.get("errors", []), *report.get("parse_errors", [])]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_have_the_form_of_their_schema(schema: str) -> None:
    assert SCHEMAS[schema]
    assert schema_faults(schema, SCHEMAS[schema]) == []


def test_a_misspelt_key_of_a_workflow_is_found(tmp_path: Path) -> None:
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    (tmp_path / "tests.yml").write_text(text.replace("runs-on: ubuntu-latest", "runs_on: ubuntu-latest", 1))
    assert schema_faults("vendor.github-workflows", [tmp_path / "tests.yml"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_name_targets_jobs_and_versions_that_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    jobs = yaml.safe_load(path.read_text())["jobs"]
    for name, job in jobs.items():
        commands = "\n".join(step.get("run", "") for step in job["steps"])
        assert set(re.findall(r"^make (\w+)", commands, re.MULTILINE)) <= targets, name
        assert {job.get("needs", name)} <= set(jobs), name
        assert job["timeout-minutes"] <= 120, name
        matrix = job.get("strategy", {}).get("matrix", {})
        used = set(re.findall(r"matrix\.(\w+)", json.dumps(job["steps"])))
        assert used == set(matrix), name


def test_the_fast_lane_runs_on_every_python_from_the_oldest_that_is_supported() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    pythons = jobs["fast"]["strategy"]["matrix"]["python"]
    oldest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest and pythons[0] == oldest[1]
    assert pythons == [f"3.{minor}" for minor in range(int(pythons[0][2:]), int(pythons[0][2:]) + len(pythons))]
