"""The comparison with transformers: equal models are equal, and a planted fault is located."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import params as P
from fnmodels import llama, tree
from fnmodels.models.common.family import field_of
from fnmodels.models.common.registry import hf_names
from params import compare
from tests.support.cases import Case, cases, collected, generic_params, richest, sublayers
from tests.support.naming import covering_names
from tests.support.oracle import model_of, save
from tests.variants import gpt2
from tests.variants.llama import variants

# the names and the parts of layers are those of a model type
BY_TYPE = richest(lambda case: case.config.model_type)
READ = [case for case in BY_TYPE if case.values is not None and case.name not in collected("UNREADABLE")]
READ = [case for case in READ if case.family != "xlm"]  # whose layers have no module of their own in transformers
NAMINGS = covering_names(READ, lambda case: hf_names(case.config))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of the first variant of Llama, written by the reference."""
    model_of(next(iter(variants().values()))).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", NAMINGS, ids=str)
def test_equal_checkpoints(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For every naming of layers in the reference, down to attention and MLP."""
    save(model_of(case.values), tmp_path)
    assert compare.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    # of layers that run several times, what enters and leaves is one of several states
    around = not field_of(case.config, "passes")
    parts = enumerate(sublayers(case.config))
    taps = [f"layers.{i}.{name}" for i, inside in parts for name in (*inside, *["output"] * around)]
    # all activations of the plain batch, then the logits of those on which transformers is right
    forms = ["padded", "packed", "shifted"]
    forms = [form for form in forms if form not in compare.their_mistakes(case.config)]
    if case.config.max_position_embeddings < 24 + 3:
        forms.remove("shifted")
    names = [*["embed"] * around, *taps, "logits", *(f"logits, {form}" for form in forms)]
    table = lines[2 : 2 + len(names)]
    assert [line[: max(map(len, names))].strip() for line in table] == names
    assert not any(line.endswith("differs") for line in lines)
    assert lines[0].endswith("names and shapes are equal; leaves with other values: 0")
    assert lines[-1].startswith(f"Equal: all {len(names)} activations are within 2e-05 x max(1, std)")


def test_what_transformers_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """MTP heads, which transformers does not load: ours are left out too, and the rest is compared."""
    case = next(case for case in cases() if case.name == "deepseek_v3")
    config = dataclasses.replace(case.config, num_nextn_predict_layers=1)
    P.save_pretrained(tmp_path, config, generic_params(config))
    assert compare.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("Equal")


def _with_changed_leaves(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Our loader with a planted mistake: it returns change({path: leaf})."""
    plain = P.load_pretrained

    def load_pretrained(*args: Any, **kwargs: Any) -> Any:
        config, params = plain(*args, **kwargs)
        return config, tree.unflatten(change(tree.flatten(params)))

    monkeypatch.setattr("params.compare.command.load_pretrained", load_pretrained)


def test_a_permuted_leaf(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = "layers.1.attention.q_proj"
    _with_changed_leaves(monkeypatch, lambda flat: flat | {path: flat[path].flip(0)})
    assert compare.main([str(folder), "--against", "transformers"]) == 1
    *table, last = capsys.readouterr().out.splitlines()
    assert last.startswith("The first difference is at layers.1.attention: ")
    assert f"Leaves with other values: {path} (by " in last
    marked = [line.split()[0] for line in table if line.endswith("differs")]
    assert marked[:2] == ["layers.1.attention", "layers.1.mlp"] and marked.count("logits,") == 2
    assert table[0].endswith("leaves with other values: 1")


def test_wrong_maths(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The parameters are right, and the activation of the MLP is not."""
    plain = llama.gated_mlp
    monkeypatch.setattr(
        llama, "gated_mlp", lambda weights, x, activation, **how: plain(weights, x, activation="gelu", **how)
    )
    assert compare.main([str(folder)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("The first difference is at layers.0.mlp: ") and last.endswith("the same values.")


def test_what_rounding_makes_is_allowed_and_a_fault_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the plain bound is too narrow for the processor's rounding, roundings of the leaves say what is allowed."""
    monkeypatch.setattr("params.compare.table.BOUND", 1e-7)
    monkeypatch.setattr("params.compare.table.MOST", 100)
    assert compare.main([str(folder)]) == 0
    assert capsys.readouterr().out.endswith("within 1e-07 x max(1, std), or 4 roundings of the leaves.\n")
    _with_changed_leaves(monkeypatch, lambda flat: flat | {"norm": flat["norm"] * (1 + 1e-5)})
    assert compare.main([str(folder)]) == 1
    assert "The first difference is at logits: " in capsys.readouterr().out


def test_not_a_number(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _with_changed_leaves(monkeypatch, lambda flat: flat | {"norm": flat["norm"] * torch.nan})
    assert compare.main([str(folder)]) == 1
    assert "is at logits: nan, where" in capsys.readouterr().out


def test_other_leaves(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Names and shapes are compared first, because without them nothing can be loaded."""
    plain, spec = llama.hf_names, llama.spec

    def wider(config: Any) -> Any:
        made = spec(config)
        made["lm_head"] = P.Leaf((7, 3), torch.float32, ("vocab", "embed"), P.Constant(0.0))
        return made

    monkeypatch.setattr(llama, "hf_names", lambda config: plain(config) | {"norm": "model.final_norm.weight"})
    monkeypatch.setattr(llama, "spec", wider)
    assert compare.main([str(folder)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("The first difference is in the leaves, ours against transformers' (3):")
    assert "model.final_norm.weight: only ours, [" in out and "model.norm.weight: only theirs, [" in out
    assert "lm_head.weight: ours is [7, 3], theirs [" in out


def test_what_was_not_reached_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_of(variants()["llama_longrope_short"]).save_pretrained(tmp_path)
    assert compare.main([str(tmp_path)]) == 0
    assert "(--length): longrope rope beyond 32 positions." in capsys.readouterr().out
    assert compare.main([str(tmp_path), "--length", "40"]) == 0
    assert "Not compared" not in capsys.readouterr().out
    model_of(variants()["mistral_sliding"] | {"sliding_window": 30}).save_pretrained(tmp_path)
    assert compare.main([str(tmp_path)]) == 0
    assert "(--length): sliding_window 30." in capsys.readouterr().out
    model_of(gpt2.variants()["gpt2"]).save_pretrained(tmp_path)
    assert "--length is 65, but this model has 64 positions." in _refused(tmp_path, capsys, "--length", "65")


def test_wrong_masks_of_padding_and_of_documents(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mask that ignores segments is correct on plain rows and with padding on the right."""
    plain = llama.attention_masks
    monkeypatch.setattr(
        llama,
        "attention_masks",
        lambda config, positions, segment_ids, **options: plain(
            config,
            torch.arange(positions.shape[1], device=positions.device).expand(positions.shape),
            torch.ones_like(segment_ids),
            **options,
        ),
    )
    assert compare.main([str(folder)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("The first difference is at logits, packed: ")


# Errors that the user can fix


def _refused(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert compare.main([str(folder), *options]) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.count("\n") == 1
    return captured.err


def test_wrong_folders(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = _refused(folder / "missing", capsys)
    assert missing.startswith("python -m params.compare: ") and "There is no such checkpoint folder" in missing
    assert str(folder / "missing") in missing
    content = load_file(folder / "model.safetensors")
    save_file(content | {"extra": torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert compare.main([str(folder)]) == 2 and "'extra' in model.safetensors: unexpected" in capsys.readouterr().err
    (folder / "model.safetensors").unlink()
    assert "There is neither model.safetensors nor" in _refused(folder, capsys)
    (folder / "config.json").write_text('{"model_type": "gptx"}')
    assert "'gptx' is not supported" in _refused(folder, capsys)


def test_what_transformers_cannot_load(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def from_pretrained(*args: Any, **kwargs: Any) -> None:
        raise KeyError("first line\nsecond line")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    assert f"transformers cannot load {folder}: 'first line" in _refused(folder, capsys)


def test_without_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert compare.main([str(folder)]) == 0
    words = capsys.readouterr().out
    assert words.startswith(f"fnmodels loads {folder}, all ") and "logits [2, 24, 61], all finite" in words
    assert compare.main([str(folder), "--against", "transformers"]) == 2
    words = capsys.readouterr().err
    assert f"fnmodels loads {folder}, all " in words and "transformers is not installed" in words
    content = load_file(folder / "model.safetensors")
    save_file({**content, "extra": torch.ones(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert compare.main([str(folder)]) == 2
    assert "'extra' in model.safetensors: unexpected" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        compare.main(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    for words in ("CHECKPOINT_FOLDER", "--against", "--length", "1 different, 2 ", "where they first differ"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 110
