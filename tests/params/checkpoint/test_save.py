"""Saving checkpoints: transformers reads them, bytes are deterministic, and no crash leaves a mix of two models."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import params as P
from fnmodels import llama, tree
from fnmodels.models.common.storage import TensorSlice, covers, disk_names, extract
from params.checkpoint import save, transaction
from params.checkpoint.manifest import MANIFEST
from params.checkpoint.tensor_map import by_name, stored_leaves
from tests.support.cases import Case, generic_params, namings, structures
from tests.support.oracle import model_of
from tests.support.oracle import save as save_theirs

SMALL = llama.Config(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)
with_reference = pytest.mark.parametrize("case", [case for case in namings() if case.values is not None], ids=str)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: leaf for path in sorted(folder.glob("*.safetensors")) for name, leaf in load_file(path).items()}


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def equal(one: Any, two: Any) -> bool:
    flat, other = tree.flatten(one), tree.flatten(two)
    return flat.keys() == other.keys() and all(torch.equal(leaf, other[path]) for path, leaf in flat.items())


# With transformers


@with_reference
def test_there_and_back(case: Case, tmp_path: Path) -> None:
    """transformers' files in bf16 -> params -> files: the same names, bits and dtypes, and an equal config.

    tests/parity/test_files.py has those in fp32, and what transformers reads. What keeps its dtype (a bias of the
    choice) comes back in fp32, as from transformers' own loading.
    """
    model = model_of(case.values).bfloat16()
    save_theirs(model, tmp_path / "theirs")
    config, loaded = P.load_pretrained(tmp_path / "theirs")
    assert config == case.config
    P.save_pretrained(tmp_path / "ours", config, loaded)
    theirs, ours = tensors_of(tmp_path / "theirs"), tensors_of(tmp_path / "ours")
    assert theirs.keys() == ours.keys()
    kept = {name for slot in stored_leaves(config) if slot.leaf.keep_dtype for name in disk_names(slot.stored)}
    theirs |= {n: leaf.float() for n, leaf in theirs.items() if n in kept and leaf.is_floating_point()}
    assert all(torch.equal(leaf, ours[name]) and leaf.dtype == ours[name].dtype for name, leaf in theirs.items())
    values = [json.loads((tmp_path / who / "config.json").read_text()) for who in ("theirs", "ours")]
    assert values[0]["dtype"] == values[1]["dtype"] == "bfloat16"
    own = type(model).config_class is type(model.config)  # else transformers names the class of another type
    assert values[0]["architectures"] == (values[1]["architectures"] if own else [type(model).__name__])


@pytest.mark.parametrize("case", structures(), ids=str)
def test_the_config_survives(case: Case, tmp_path: Path) -> None:
    """Including the fields kept for saving only; from the second save on, the bytes are equal."""
    P.save_pretrained(tmp_path / "one", case.config, generic_params(case.config))
    config, loaded = P.load_pretrained(tmp_path / "one")
    P.save_pretrained(tmp_path / "two", config, loaded)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")


def test_special_tokens_are_kept(tmp_path: Path) -> None:
    values = SMALL.to_hf() | {"eos_token_id": [2, 7], "bos_token_id": 1, "use_cache": False}
    P.save_pretrained(tmp_path, llama.Config.from_hf(values), generic_params(SMALL))
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["eos_token_id"] == [2, 7] and written["bos_token_id"] == 1


# The bytes


def test_the_same_bytes_whatever_the_order(tmp_path: Path) -> None:
    weights = generic_params(SMALL, torch.bfloat16)
    weights = weights | {"norm": weights["norm"].float()}
    backwards = dict(reversed(weights.items()))
    for name, given in (("one", weights), ("two", backwards)):
        P.save_pretrained(tmp_path / name, SMALL, given, max_shard_size=4000)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")


@pytest.mark.parametrize("mixed", [False, True])
def test_the_same_bytes_as_the_safetensors_package(tmp_path: Path, mixed: bool) -> None:
    weights = generic_params(SMALL, torch.bfloat16)
    if mixed:
        weights = weights | {"norm": weights["norm"].float(), "lm_head": weights["lm_head"].double()}
    P.save_pretrained(tmp_path / "ours", SMALL, weights)
    save_file(tensors_of(tmp_path / "ours"), tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "ours/model.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_views_and_parameters_are_written_as_they_look(tmp_path: Path) -> None:
    def strided(leaf: torch.Tensor) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.stack([leaf, leaf + 1], dim=-1)[..., 0])

    weights = tree.map(strided, generic_params(SMALL))
    assert not weights["embed_tokens"].is_contiguous()
    weights["norm"] = torch.tensor([2.0]).expand(16)
    P.save_pretrained(tmp_path, SMALL, weights)
    assert equal(P.load_pretrained(tmp_path)[1], weights)


def test_shards(tmp_path: Path) -> None:
    weights = generic_params(SMALL)
    P.save_pretrained(tmp_path, SMALL, weights, max_shard_size=3000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    assert len(files) > 3 and sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in tree.leaves(weights))
    for name in files:
        with safe_open(tmp_path / name, "pt") as file:
            names = list(file.keys())
            sizes = [file.get_tensor(name).nbytes for name in names]
            assert file.metadata() == {"format": "pt"}
        assert sum(sizes) <= 3000 or len(sizes) == 1
        assert all(index["weight_map"][key] == name for key in names)


@pytest.mark.parametrize(
    ("size", "number"), [(1, 1), ("7", 7), ("2KB", 2000), ("3 mb", 3_000_000), ("5GB", 5 * 10**9), ("1TB", 10**12)]
)
def test_sizes(size: int | str, number: int) -> None:
    assert save._bytes(size) == number


@pytest.mark.parametrize("size", [0, -1, "", "5XB", "GB", "1.5GB", "-1GB"])
def test_wrong_sizes(size: int | str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_shard_size must be"):
        P.save_pretrained(tmp_path / "new", SMALL, generic_params(SMALL), max_shard_size=size)
    assert not (tmp_path / "new").exists()


def test_files_honor_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        P.save_pretrained(tmp_path, SMALL, generic_params(SMALL))
    finally:
        os.umask(old)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


# Parameters that are slices of one tensor on disk


def _fused(config: llama.Config) -> dict[str, Any]:
    """Llama's names with q, k, v in one tensor, gate and up in one, and the output projection transposed."""
    names: dict[str, Any] = {path: f"model.{path}" for path in tree.flatten(llama.spec(config))}
    for i in range(config.num_hidden_layers):
        layer, q, kv = f"layers.{i}", 16, 8
        for path, start, stop, rows, fused in (
            ("attention.q_proj", 0, q, q + 2 * kv, "qkv"),
            ("attention.k_proj", q, q + kv, q + 2 * kv, "qkv"),
            ("attention.v_proj", q + kv, q + 2 * kv, q + 2 * kv, "qkv"),
            ("mlp.gate_proj", 0, 24, 48, "gate_up"),
            ("mlp.up_proj", 24, 48, 48, "gate_up"),
        ):
            names[f"{layer}.{path}"] = TensorSlice(f"h.{i}.{fused}", start, stop, rows)
        names[f"{layer}.attention.o_proj"] = TensorSlice(f"h.{i}.out", 0, 16, 16, transposed=True)
    return names


