"""What a user meets before the first model: imports without side effects, shadowing files, and the wheel."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import tomllib
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from train import cli

ROOT = Path(__file__).parents[2]
PACKAGES = ("fnmodels", "params", "train")


def run(command: list[str | Path], cwd: Path, status: int = 0) -> str:
    """The output of a command, which sees neither the checkout nor this process's import path; checks the status."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONWARNINGS")}
    done = subprocess.run(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == status, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def python(code: str, cwd: Path, status: int = 0) -> str:
    return run([sys.executable, "-c", textwrap.dedent(code)], cwd, status)


def test_importing_and_building_change_no_global_state(tmp_path: Path) -> None:
    """Beside folders of data with the packages' names, which hide nothing."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
    python(
        """
        import logging, os, random, signal, sys, threading, warnings
        import einops, numpy, safetensors.torch, torch, torch.distributed, torch.utils.checkpoint

        def state():
            return {
                "dtype": torch.get_default_dtype(), "device": torch.get_default_device(),
                "torch seed": torch.get_rng_state().tolist(), "python seed": random.getstate(),
                "numpy seed": [part.tolist() if hasattr(part, "tolist") else part for part in numpy.random.get_state()],
                "threads": (torch.get_num_threads(), threading.active_count()), "grad": torch.is_grad_enabled(),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "matmul": torch.get_float32_matmul_precision(),
                "group": torch.distributed.is_initialized(), "environment": dict(os.environ), "folder": os.getcwd(),
                "path": list(sys.path), "argv": list(sys.argv), "warnings": list(warnings.filters),
                "log": (logging.root.level, list(logging.root.handlers)), "ctrl-c": signal.getsignal(signal.SIGINT),
            }

        before = state()
        import fnmodels, params as P, train, fnmodels.models.decoder.llama
        config = fnmodels.models.decoder.llama.Config.from_hf({
            "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
        })
        weights = P.init(config, seed=0)
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        train.next_token_loss(weights, {
            "tokens": tokens, "labels": tokens, "segment_ids": tokens + 1, "positions": torch.arange(8).expand(2, 8),
        }, config=config)
        after = state()
        changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
        assert not changed, changed
        """,
        tmp_path,
    )


def test_user_file_is_named_where_a_sibling_is_needed(tmp_path: Path) -> None:
    for hidden, asked in [("params", "train"), ("fnmodels", "params"), ("fnmodels", "train")]:
        folder = tmp_path / f"{hidden}-{asked}"
        folder.mkdir()
        (folder / f"{hidden}.py").write_text("raise SystemExit('the user file ran')\n")
        for command in (["-c", f"import {asked}"], ["-m", asked]):
            output = run([sys.executable, *command], folder, status=1)
            assert f"ImportError: {folder / hidden}.py hides the package `{hidden}`" in output
            assert "fnmodels-train" in output and "the user file ran" not in output


@pytest.mark.parametrize("used", ["fnmodels", "params", "a script"])
def test_user_file_gives_one_warning_where_no_sibling_is_needed(tmp_path: Path, used: str) -> None:
    """As a library; as the script that the user calls by that name; and with params, which has no use for train."""
    files = {name: tmp_path / f"{name}.py" for name in ("params", "train") if name != used}
    for file in files.values():
        file.write_text("import fnmodels\nprint('ran')\n")
    heavy = "{'transformers', 'tokenizers', 'matplotlib'} & set(sys.modules)"
    code = f"import {used}, sys; print('ran', sorted({heavy}))"
    output = run([sys.executable, *([str(files["params"])] if used == "a script" else ["-c", code])], tmp_path)
    for name, file in files.items():
        assert output.count(f"RuntimeWarning: {file} hides the package `{name}`") == 1
    lines = [line for line in output.splitlines() if line.startswith("ran")]
    assert lines == ["ran" if used == "a script" else "ran []"]


def test_half_imported_and_odd_modules_are_looked_at_without_a_spec(tmp_path: Path) -> None:
    python(
        """
        import sys, types, warnings
        sys.modules["params"] = None                       # blocked
        sys.modules["train"] = types.ModuleType("train")   # a module with neither file nor spec
        warnings.simplefilter("error")
        import fnmodels
        """,
        tmp_path,
    )


@pytest.mark.slow
def test_scripts_work_beside_user_files(tmp_path: Path) -> None:
    for name in PACKAGES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the user file ran')\n")
    scripts = distribution("fnmodels").entry_points.select(group="console_scripts")
    assert all(callable(script.load()) for script in scripts)
    # pip writes them alike: this one is run here, and one of the wheel below
    script = Path(sysconfig.get_path("scripts")) / "fnmodels-train"
    assert "usage" in run([script, "--help"], tmp_path).lower()
    assert "usage" in run([sys.executable, "-P", "-m", "params.inspect", "--help"], tmp_path).lower()


def test_every_program_has_a_script_which_is_what_texts_name() -> None:
    """`python -m train` runs a train.py of the working folder, which may be a stranger's."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    mains = [path for package in ("train", "params") for path in (ROOT / package).rglob("*.py") if _is_program(path)]
    modules = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in mains}
    served = {place.split(":")[0] for place in scripts.values()}
    served |= {"train.__main__", "params.compare.__main__"}  # of a package's own script
    served |= {f"train.{name}.__main__" for name in ("simulate", "eval", "rl", "recipe", "server")}
    served |= {"train.data.encoder", "train.data.chat_renderer"}  # processes that ours start
    assert modules - served == {"params.new_family"}  # which is for a checkout
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        named = re.findall(r"python -m (?:train|params)\b(?!\.new_family).*", page.read_text())
        assert page.name == "README.md" or not named, page
    assert set(re.findall(r"\bfnmodels-[a-z-]+(?=[ `])", (ROOT / "README.md").read_text())) <= scripts.keys()
    assert "python -m" not in cli.parser().format_help().partition("\n")[2]


