"""Tests of the main job from checkpoints of every family: full fine-tuning and LoRA."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.models.common.family import parsed, traits_of
from fnmodels.models.common.registry import family_reading
from fnmodels.ops.dropout import Dropout
from params.io.safetensors_file import open_tensors
from tests.fnmodels.models import test_llava, test_qwen3_5
from tests.support.cases import cases, covering, generic_params, richest
from tests.train.job.test_run import one_sentence, own_cache, rows, saved, stop_after, text, train  # noqa: F401
from train import checkpoint
from train.commands.sample import main as sample
from train.eval import pretrained

SAME = ("adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "metrics.jsonl", "summary.json")
LLAMA = next(case for case in cases() if case.name == "llama")


def letters():
    """A tokenizer with at most the vocabulary of the smallest model here."""
    vocabulary = {letter: i for i, letter in enumerate("?\ndefrtun ()x:+0123456789")}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return tokenizer


def checkpoint_of(path, config):
    P.save_pretrained(path, config, generic_params(config))
    letters().save(str(path / "tokenizer.json"))
    return path


CAUSAL = [case for case in covering() if traits_of(fnmodels.family_of(case.config)).causal]


@pytest.mark.parametrize("case", CAUSAL, ids=str)
def test_all_weights_of_every_part_train_from_its_checkpoint(tmp_path, text, case):  # noqa: F811
    base = checkpoint_of(tmp_path / "base", case.config)
    assert train(tmp_path / "run", text, "--init", base, "--steps", 2, "--batch-rows", 1) == 0
    config, after = P.load_pretrained(tmp_path / "run")
    _, before = P.load_pretrained(base, drop=tuple(traits_of(fnmodels.family_of(config)).optional))
    leaves = tree.flatten(fnmodels.family_of(config).spec(config))
    before, after = tree.flatten(before), tree.flatten(after)
    assert leaves.keys() == before.keys() == after.keys()
    still = {path for path in leaves if torch.equal(before[path], after[path])}
    assert still == {path for path, leaf in leaves.items() if not leaf.trainable}
    assert all(row["finite"] for row in rows(tmp_path / "run"))
    assert rows(tmp_path / "run")[0]["lr"] <= 3e-4
    routed = any(kind.routed for kind in parsed(fnmodels.family_of(config).kinds(config)))
    assert all(("expert_load" in row) == routed and row.get("expert_load", 1) >= 1 for row in rows(tmp_path / "run"))


@pytest.mark.parametrize("name", ["llava", "qwen3_5"])
def test_the_text_of_a_model_with_images_trains(name, tmp_path, text, capsys):  # noqa: F811
    """With all weights and with adapters; the tower is not read, and the run is a model of text."""
    values = test_llava.VARIANTS["llama"] if name == "llava" else test_qwen3_5.values_of("qwen3_5")
    config = family_reading(values).Config.from_hf(values)
    base = checkpoint_of(tmp_path / "base", config)
    assert hasattr(P.load_config(base), "vision")
    for folder, flags in (("run", ()), ("lora", ("--lora", "r=2,targets=down_proj"))):
        assert train(tmp_path / folder, text, "--init", base, "--steps", 2, "--batch-rows", 1, *flags) == 0
        trained, params = pretrained.load_model(tmp_path / folder)
        assert trained == config.text and "vision" not in params
        assert all(row["finite"] for row in rows(tmp_path / folder))
    capsys.readouterr()
    assert sample([str(base), "--prompt", "def ", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("d e f")


@pytest.fixture
def base(tmp_path):
    return checkpoint_of(tmp_path / "base", LLAMA.config)


def test_adapters_alone_train_and_are_kept(tmp_path, text, base, monkeypatch, capsys):  # noqa: F811
    weights = (base / "model.safetensors").read_bytes()
    flags = ("--init", base, "--lora", "r=3,alpha=6,targets=q_proj+down_proj", "--ema", 0.5)
    assert train(tmp_path / "whole", text, *flags) == 0
    assert "adapters with" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train(tmp_path / "parts", text, *flags) == 130
    assert train(tmp_path / "parts", None, "--resume") == 0
    last = Path("steps", "step-00000006", checkpoint.STATE)
    for name in (*SAME, last):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes(), name
    assert not (tmp_path / "whole" / "config.json").exists() and not (tmp_path / "whole" / "model.safetensors").exists()
    assert (base / "model.safetensors").read_bytes() == weights
    found = rows(tmp_path / "whole")
    assert found[-1]["loss"] < found[0]["loss"] and found[0]["lr"] == pytest.approx(1e-3)

    from contextlib import ExitStack

    with ExitStack() as stack:
        names = open_tensors(tmp_path / "whole" / last, stack).entries.keys()
    ends = {name.rpartition(".")[2] for name in names} - {"step"}
    assert ends == {"a", "b"}
    assert len(names) == 2 + 4 * 2 * 2 * LLAMA.config.num_hidden_layers  # parameters, two moments and average of each

    config, adapted = pretrained.load_model(tmp_path / "whole")
    trained = tree.flatten(P.lora.adapters(adapted))
    assert all(float(leaf.abs().max()) > 0 for leaf in trained.values())
    merged = pretrained.load_model(tmp_path / "whole", merge=True)[1]
    inputs = fnmodels.prepare(config, torch.arange(3, 12)[None])
    ours, theirs = (fnmodels.forward(params, *inputs, config=config) for params in (adapted, merged))
    assert (ours - theirs).abs().max() <= 1e-5 * ours.abs().max()

    averages = tree.flatten(P.lora.adapters(pretrained.load_model(tmp_path / "whole" / "ema")[1]))
    assert averages.keys() == trained.keys()
    assert not any(torch.equal(averages[path], leaf) for path, leaf in trained.items())

    capsys.readouterr()
    for path in (tmp_path / "whole", tmp_path / "whole" / "ema"):
        assert sample([str(path), "--prompt", "def ", "--tokens", "5"]) == 0
        assert capsys.readouterr().out.startswith("d e f")
    assert train(tmp_path / "on", text, "--init", tmp_path / "whole", "--steps", 1) == 0  # all weights, merged
    assert P.load_config(tmp_path / "on") == config


def test_peft_reads_what_a_run_leaves_with_equal_logits(tmp_path, text, base):  # noqa: F811
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    assert train(tmp_path / "run", text, "--init", base, "--lora", "r=2,alpha=8", "--learning-rate", 0.05) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, tmp_path / "run").eval()
    config, params = pretrained.load_model(tmp_path / "run")
    tokens = torch.arange(3, 20)[None]
    ours = fnmodels.forward(params, *fnmodels.prepare(config, tokens), config=config)
    with torch.no_grad():
        theirs = model(tokens).logits
        with model.disable_adapter():
            plain = model(tokens).logits
    assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max() < 0.02 * (plain - theirs).abs().max()


def test_dora_of_rslora_trains_resumes_and_is_read(tmp_path, text, base, monkeypatch):  # noqa: F811
    flags = ("--init", base, "--lora", "r=4,alpha=6,rslora,dora")
    assert train(tmp_path / "whole", text, *flags) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train(tmp_path / "parts", text, *flags) == 130
    assert train(tmp_path / "parts", None, "--resume") == 0
    last = Path("steps", "step-00000006", checkpoint.STATE)
    assert (tmp_path / "whole" / last).read_bytes() == (tmp_path / "parts" / last).read_bytes()
    adapted = pretrained.load_model(tmp_path / "whole")[1]
    node, first = adapted["layers"][0]["attention"]["q_proj"], P.load_pretrained(base)[1]
    assert node.scale == 6 / 4**0.5
    norms = first["layers"][0]["attention"]["q_proj"].norm(dim=1)
    assert node.magnitude.shape == norms.shape and 1e-5 < (node.magnitude - norms).abs().max() < 0.1


def test_weights_that_changed_under_their_adapters_are_noticed(tmp_path, text, base, monkeypatch, capsys):  # noqa: F811
    stop_after(monkeypatch, 2)
    assert train(tmp_path / "run", text, "--init", base, "--lora", "r=2") == 130
    (base / "fnmodels_manifest.json").unlink()
    file = base / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    capsys.readouterr()
    assert train(tmp_path / "run", None, "--resume") == 2
    assert "the weights that its adapters belong to have changed" in one_sentence(capsys)
    file.unlink()
    assert train(tmp_path / "run", None, "--resume") == 2
    assert "base" in one_sentence(capsys)
    (tmp_path / "base").rename(tmp_path / "moved")
    assert sample([str(tmp_path / "run"), "--prompt", "def "]) == 2
    assert f"the folder of their base model, '{base}', is not there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ("8", "'8' is not adapters as r=8,alpha=16,targets=q_proj+v_proj"),
        ("r=0", "'r=0' is not adapters as"),
        ("r=x", "'r=x' is not adapters as"),
        ("r=2,r=3", "is not adapters as"),
        ("r=2,rank=3", "is not adapters as"),
        ("r=2,bora", "is not adapters as"),
        ("r=2,dora,dora", "is not adapters as"),
        ("alpha=2", "is not adapters as"),
        ("r=2,alpha=-1", "is not adapters as"),
        ("r=2,targets=", "is not adapters as"),
        ("r=2,targets=q_prj", "The target 'q_prj' names no parameter; linear weights end in down_proj,"),
        ("r=2,targets=layers.*", "is no weight of a linear map"),
    ],
)
def test_a_mistake_in_lora_is_a_sentence_and_begins_no_run(tmp_path, text, base, capsys, lora, words):  # noqa: F811
    assert train(tmp_path / "run", text, "--init", base, "--lora", lora) == 2
    out, error = capsys.readouterr()
    assert words in error and error.count("\n") == 1
    assert out == ""  # before the text is read, which may take long
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("lora", [(), ("--lora", "r=2,targets=down_proj")])
@pytest.mark.parametrize(
    ("kept", "words"),
    [
        (0.5, "model.safetensors has {} bytes, but its tensors end at"),
        (0, "model.safetensors has 0 bytes, less than the 8 that a safetensors file begins with"),
        (None, "There is neither model.safetensors nor model.safetensors.index.json in the folder."),
    ],
)
def test_weights_that_cannot_be_read_are_a_sentence_before_all_else(
    tmp_path,
    text,  # noqa: F811
    base,
    capsys,
    lora,
    kept,
    words,
):
    file = base / "model.safetensors"
    whole = file.read_bytes()
    if kept is None:
        file.unlink()
    else:
        file.write_bytes(whole[: int(len(whole) * kept)])
    assert train(tmp_path / "run", text, "--init", base, *lora) == 2
    out, error = capsys.readouterr()
    assert words.format(f"{len(whole) // 2:,}") in error and error.count("\n") == 1
    assert out == ""
    assert not (tmp_path / "run").exists()


def test_lora_needs_the_weights_of_a_checkpoint(tmp_path, text, base, capsys):  # noqa: F811
    assert train(tmp_path / "run", text, "--lora", "r=2") == 2
    assert "name one with --init" in one_sentence(capsys)
    assert train(tmp_path / "first", text, "--init", base, "--lora", "r=2", "--steps", 1) == 0
    assert train(tmp_path / "run", text, "--init", tmp_path / "first", "--lora", "r=2") == 2
    assert "holds adapters: --lora needs the checkpoint of their base model" in one_sentence(capsys)


def test_adapters_that_peft_cannot_have_are_refused_before_the_run(tmp_path, text, capsys):  # noqa: F811
    """Phi-3's checkpoint fuses q, k and v, and a magnitude is one of all their rows."""
    case = next(case for case in cases() if case.family == "phi3")
    base = checkpoint_of(tmp_path / "base", case.config)
    assert train(tmp_path / "run", text, "--init", base, "--lora", "r=2,dora") == 2
    assert "has an adapter that PEFT's format has no place for" in one_sentence(capsys)
    assert train(tmp_path / "run", text, "--init", base, "--lora", "r=2,targets=q_proj", "--steps", 1) == 0
    assert json.loads((tmp_path / "run" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)


def test_experts_are_balanced_by_losses_and_by_their_bias(tmp_path, text, capsys):  # noqa: F811
    case = next(case for case in richest() if case.family == "deepseek")
    base = checkpoint_of(tmp_path / "base", case.config)
    assert train(tmp_path / "plain", text, "--init", base, "--steps", 1) == 0
    flags = ("--balance-loss", 0.5, "--router-z-loss", 0.25, "--balance-rate", 0.125)
    assert train(tmp_path / "run", text, "--init", base, "--steps", 1, *flags) == 0
    (plain,), (row,) = rows(tmp_path / "plain"), rows(tmp_path / "run")
    assert row["sequence_balance"] >= 1 and row["router_z"] > 0
    assert row["loss"] == pytest.approx(plain["loss"], rel=1e-5)  # of the tokens alone
    assert row["grad_norm"] != pytest.approx(plain["grad_norm"], rel=1e-3)
    before, after = (tree.flatten(P.load_pretrained(path)[1]) for path in (base, tmp_path / "run"))
    moved = [(after[path] - leaf).abs() for path, leaf in before.items() if path.endswith("selection_bias")]
    assert moved and all(set(m.mul(8).round(decimals=4).tolist()) <= {0.0, 1.0} and m.any() for m in moved)
    assert train(tmp_path / "l", text, "--init", base, "--lora", "r=2,targets=o_proj", "--balance-rate", 0.1) == 2
    assert "--balance-rate 0.1 moves parameters outside of the adapters" in one_sentence(capsys)


def test_dropout_at_the_rates_of_a_checkpoint(tmp_path, text, capsys, monkeypatch):  # noqa: F811
    case = next(case for case in cases() if case.name == "gpt2")
    rates = Dropout(weights=0.2, attention=0.1, mlp=0.1, embedding=0.1)
    longer = dataclasses.replace(case.config, max_position_embeddings=64)
    base = checkpoint_of(tmp_path / "base", dataclasses.replace(longer, dropout=rates))
    flags = ("--init", base, "--row-length", 32, "--save-every", 1)
    assert train(tmp_path / "off", text, *flags, "--steps", 2) == 0
    assert train(tmp_path / "run", text, *flags, "--steps", 2, "--dropout", "config") == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        assert train(tmp_path / "again", text, *flags, "--steps", 2, "--dropout", "config") != 0
    assert saved(tmp_path / "again") == [1]
    assert train(tmp_path / "again", text, *flags, "--steps", 2, "--dropout", "config", "--resume") == 0
    losses = {name: [row["loss"] for row in rows(tmp_path / name)] for name in ("off", "run", "again")}
    assert losses["again"] == losses["run"] and losses["run"][0] != losses["off"][0]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["attn_pdrop"] == 0.2
    capsys.readouterr()
    none = checkpoint_of(tmp_path / "none", longer)
    assert train(tmp_path / "refused", text, "--init", none, "--row-length", 32, "--dropout", "config") == 2
    assert "states none above 0" in one_sentence(capsys)


def test_a_mixture_of_experts_takes_adapters_on_its_attention(tmp_path, text):  # noqa: F811
    case = next(case for case in richest() if case.family == "deepseek")
    base = checkpoint_of(tmp_path / "base", case.config)
    flags = ("--init", base, "--lora", "r=2,targets=o_proj", "--steps", 2, "--keep", 1)
    assert train(tmp_path / "run", text, *flags) == 0
    assert saved(tmp_path / "run") == [2]
    assert len(tree.leaves(P.lora.adapters(pretrained.load_model(tmp_path / "run")[1]))) > 0