def test_parts_are_joined_and_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "hf_names", _fused)
    original = generic_params(SMALL)
    P.save_pretrained(tmp_path, SMALL, original, max_shard_size=4000)
    on_disk = tensors_of(tmp_path)
    attention = original["layers"][1]["attention"]
    assert torch.equal(on_disk["h.1.qkv"], torch.cat([attention[f"{p}_proj"] for p in "qkv"]))
    assert torch.equal(on_disk["h.1.out"], attention["o_proj"].T)
    for kwargs in ({}, {"copy": True}, {"dtype": torch.bfloat16}):
        loaded = P.load_pretrained(tmp_path, **kwargs)[1]
        assert list(P.flatten(loaded)) == list(P.flatten(original)), "the order of the spec"
        expected = original if "dtype" not in kwargs else generic_params(SMALL, torch.bfloat16)
        assert equal(loaded, expected)
    flat = P.flatten(original) | {"layers.0.mlp.up_proj": torch.ones(24, 16).double()}
    with pytest.raises(P.MismatchError, match=r"up_proj: must have one dtype, for they are one tensor h\.0\.gate_up"):
        P.save_pretrained(tmp_path, SMALL, P.unflatten(flat))
    save_file({**on_disk, "h.0.qkv": torch.ones(33, 16)}, tmp_path / "model.safetensors")
    for path in (*tmp_path.glob("model-*"), *tmp_path.glob("*.index.json")):
        path.unlink()
    with pytest.raises(P.MismatchError, match=r"h\.0\.qkv in .*expected \[32, 16\], found \[33, 16\]"):
        P.load_pretrained(tmp_path)