def _is_program(path: Path) -> bool:
    return 'if __name__ == "__main__"' in path.read_text() or path.name == "__main__.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], ROOT)
    (file,) = folder.glob("*.whl")
    return file


def test_wheel_holds_the_three_packages_and_no_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(n).decode() for n in names if n.endswith(".dist-info/METADATA"))
    info = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*") if file.suffix in (".py", ".yaml")]
    sources = {file.relative_to(ROOT).as_posix() for file in files}
    assert names - info == sources | {f"{package}/py.typed" for package in PACKAGES}
    assert any(name.endswith("licenses/LICENSE") for name in info)
    core = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.MULTILINE)
    assert sorted(core) == ["einops", "numpy", "safetensors", "torch"]
    for name, floor in (("jinja2", (3, 1, 6)), ("pillow", (12, 1, 1))):  # below, strangers' files reach known holes
        versions = re.findall(rf"^Requires-Dist: {name}>=([\d.]+)", metadata, re.MULTILINE | re.IGNORECASE)
        assert versions and all(tuple(map(int, version.split("."))) >= floor for version in versions)


def test_sdist_says_what_is_promised_for_files_of_strangers(tmp_path: Path) -> None:
    run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path], ROOT)
    (file,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        assert any(name.endswith("/SECURITY.md") for name in archive.getnames())


@pytest.mark.slow
def test_installed_wheel_passes_the_smoke_test_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """A virtual environment with the wheel, and this environment's libraries after it on the path."""
    home, empty = tmp_path / "venv", tmp_path / "empty"
    empty.mkdir()
    venv.create(home, with_pip=False, symlinks=os.name != "nt")
    paths = sysconfig.get_paths(vars={"base": str(home), "platbase": str(home)})
    interpreter = Path(paths["scripts"]) / Path(sys.executable).name
    libraries = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    # a path file adds these folders but not the path files in them, so an editable install of the checkout stays out
    (Path(paths["purelib"]) / "libraries.pth").write_text("".join(f"{folder}\n" for folder in libraries))
    run([sys.executable, "-m", "pip", "--python", interpreter, "install", "--no-deps", "--no-index", wheel], empty)

    cells = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())["cells"]
    (tmp_path / "quickstart.py").write_text("\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code"))
    where = "import fnmodels, params, train; print(fnmodels.__file__, params.__file__, train.__file__)"
    programs = (ROOT / "tests" / "support" / "smoke.py", tmp_path / "quickstart.py")
    runs = "; ".join(f"runpy.run_path({str(program)!r}, run_name='__main__')" for program in programs)
    files, output = run([interpreter, "-I", "-c", f"{where}; import runpy; {runs}"], empty).split("\n", 1)
    assert all(Path(file).is_relative_to(paths["purelib"]) for file in files.split()), files
    assert "smoke test passed" in output
    for name in PACKAGES:
        (empty / f"{name}.py").write_text("raise SystemExit('the user file ran')\n")
    assert "usage" in run([Path(paths["scripts"]) / "fnmodels-inspect", "--help"], empty).lower()
