"""Steps of decoding compiled to files equal steps without a compiler, and a file is of one model, size and machine."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fnmodels
import params as P
import train
from fnmodels.cache import saved
from fnmodels.cache.saved import SavedStep, saved_step
from tests.params.test_weight_forms import WIDE
from tests.support.cases import Case, cases, generic_params, off, short
from tests.support.traced import quickly_compiled
from train.generation import compile_choice
from train.generation.compile_choice import explain_compile, roomy

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
SMALL = replace(WIDE, num_hidden_layers=1, layer_kinds=("full",))
# Latent attention with experts, a convolution: few layers, for AOTInductor compiles each for ten seconds. Rings are
# captured by test_compiled_step.py.
STRUCTURES = [short(case) for case in cases() if case.name in ("deepseek_v2_lite", "lfm2_bias_untied")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for the files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    saved._codes.clear()
    with quickly_compiled():
        yield tmp_path / "fnmodels"
    saved._codes.clear()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a cache that keeps the files of SMALL for two rows and 256 slots: each takes ten seconds."""
    return tmp_path_factory.mktemp("compiled")


def compare(step: SavedStep, config: Any, rows: int, room: int, steps: int, start: int = 5) -> None:
    """Both ways from a prompt; rows end one after the other where there are several."""
    params = step.params
    tokens = torch.arange(rows * (start + steps)).reshape(rows, -1) % config.vocab_size
    prompt = fnmodels.prepare_step(config, tokens[:, :start], fnmodels.init_cache(config, rows, room))
    one, other = (
        fnmodels.decode_(params, *prompt, fnmodels.init_cache(config, rows, room), config=config)[1] for _ in range(2)
    )
    for t in range(steps):
        now = tokens[:, start + t, None]
        ids = (torch.arange(rows)[:, None] * 3 <= steps - t).long()
        logits, one = step(params, now, one, segment_ids=ids)
        prepared = fnmodels.prepare_step(config, now, other, segment_ids=ids)
        wanted, other = fnmodels.decode_(params, *prepared, other, config=config)
        valid = ids[:, 0] > 0
        assert off(logits[valid], wanted[valid]) < 2e-5
    for kind, slots in one.slots.items():
        assert torch.equal(slots.segments, other.slots[kind].segments)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("case", STRUCTURES, ids=str)
def test_every_structure(case: Case, folder: Path) -> None:
    step = saved_step(case.config, generic_params(case.config, torch.float32))
    assert step is not None
    compare(step, case.config, rows=2, room=24, steps=12)


@needs_compiler
@pytest.mark.slow
def test_blocks_of_slots_and_a_second_process(folder: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps across a border of blocks until the cache is full; then from the file, without a compiler."""
    params = generic_params(SMALL, torch.float32)
    step = saved_step(SMALL, params)
    assert step is not None
    compare(step, SMALL, rows=2, room=256, steps=72, start=120)
    assert len(list(folder.glob("step-*.pt2"))) == 1
    compare(step, SMALL, rows=2, room=256, steps=3, start=253)  # reads all slots
    assert len(list(folder.glob("step-*.pt2"))) == 2
    saved._codes.clear()  # as another process
    monkeypatch.setattr(saved, "_compiled", lambda *_: pytest.fail("It was compiled anew."))
    cache = fnmodels.init_cache(SMALL, 2, 256)
    assert step.is_ready(cache) and not step.is_ready(fnmodels.init_cache(SMALL, 1, 256))
    compare(step, SMALL, rows=2, room=256, steps=4)
    shutil.copytree(folder, compiled / folder.name, dirs_exist_ok=True)
    for path in folder.glob("step-*"):
        path.write_bytes(b"no package")
    saved._codes.clear()
    with pytest.raises(pytest.fail.Exception, match="compiled anew"):
        compare(step, SMALL, rows=2, room=256, steps=1)
    assert len(list(folder.glob("step-*"))) == 1  # the damaged file is gone


@needs_compiler
@pytest.mark.slow
def test_generate_takes_files_that_are_ready(folder: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled here, or by the test above."""
    params = generic_params(SMALL, torch.float32)
    how: dict[str, Any] = {"max_new": [9, 7], "seeds": [3, 4], "sampling": train.Sampling(temperature=0.7)}
    wanted = train.generate(params, SMALL, [[1, 2, 3], [4]], compile="none", **how)
    assert wanted.compile == "none"
    assert train.generate(params, SMALL, [[1, 2, 3], [4]], **how).compile == "none"  # compiling takes longer
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled))
    asked = train.generate(params, SMALL, [[1, 2, 3], [4]], compile="step", **how)
    assert asked.compile == "step" and asked.tokens == wanted.tokens
    monkeypatch.setattr(compile_choice, "LOADING", 0.0)
    found = train.generate(params, SMALL, [[1, 2, 3], [4]], **how)
    assert found.compile == "step" and found.tokens == wanted.tokens
    invariant = train.generate(params, SMALL, [[1, 2, 3], [4]], kernel="invariant", **how)
    assert invariant.compile == "none"