@pytest.mark.parametrize("case", namings(), ids=str)
def test_parts_fill_their_tensors(case: Case) -> None:
    """Joined tensors are written completely, without uninitialized rows, and their slices agree on the shape."""
    for name, parts in by_name(stored_leaves(case.config)).items():
        # with zeros after it: a head, up to the rows of the embedding; decays of Kimi K3, up to 128 heads
        paths = [slot.path for slot in parts]
        padded = paths == ["lm_head"] and hasattr(case.config, "embedding_rows")
        padded |= case.family == "kimi_k3" and len(paths) == 1 and paths[0].endswith(".attention.A_log")
        assert padded or covers([slot.stored for slot in parts]), name
        assert len({(type(slot.stored), slot.disk_shape, slot.leaf.dtype, slot.leaf.keep_dtype) for slot in parts}) == 1
        for slot in parts:
            assert extract(slot.stored, torch.empty(slot.disk_shape, device="meta")).shape == slot.leaf.shape, slot.path


# What is refused


def test_all_wrong_leaves_are_in_one_error(tmp_path: Path) -> None:
    flat = P.flatten(generic_params(SMALL))
    del flat["norm"]
    flat["layers.0.input_layernorm"] = torch.ones(17)
    flat["layers.1.input_layernorm"] = torch.ones(16, dtype=torch.int64)
    flat["layers.0.mlp.up_proj"] = flat["layers.0.mlp.up_proj"].to("meta")
    flat["layers.1.mlp.up_proj"] = flat["layers.1.mlp.up_proj"].tolist()
    flat["adapter"] = torch.ones(3)
    with pytest.raises(P.MismatchError) as caught:
        P.save_pretrained(tmp_path / "new", SMALL, P.unflatten({k: v for k, v in flat.items() if type(v) is not list}))
    message = str(caught.value)
    for part in (
        "6 differences",
        "norm: missing; expected [16]",
        "layers.1.mlp.up_proj: missing; expected [24, 16]",
        "layers.0.input_layernorm: expected [16], found [17]",
        "layers.1.input_layernorm: expected a floating dtype, found torch.int64",
        "layers.0.mlp.up_proj: on the meta device",
        "adapter: unexpected",
    ):
        assert part in message, message
    assert not (tmp_path / "new").exists()
    with pytest.raises(P.MismatchError, match="norm: a float, not a tensor"):
        P.save_pretrained(tmp_path / "new", SMALL, generic_params(SMALL) | {"norm": 1.0})


def test_a_tied_config_has_no_head(tmp_path: Path) -> None:
    tied = llama.Config(**{**SMALL.__dict__, "tie_word_embeddings": True})
    with pytest.raises(P.MismatchError, match="lm_head: unexpected"):
        P.save_pretrained(tmp_path, tied, generic_params(SMALL))


# Over an older checkpoint


@pytest.mark.parametrize("before", ["5GB", "3KB", "6KB"])
@pytest.mark.parametrize("after", ["5GB", "3KB", "6KB"])
def test_over_the_folder_it_was_loaded_from(before: str, after: str, tmp_path: Path) -> None:
    """Mapped leaves stay valid while their files are replaced, and no file of the old save remains."""
    original = generic_params(SMALL)
    P.save_pretrained(tmp_path, SMALL, original, max_shard_size=before)
    (tmp_path / "tokenizer.json").write_text("{}")
    config, mapped = P.load_pretrained(tmp_path)
    changed = mapped | {"norm": mapped["norm"] + 1}
    P.save_pretrained(tmp_path, config, changed, max_shard_size=after)
    assert equal(mapped, original)
    assert equal(P.load_pretrained(tmp_path)[1], changed)
    P.save_pretrained(tmp_path / "fresh", config, changed, max_shard_size=after)
    fresh = bytes_of(tmp_path / "fresh")
    assert fresh == {name: (tmp_path / name).read_bytes() for name in fresh}
    assert {path.name for path in tmp_path.iterdir()} == {*fresh, "fresh", "tokenizer.json"}


