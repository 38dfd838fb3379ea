"""The report on a checkpoint folder: its contents and problems, without reading tensors unless asked to."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fnmodels
import params as P
from fnmodels import llama
from params.inspect import main
from tests.params.checkpoint.damage import BASES, Damage, corpus, make_bases
from tests.support.cases import Case, generic_params, namings

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    make_bases(folder)
    return folder


@pytest.mark.parametrize("damage", corpus()[::4], ids=str)
def test_the_code_says_whether_it_loads(
    damage: Damage, bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bases / damage.base, folder)
    folder = damage.do(folder) or folder
    code = main([str(folder), *(["--verify"] if damage.check_finite else [])])
    out, error = capsys.readouterr()
    if damage.kind is None:
        assert (code, out.count("  problem ")) == (0, 0), out
    elif any(words in damage.name for words in ("a head", "config tied, files not", "with a scale of")):
        # whether tensors are equal or finite is found only by reading them
        assert main([str(folder), "--verify"]) == 2
    else:
        assert code == 2, out
        sizes = out.count("fnmodels.") + out.count("  tensors ")  # sections reported despite the damage
        assert ("  problem " in out) == folder.is_dir() and sizes <= 2  # without a folder there is no report
        assert all(words.split(": ")[-1] in out + error for words in damage.words if words != "symbolic link"), out


@pytest.mark.parametrize("case", namings(), ids=str)
def test_every_naming(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    P.save_pretrained(tmp_path, case.config, generic_params(case.config), max_shard_size=20_000)
    assert main([str(tmp_path), "--verify"]) == 0
    out = capsys.readouterr().out
    family = getattr(fnmodels, case.family).__name__
    for words in (family, f"{P.count(case.config):,}", "float32", "every byte is as it was saved"):
        assert words in out, out


def test_a_report(bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = BASES["tied"][0]
    weights = generic_params(config)
    P.save_pretrained(tmp_path, config, weights | {"norm": weights["norm"].bfloat16()})
    content = load_file(tmp_path / FILE)
    content |= {"lm_head.weight": content["model.embed_tokens.weight"].clone()}
    content |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    (tmp_path / "fnmodels_manifest.json").unlink()
    save_file(content, tmp_path / FILE)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        str(tmp_path),
        "  family      fnmodels.models.decoder.llama, model type llama",
        "  layers      2: 2 full",
        "  parameters  4,560",
        "  tensors     22 in 1 file, 20.8 kB",
        "  file        model.safetensors: 22 tensors, 20.8 kB",
        "  dtype       bfloat16: 1 tensor, 32 bytes",
        "  dtype       float32: 21 tensors, 20.8 kB",
        "  head        tied to the embedding, and in the file all the same",
        "  ignored     1 leftover buffer, as model.layers.0.self_attn.rotary_emb.inv_freq",
        "  checksums   none: there is no fnmodels_manifest.json",
    ]


def test_no_tensor_is_read_unless_asked(bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a tensor was read")

    config = BASES["single"][0]
    P.save_pretrained(tmp_path, config, generic_params(config))
    for name in ("read_leaf.map_file", "read_leaf.read_tensor", "manifest.digest"):
        monkeypatch.setattr(f"params.checkpoint.{name}", refuse)
    assert main([str(tmp_path)]) == 0
    with pytest.raises(AssertionError, match="a tensor was read"):
        main([str(tmp_path), "--verify"])


def test_a_flipped_bit_is_found_and_a_change_of_size_without_reading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = BASES["single"][0]
    P.save_pretrained(tmp_path, config, generic_params(config))
    data = bytearray((tmp_path / FILE).read_bytes())
    data[-9] ^= 1
    (tmp_path / FILE).write_bytes(data)
    assert main([str(tmp_path)]) == 0
    assert main([str(tmp_path), "--verify"]) == 2
    assert f"{FILE} has the sha256" in capsys.readouterr().out
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text() + " \n")
    assert main([str(tmp_path)]) == 2
    assert "config.json was saved with" in capsys.readouterr().out


@pytest.mark.parametrize("name", [FILE, "config.json", "fnmodels_manifest.json"])
def test_verify_finds_flipped_bits_wherever_they_are(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flipped bits in the header's length, the header, the data, the config and the manifest."""
    config = BASES["single"][0]
    P.save_pretrained(tmp_path, config, generic_params(config))
    data = (tmp_path / name).read_bytes()
    header = 8 + int.from_bytes(data[:8], "little") if name == FILE else len(data)
    places = [*range(8), *range(8, header, max(1, header // 20)), *range(header, len(data), 997)]
    for place in places:
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        (tmp_path / name).write_bytes(flipped)
        assert main([str(tmp_path), "--verify"]) == 2, (place, data[place : place + 20])
        assert "  problem " in capsys.readouterr().out
    (tmp_path / name).write_bytes(data)
    assert main([str(tmp_path), "--verify"]) == 0


def test_a_folder_that_cannot_even_be_looked_at_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([str(tmp_path / ("x" * 300))]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.endswith(": File name too long.\n")
    assert captured.err.startswith("python -m params.inspect: ") and captured.err.count("\n") == 1
    assert main([str(tmp_path / "nosuch")]) == 2
    said = f"{tmp_path / 'nosuch'}: There is no such checkpoint folder."
    assert capsys.readouterr() == ("", f"python -m params.inspect: {said}\n")

    def refuse(path: object, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.stat", refuse)  # as without permission for the parent folder, which root ignores
    assert main([str(tmp_path / "model")]) == 2
    assert capsys.readouterr() == ("", f"python -m params.inspect: {tmp_path / 'model'}: Permission denied.\n")


def test_what_a_terminal_would_obey_is_escaped(bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(bases / "single", tmp_path / "a\x1b[2Jb")
    content = load_file(bases / "single" / FILE) | {"\x1b[1A\u202e": torch.ones(1)}
    save_file(content, tmp_path / "a\x1b[2Jb" / FILE)
    assert main([str(tmp_path / "a\x1b[2Jb")]) == 2
    captured = capsys.readouterr()
    for said in captured:
        assert "a\\x1b[2Jb" in said and "\\x1b[1A\\u202e" in said and "\x1b" not in said


def test_as_a_module(bases: Path) -> None:
    command = [sys.executable, "-m", "params.inspect", str(bases / "single")]
    done = subprocess.run(command, cwd=Path(P.__file__).parents[1], capture_output=True, text=True, check=True)
    assert "fnmodels.models.decoder.llama" in done.stdout and not done.stderr


def test_a_folder_of_adapters_has_no_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = llama.Config(32, 16, 24, 1, 2, 1)
    P.lora.save_adapters(tmp_path / "a", config, P.lora.add(config, P.init(config, 0), rank=2), base="org/base")
    assert main([str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert "adapters    LoRA of rank 2" in out and "problem" not in out and "recorded" in out
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    assert main([str(tmp_path / "a")]) == 2
    assert "adapter_model.safetensors" in capsys.readouterr().err
