"""The published cookbook's plain loops (tinker-cookbook 0.5.8) run with `ServiceClient` of `train.integrations.tinker`.

`make verl` installs the cookbook beside verl and runs them.
"""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import params as P
from fnmodels.models.decoder import llama
from train.integrations.tinker import ServiceClient

pytest.importorskip("tinker_cookbook")
datasets = pytest.importorskip("datasets")
rl_loop = pytest.importorskip("tinker_cookbook.recipes.rl_loop", exc_type=ImportError)
sl_loop = pytest.importorskip("tinker_cookbook.recipes.sl_loop", exc_type=ImportError)

END = "<|end|>"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A checkpoint of a small model with a tokenizer of bytes."""
    folder = tmp_path / "base"
    alphabet = [END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    config = llama.Config.from_hf(
        {
            "model_type": "llama",
            "vocab_size": len(alphabet),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 2048,
        }
    )
    P.save_pretrained(folder, config, P.init(config, seed=0))
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    return folder


@pytest.fixture
def cookbook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Our service in place of the package's, rows of data made here in place of the Hub's."""
    chats = [
        {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "aaaa"}]}
        for i in range(24)
    ]
    sums = [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(4)]
    data = {"HuggingFaceH4/no_robots": chats, "openai/gsm8k": sums}

    def load_dataset(name: str, *_: Any) -> Any:
        return datasets.DatasetDict(train=datasets.Dataset.from_list(data[name]))

    for loop in (rl_loop, sl_loop):
        monkeypatch.setattr(loop.tinker, "ServiceClient", functools.partial(ServiceClient, folder=tmp_path / "saved"))
        monkeypatch.setattr(loop.model_info, "get_recommended_renderer_name", lambda name: "role_colon")
    monkeypatch.setattr("datasets.load_dataset", load_dataset)


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_supervised_training(cookbook: None, base: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    config = sl_loop.Config(
        log_path=str(log), model_name=str(base), batch_size=2, learning_rate=3e-2, lora_rank=8, save_every=4
    )
    sl_loop.main(config)
    losses = [line["train_mean_nll"] for line in _lines(log / "metrics.jsonl")]
    assert len(losses) == 12 and losses[-1] < 0.5 * losses[0]
    saved = _lines(log / "checkpoints.jsonl")
    assert [one["name"] for one in saved] == ["000004", "000008", "final"]
    assert Path(saved[-1]["sampler_path"], P.lora.CONFIG).is_file()


def test_policy_gradients(cookbook: None, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rl_loop, "get_reward", lambda response, answer: float(response.count("a")))
    log = tmp_path / "log"
    config = rl_loop.Config(
        log_path=str(log),
        model_name=str(base),
        batch_size=1,
        group_size=8,
        learning_rate=3e-2,
        lora_rank=8,
        max_tokens=12,
    )
    rl_loop.main(config)
    assert len(_lines(log / "metrics.jsonl")) == 4
    assert "state_path" in _lines(log / "checkpoints.jsonl")[-1]
    rl_loop.main(config)  # the log names a saved state: it resumes there, after the last batch
    assert len(_lines(log / "metrics.jsonl")) == 4 and len(_lines(log / "checkpoints.jsonl")) == 2
