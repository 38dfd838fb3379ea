"""Names, shapes and dtypes as the released loaders of vLLM and SGLang take them, recorded by `sampler_loaders`."""

import json
import lzma
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import params as P
from params import lora
from tests.support.cases import generic_params
from tests.support.sampler_loaders import configs
from train.engine import Engine
from train.handover.bucket import buckets

RECORDS = {
    sampler: json.loads(lzma.decompress((Path(__file__).parent / f"{sampler}.json.xz").read_bytes()))
    for sampler in ("vllm", "sglang")
}
CONFIGS = dict(configs())
CASES = [(sampler, name) for sampler, record in RECORDS.items() for name in record if name != "version"]


def faults(record: dict[str, Any], sent: list[dict[str, int]]) -> list[str]:
    """What is wrong with modules of {name: elements} for a loader; nothing where each parameter is filled once.

    A module may be several recorded ones in a row: what a loader takes apart it takes in one call too.
    """
    wrong, filled = [], dict.fromkeys(record["parameters"], 0)
    taken = {tuple(names): written for names, written in record["modules"]}
    for module in sent:
        names, written = list(module), dict[str, int]()
        while (end := next((end for end in range(1, len(names) + 1) if tuple(names[:end]) in taken), 0)) > 0:
            written |= taken.pop(tuple(names[:end]))
            names = names[end:]
        if names:
            wrong.append(f"not taken, or twice: {list(module)}")
        elif sum(written.values()) != sum(module.values()):
            wrong.append(f"elements of {list(module)}")
        for name, count in written.items():
            filled[name] += count
    wrong += [f"not sent: {list(names)}" for names in taken]
    return wrong + [f"not filled: {name}" for name, count in record["parameters"].items() if not filled[name]]


def sent_by(engine: Engine) -> list[dict[str, int]]:
    return [
        {entry.name: torch.Size(entry.shape).numel() for entry in bucket.entries}
        for bucket in buckets(engine.export(), 1)
    ]


@pytest.mark.parametrize(("sampler", "name"), CASES)
def test_a_loader_takes_every_tensor_once_and_all_its_parameters_are_filled(sampler: str, name: str) -> None:
    config = CONFIGS[name]
    sent = sent_by(Engine(config, generic_params(config), None))
    record = RECORDS[sampler][name]
    assert faults(record, sent) == []
    assert faults(record, sent[:-1]) and faults(record, [*sent, sent[0]]) and faults(record, [*sent, {"other": 1}])


def test_the_records_are_of_enough_families() -> None:
    assert {sampler: record["version"] for sampler, record in RECORDS.items()} == {"vllm": "0.33.0", "sglang": "0.5.23"}
    wanted = {"llama", "qwen3", "qwen3_moe", "deepseek_v3", "gemma3_text", "glm4_moe", "mixtral"}
    assert all(wanted <= record.keys() for record in RECORDS.values())
    assert "qwen2_5_vl" in RECORDS["sglang"]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "qwen2"])
def test_adapters_have_the_names_that_samplers_read(name: str) -> None:
    """Both strip base_model.model. and lora_A.weight or lora_B.weight, and look for the module among the loader's."""
    config = CONFIGS[name]
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    params = lora.add(config, P.init(config, 0), rank=4, alpha=8.0, targets=targets)
    modules: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, tensor in Engine(config, params, None).export(adapters=True):
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", key)
        assert match is not None, key
        modules.setdefault(match[1], {})[match[2]] = tuple(tensor.shape)
    weights = {key: tuple(tensor.shape) for key, tensor in P.export(config, P.init(config, 0))}
    assert len(modules) == 7 * config.num_hidden_layers
    for module, shapes in modules.items():
        out, into = weights[f"{module}.weight"]
        assert shapes == {"A": (4, into), "B": (out, 4)}
    settings = lora.peft_config(config, params)
    assert settings["r"] == 4 and settings["lora_alpha"] == 8 and settings["bias"] == "none"
    assert set(settings["target_modules"]) <= set(targets) | set(modules)
