"""The safetensors format: two readers and a writer compared with the package, for every dtype and odd shapes."""

import math
import os
import resource
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

import params as P
import params.checkpoint.header_checks
import params.checkpoint.save
from fnmodels import llama
from params.io import safetensors_file as tensor_format
from tests.support.cases import generic_params

SMALL = llama.Config(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)
FILE = "model.safetensors"


def raw(tensor: Tensor) -> list[int]:
    """The bytes of a tensor: NaN equals itself, and -0 is not 0."""
    return tensor.reshape(-1).view(torch.uint8).tolist()


def every_kind() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {"odd floats": torch.tensor([float("nan"), -0.0, 1e-45, float("-inf")])}
    for name, dtype in tensor_format.DTYPES.items():
        high = 2 if dtype == torch.bool else 256
        noise = torch.randint(high, (3, 4 * dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype)
        made |= {name: noise, f"{name} scalar": noise[0, 0].clone(), f"{name} empty": noise[:, :0].clone()}
    return made


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    """Files equal the package's; mapped and read tensors are equal; writes to mapped ones stay in memory."""
    content = every_kind()
    path = tmp_path / FILE
    tensor_format.write_tensors(
        path, {name: tensor_format.LazyTensor(t.dtype, tuple(t.shape), lambda t=t: t) for name, t in content.items()}
    )
    before = path.read_bytes()
    save_file(content, tmp_path / "theirs", metadata={"format": "pt"})
    assert before == (tmp_path / "theirs").read_bytes()

    readings: list[dict[str, Tensor]] = []
    with ExitStack() as stack:
        file = tensor_format.open_tensors(path, stack)
        mapping, buffer = tensor_format.map_file(file), tensor_format.cast_buffer()
        entries = file.entries.items()
        readings.append({name: tensor_format.mapped_tensor(mapping, entry) for name, entry in entries})
        readings.append({name: tensor_format.read_tensor(file, entry, None, buffer) for name, entry in entries})
    del mapping
    for found in readings:  # after the file is closed
        for name, tensor in content.items():
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
            assert raw(found[name]) == raw(tensor), name
            assert found[name].untyped_storage().nbytes() == tensor.nbytes, name
            found[name].view(-1).view(torch.uint8).zero_()
    assert path.read_bytes() == before


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_part_is_read_alone_and_what_lies_between_where_it_is_little(tmp_path: Path, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    edges = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    box = tuple(slice(a, b) for a, b in edges)
    gap, memory = data.draw(st.sampled_from([0, 8, 1 << 13])), data.draw(st.sampled_from([8, 24, 4096]))
    dtype = data.draw(st.sampled_from([None, torch.float64]))
    whole = torch.arange(float(math.prod(shape))).view(shape)
    save_file({"before": torch.ones(3), "whole": whole}, tmp_path / FILE)
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_format, "GAP", gap)
        file = tensor_format.open_tensors(tmp_path / FILE, stack)
        headers, buffer = file.handles.read, torch.empty(memory, dtype=torch.uint8)
        part = tensor_format.read_tensor(file, file.entries["whole"], dtype, buffer, box)
        read = file.handles.read - headers
    wanted = whole[box].to(dtype or whole.dtype)
    assert part.dtype == wanted.dtype and torch.equal(part, wanted)
    nbytes = 4 * wanted.numel()
    assert read == nbytes if gap == 0 else nbytes <= read <= whole.nbytes


@pytest.mark.parametrize("copy", [False, True])
def test_what_was_checked_is_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: bool) -> None:
    """A file replaced after its header was checked: the first one is read, through its open handle."""
    wanted = generic_params(SMALL)
    P.save_pretrained(tmp_path, SMALL, wanted)
    plain = params.checkpoint.header_checks._compare

    def compare(*args: Any) -> None:
        plain(*args)
        P.save_pretrained(tmp_path, SMALL, P.init(SMALL, 0))

    monkeypatch.setattr(params.checkpoint.header_checks, "_compare", compare)
    loaded = P.flatten(P.load_pretrained(tmp_path, copy=copy)[1])
    assert all(torch.equal(leaf, loaded[path]) for path, leaf in P.flatten(wanted).items())


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


def test_more_shards_than_files_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded models keep no file open, so that further models can be loaded."""
    wanted = generic_params(SMALL)
    P.save_pretrained(tmp_path, SMALL, wanted, max_shard_size=1)
    assert len(list(tmp_path.glob("*.safetensors"))) == 21
    monkeypatch.setattr(tensor_format, "HANDLES", 4)
    before, limits = open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/dev/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 10, limits[1]))
    try:
        models = [P.load_pretrained(tmp_path, copy=copy)[1] for copy in (False, False, True)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert open_files() == before
    for model in models:
        assert all(torch.equal(leaf, P.flatten(model)[path]) for path, leaf in P.flatten(wanted).items())


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("what", ["replaced", "rewritten"])
def test_a_file_that_is_opened_again_must_be_the_one_that_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: bool, what: str
) -> None:
    P.save_pretrained(tmp_path, SMALL, generic_params(SMALL), max_shard_size="3KB")
    monkeypatch.setattr(tensor_format, "HANDLES", 1)
    plain, file = params.checkpoint.header_checks._compare, min(tmp_path.glob("*.safetensors"))

    def compare(*args: Any) -> None:
        plain(*args)
        if what == "replaced":
            shutil.copyfile(file, tmp_path / "other")
            os.replace(tmp_path / "other", file)
        else:
            file.write_bytes(file.read_bytes()[:-1] + b"x")

    monkeypatch.setattr(params.checkpoint.header_checks, "_compare", compare)
    with pytest.raises(P.FormatError, match=f"{file} was replaced or changed after its header had been checked"):
        P.load_pretrained(tmp_path, copy=copy)


def test_no_more_shards_are_written_than_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(params.checkpoint.save, "SHARDS_LIMIT", 20)
    with pytest.raises(ValueError, match="max_shard_size=1 makes 21 files of this model; at most 20 can be read"):
        P.save_pretrained(tmp_path / "new", SMALL, generic_params(SMALL), max_shard_size=1)
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="looks into /proc")
def test_mapping_reads_no_page(tmp_path: Path) -> None:
    """Opening reads no page per tensor, which a slow disk would make expensive."""
    P.save_pretrained(tmp_path, SMALL, generic_params(SMALL))
    loaded = P.load_pretrained(tmp_path)[1]

    def resident() -> int:
        lines = Path("/proc/self/smaps").read_text().split(str(tmp_path / FILE))[1].splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))

    assert resident() == 0
    assert loaded["norm"].sum() != 0 and resident() > 0