class Killed(BaseException):
    """The process ends here, as far as the folder can tell."""


def test_what_can_be_recovered_stays_until_a_later_model_is_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save was killed before its first rename, the next one fails: `recover` still finishes it, or the later one."""
    models = [tree.map(lambda leaf, n=n: leaf + n, generic_params(SMALL)) for n in range(4)]
    P.save_pretrained(tmp_path, SMALL, models[0], max_shard_size="8KB")

    def die(*_: Any) -> None:
        raise Killed

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def replaced(name: str, by: Callable[..., None], model: Any, kind: type[BaseException]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(transaction if name == "_replace" else save, name, by)
            with pytest.raises(kind):
                P.save_pretrained(tmp_path, SMALL, model)

    replaced("_replace", die, models[1], Killed)
    (tmp_path / ".saving-incomplete").mkdir()
    replaced("write_tensors", fail, models[3], OSError)
    assert equal(P.load_pretrained(tmp_path)[1], models[0])
    assert len(list(tmp_path.glob(".saving-*"))) == 1
    one = shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-one")
    assert P.recover(one) and equal(P.load_pretrained(one)[1], models[1])
    replaced("_replace", die, models[2], Killed)
    assert len(list(tmp_path.glob(".saving-*"))) == 2
    two = shutil.copytree(tmp_path, tmp_path.parent / f"{tmp_path.name}-two")
    assert P.recover(two) and equal(P.load_pretrained(two)[1], models[2])
    assert not P.recover(two) and equal(P.load_pretrained(two)[1], models[2]), "not the earlier one after it"
    P.save_pretrained(tmp_path, SMALL, models[3])
    assert equal(P.load_pretrained(tmp_path)[1], models[3]) and not list(tmp_path.glob(".saving-*"))


FAULTS: list[BaseException] = [KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")]


@pytest.mark.parametrize("before", ["5GB", "8KB"])
@pytest.mark.parametrize("after", ["5GB", "8KB"])
@pytest.mark.parametrize("fault", FAULTS, ids=["Ctrl-C", "EIO"])
def test_what_goes_wrong_while_files_are_moved_loses_no_model(
    fault: BaseException, before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each rename and removal: the old model, the new one, or a folder that `recover` and the next save finish."""
    old, new = generic_params(SMALL), tree.map(lambda leaf: leaf + 1, generic_params(SMALL))
    unfinished = 0
    for step in range(100):
        folder = tmp_path / str(step)
        P.save_pretrained(folder, SMALL, old, max_shard_size=before)
        left, full = step, False

        def failing(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                left -= 1
                if left == -1:
                    raise fault
                return call(*args, **kwargs)

            return wrapped

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", failing(os.replace))
            patch.setattr(Path, "unlink", failing(Path.unlink))
            raised = None
            try:
                P.save_pretrained(folder, SMALL, new, max_shard_size=after)
            except (KeyboardInterrupt, OSError) as error:
                raised = error
        if raised is None:
            break
        begun = "could not be moved into place" in str(raised) and "params.recover finishes it" in str(raised)
        assert raised is fault or begun or "The model was not saved" in str(raised)
        if (folder / "config.json").exists():
            loaded = P.load_pretrained(folder)[1]
            assert equal(loaded, old) or equal(loaded, new)
            continue
        unfinished += 1

        def die(*_: Any) -> None:
            nonlocal full
            full = True
            raise OSError(28, "No space left on device")

        again = shutil.copytree(folder, tmp_path / f"{step}-again")
        with monkeypatch.context() as patch:
            patch.setattr(save, "write_tensors", die)
            with pytest.raises(OSError, match="what the folder held before is as it was"):
                P.save_pretrained(again, SMALL, old)
        assert full, "the next save fails too, after it has finished the one before"
        assert equal(P.load_pretrained(again)[1], new)
        P.verify(again)
        assert P.recover(folder)
        assert equal(P.load_pretrained(folder)[1], new)
        P.verify(folder)
        assert {path.name for path in folder.iterdir()} == {path.name for path in again.iterdir()}
    assert step > 2 and (unfinished > 2) == ((before, after) != ("5GB", "5GB"))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", MANIFEST, "model.safetensors.index.json"])
def test_a_folder_named_like_a_model_file_is_refused_before_any_write(name: str, tmp_path: Path) -> None:
    P.save_pretrained(tmp_path, SMALL, generic_params(SMALL), max_shard_size="8KB")
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    with pytest.raises(IsADirectoryError, match=f"not saved .a folder stands at {name}, .* move it away.; what the"):
        P.save_pretrained(tmp_path, SMALL, P.init(SMALL, 0))
    assert before == {path.name: path.stat().st_ino for path in tmp_path.iterdir()}


def test_a_pipe_or_a_link_in_the_place_of_config_json_is_replaced_and_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    P.save_pretrained(tmp_path, SMALL, generic_params(SMALL))
    P.verify(tmp_path)


def test_files_that_only_look_like_a_save_under_way_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".saving-x").write_text("a note")
    (tmp_path / ".saving-y").symlink_to(tmp_path)
    P.save_pretrained(tmp_path, SMALL, generic_params(SMALL))
    assert not P.recover(tmp_path)
    assert (tmp_path / ".saving-x").read_text() == "a note" and (tmp_path / ".saving-y").is_symlink()


