"""New models of any type and preset: `--model`, `--preset`, `--set`, and what contradicts them."""

import json
from pathlib import Path
from typing import Any

import pytest

import fnmodels
import params as P
from fnmodels.errors import UserError
from fnmodels.models.common.family import traits_of
from tests.support.forks import Forks
from train.job.chosen_settings import choose_settings
from train.job.settings import DEFAULT, Settings
from train.job.settings.types import parse_fields
from train.job.tasks.new_model import new_config

IDS = {"bos_token_id": 1, "eos_token_id": 2}


def chosen(**values: Any) -> Settings:
    overrides = {name: (value, f"--{name.replace('_', '-')} {value}") for name, value in values.items()}
    return choose_settings(Path("nosuch"), overrides, None, DEFAULT, step=None)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "mixtral", "olmo2", "cohere", "lfm2", "qwen3_next"])
def test_a_type_takes_the_sizes_of_the_settings(model_type: str) -> None:
    config = new_config(chosen(model=model_type, hidden_size=64, num_hidden_layers=2, row_length=32), 300, IDS)
    assert config.model_type == model_type and config.hidden_size == 64 and config.num_hidden_layers == 2
    assert config.vocab_size == 320 and config.max_position_embeddings == 32


def test_fields_are_set_by_name_and_left_out_by_null() -> None:
    experts = "num_local_experts=4,num_experts_per_tok=2"
    config = new_config(chosen(model="mixtral", set=experts), 300, IDS)
    assert (config.num_local_experts, config.num_experts_per_tok) == (4, 2)
    assert new_config(chosen(model="qwen3", set="rms_norm_eps=null"), 300, IDS).rms_norm_eps == 1e-6


def test_default_sizes_that_a_type_does_not_have_are_left_out_and_chosen_ones_are_refused() -> None:
    for model_type in ("gpt2", "opt", "bloom", "olmo"):
        config = new_config(chosen(model=model_type), 300, IDS)
        assert (config.model_type, config.hidden_size, config.num_hidden_layers) == (model_type, 192, 4)
    for values in ({"num_key_value_heads": 1}, {"set": "num_key_value_heads=2"}):
        with pytest.raises(UserError, match=r"--model gpt2: .*num_key_value_heads = .*--set NAME=VALUE sets a field"):
            new_config(chosen(model="gpt2", **values), 300, IDS)
    assert new_config(chosen(model="qwen3"), 300, IDS).num_key_value_heads == 2  # of a type that has them


@pytest.mark.parametrize("name", ["qwen3-0.6b", "gemma-2-2b", "pythia-70m"])
def test_a_preset_keeps_its_maths_and_takes_the_vocabulary_of_the_text(name: str) -> None:
    published = fnmodels.preset(name)
    config = new_config(chosen(preset=name, set="num_hidden_layers=2,layer_types=null"), 300, IDS)
    assert config.model_type == published.model_type and config.hidden_size == published.hidden_size
    assert (config.vocab_size, config.num_hidden_layers) == (320, 2)


def test_most_causal_types_need_no_fields_but_the_sizes() -> None:
    """A type that needs more says what; none fails in another way."""
    types, refused = [kind for kind in fnmodels.families() if traits_of(fnmodels.family_for(kind)).causal], {}
    for model_type in types:
        try:
            assert new_config(chosen(model=model_type), 300, IDS).vocab_size == 320
        except UserError as error:
            refused[model_type] = str(error)
    assert all(said.startswith(f"--model {name}: ") for name, said in refused.items())
    # experts, which most new types have, and states need fields of their own
    assert len(refused) <= 0.36 * len(types), refused


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model": "lama"}, "--model lama: there is no such model type.*llama.*--family adds yours"),
        ({"preset": "qwen3-0.6"}, r"--preset qwen3-0.6: there is no such preset.*qwen3-0.6b"),
        ({"model": "bert"}, "--model bert: this job trains next-token prediction"),
        ({"set": "hiden_size=3"}, "--model llama: .*hiden_size"),
    ],
)
def test_what_does_not_go_is_a_sentence(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        new_config(chosen(**values), 300, IDS)


def test_sizes_beside_a_preset_and_types_beside_a_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--hidden-size 64 is for a new type, and --preset qwen3-0.6b has its own"):
        chosen(preset="qwen3-0.6b", hidden_size=64)
    with pytest.raises(UserError, match=r"--model qwen3 is for a new model, and --init .* names a checkpoint"):
        chosen(init=str(tmp_path), model="qwen3")


def test_fields_are_json_or_words() -> None:
    text = 'a=1,b=[1,"x"],c={"d":null},e=silu,f=null,g=1e-5'
    values = {"a": 1, "b": [1, "x"], "c": {"d": None}, "e": "silu", "f": None, "g": 1e-5}
    assert parse_fields(text) == values
    for wrong in ("", "a", "a=", "a=1,", "a=1,a=2", "a=[1", "1=2", "a=1 2", ",a=1"):
        with pytest.raises(ValueError, match="null leaves a field out"):
            parse_fields(wrong)


@pytest.mark.slow
def test_a_run_of_another_type_trains_and_resumes(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The same words again and again. " * 400)
    sizes = ["--hidden-size", "32", "--intermediate-size", "32", "--num-hidden-layers", "2", "--vocab-size", "300"]
    flags = ["--model", "qwen3_moe", "--set", "num_experts=4,num_experts_per_tok=2,moe_intermediate_size=16,head_dim=8"]
    command = ["-m", "train", "--run", tmp_path / "run", "--data", tmp_path / "text.txt", "--row-length", "32"]
    done = forks.run([*command, *sizes, *flags, "--steps", "3"])
    assert done.returncode == 0, done.stderr
    config, _ = P.load_pretrained(tmp_path / "run")
    assert config.model_type == "qwen3_moe" and config.num_experts == 4
    assert json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["model"] == "qwen3_moe"