def test_a_file_is_of_one_model_and_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = generic_params(SMALL, torch.float32)
    cache = fnmodels.init_cache(SMALL, 2, 64)
    step = saved_step(SMALL, params)
    assert step is not None
    others = [
        step.file(fnmodels.init_cache(SMALL, 1, 64)),
        step.file(fnmodels.init_cache(SMALL, 2, 128)),
        step.file(fnmodels.init_cache(SMALL, 2, 64, kv_dtype=torch.int8)),
        step.file(fnmodels.init_cache(SMALL, 2, 64, length=9)),
        replace(step, config=replace(SMALL, rms_norm_eps=1e-3)).file(cache),
        replace(step, options=replace(step.options, kernel="math")).file(cache),
    ]
    half = saved_step(SMALL, generic_params(SMALL, torch.bfloat16))
    assert half is not None
    others.append(half.file(cache))
    monkeypatch.setattr(saved, "_surroundings", lambda: "another machine")
    others.append(step.file(cache))
    monkeypatch.undo()
    assert len({*others, step.file(cache)}) == len(others) + 1


def test_what_no_file_can_hold_is_known(folder: Path) -> None:
    params = generic_params(SMALL, torch.float32)
    assert saved_step(SMALL, params, kernel="invariant") is None
    assert saved_step(SMALL, params, layer_fn=lambda block: block) is None
    assert saved_step(SMALL, params, edits={"embed": lambda value, name: value}) is None
    assert saved_step(SMALL, P.packed(params)) is None
    assert saved_step(SMALL, params, edits=None) is not None
    step, cache = saved_step(SMALL, params), fnmodels.init_cache(SMALL, 1, 64)
    assert step is not None
    with pytest.raises(ValueError, match="of the params that it was made of"):
        step(dict(params), torch.tensor([[1]]), cache)
    with pytest.raises(ValueError, match="one token per row"):
        step(params, torch.tensor([[1, 2]]), cache)


def test_the_choice_compares_what_it_saves_with_what_it_takes(folder: Path) -> None:
    params = generic_params(SMALL, torch.float32)
    assert explain_compile(params, SMALL, max_new=10).startswith("none: compiled code would save 0.00 s in 10 steps")
    few = explain_compile(params, SMALL, max_new=5000)
    assert few.startswith("none: compiling a step takes about 11.0 s and saves 1.")
    assert explain_compile(params, SMALL, max_new=10**5).startswith("step: compiling a step takes about 11.0 s")
    one, two = (compile_choice.saved_per_step(params, SMALL, fnmodels.init_cache(SMALL, rows, 8)) for rows in (1, 2))
    read = sum(leaf.numel() for path, leaf in P.flatten(params).items() if leaf.ndim == 2 and path != "embed_tokens")
    assert one - two == pytest.approx(compile_choice.ONE_ROW * read)
    assert 'kernel="invariant"' in explain_compile(params, SMALL, max_new=10**5, kernel="invariant")
    assert "no file holds" in explain_compile(P.packed(params), SMALL, max_new=10**5)


@pytest.mark.parametrize("capacity", [1, 63, 256, 257, 321, 500, 513, 5000])
def test_capacities_are_shared_and_at_most_a_quarter_more(capacity: int) -> None:
    assert capacity + 64 <= roomy(capacity) <= max(256, (capacity + 64) * 5 / 4) and roomy(capacity) % 64 == 0
    assert roomy(roomy(capacity) - 64) == roomy(capacity)