class Spread(torch.Tensor):
    """A stand-in for a DTensor, which holds only a shard."""


def test_leaves_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    flat = P.flatten(generic_params(SMALL))
    flat["norm"] = flat["norm"].as_subclass(Spread)
    flat["layers.0.mlp.up_proj"] = flat["layers.0.mlp.up_proj"].to_sparse()
    with pytest.raises(P.MismatchError) as caught:
        P.save_pretrained(tmp_path / "new", SMALL, P.unflatten(flat))
    assert "norm: a Spread; only plain tensors" in str(caught.value)
    assert "layers.0.mlp.up_proj: torch.sparse_coo; only dense tensors" in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_a_sign_that_is_only_noted_is_written(tmp_path: Path) -> None:
    weights = generic_params(SMALL)
    noted = torch.complex(torch.zeros(16), weights["norm"]).conj().imag
    assert noted.is_neg()
    P.save_pretrained(tmp_path, SMALL, weights | {"norm": noted})
    assert torch.equal(P.load_pretrained(tmp_path)[1]["norm"], -weights["norm"])


def test_a_cut_off_save_that_has_been_damaged_is_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = generic_params(SMALL)
    P.save_pretrained(tmp_path, SMALL, old)
    assert not P.recover(tmp_path)

    def die(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(transaction, "_replace", die)
        patch.setattr("shutil.rmtree", lambda *args, **kwargs: None)
        with pytest.raises(Killed):
            P.save_pretrained(tmp_path, SMALL, P.init(SMALL, 0))
    file = next(tmp_path.glob(".saving-*")) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(P.FormatError, match=r"cannot be finished: model\.safetensors has the sha256"):
        P.recover(str(tmp_path))
    assert equal(P.load_pretrained(tmp_path)[1], old)


@pytest.mark.parametrize("fails", ["write_tensors", "write_manifest"])
def test_a_full_disk_leaves_the_old_one(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    P.save_pretrained(tmp_path, SMALL, generic_params(SMALL))
    before = bytes_of(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save if fails == "write_tensors" else transaction, fails, full)
    with pytest.raises(OSError, match=r"The model was not saved \(No space left on device\); what the folder held"):
        P.save_pretrained(tmp_path, SMALL, P.init(SMALL, 0))
    assert bytes_of(tmp_path) == before


def test_the_second_of_two_concurrent_saves_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = generic_params(SMALL), P.init(SMALL, 0)
    real = save.write_tensors

    def meanwhile(*args: Any) -> None:
        monkeypatch.setattr(save, "write_tensors", real)
        with pytest.raises(BlockingIOError, match="Another save into this folder is under way"):
            P.save_pretrained(tmp_path, SMALL, second)
        real(*args)

    monkeypatch.setattr(save, "write_tensors", meanwhile)
    P.save_pretrained(tmp_path, SMALL, first)
    assert equal(P.load_pretrained(tmp_path)[1], first)
    P.save_pretrained(tmp_path, SMALL, second)
    assert equal(P.load_pretrained(tmp_path)[1], second)


def test_arguments_in_another_order_are_said_to_be() -> None:
    with pytest.raises(TypeError, match="in this order: the first is a dict, not a path"):
        P.save_pretrained({}, SMALL, "folder")  # type: ignore[arg-type]
