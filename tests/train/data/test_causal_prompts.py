"""Models whose prompt sees all of itself are refused where rows do not say where it ends, before they are loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import params as P
from fnmodels.errors import UserError
from tests.support.image_texts import ImageCase, image_cases
from tests.support.served import serving
from tests.train.data.test_image_prompts import SETTINGS, tokenizer_of
from train.integrations import tinker
from train.integrations.verl.pictures import ImageReader
from train.rl.pictures import Pictures

CASE: ImageCase = next(case for case in image_cases() if case.name == "paligemma")
WORDS = "the prompt of a paligemma sees all of itself"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    P.save_pretrained(tmp_path / "model", CASE.config, CASE.params())
    tokenizer_of(CASE).save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(SETTINGS["paligemma"][0]))
    return tmp_path / "model"


def test_adapters_refuse_it(folder: Path) -> None:
    service = tinker.ServiceClient(folder=folder.parent / "saves")
    with pytest.raises(UserError, match=f"Tinker's interface takes models .*{WORDS}"):
        service.create_lora_training_client(folder, rank=2)
    with pytest.raises(UserError, match=f"Tinker's interface takes models .*{WORDS}"):
        service.create_sampling_client(base_model=folder)
    with pytest.raises(UserError, match=f"GRPO with pictures takes models .*{WORDS}"):
        Pictures.load(folder)
    with pytest.raises(UserError, match=f"engine.images takes models .*{WORDS}"):
        ImageReader.load(folder, torch.float32, "cpu")


def test_the_server_answers_and_does_not_score_prompts_or_train(folder: Path) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    with pytest.raises(UserError, match=WORDS), serving(folder, saves=folder.parent / "saves"):
        pass
    asked: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0}
    with serving(folder, context=32) as server:
        assert server.send("/v1/completions", asked)[0] == 200
        assert server.send("/v1/completions", asked | {"logprobs": 1})[0] == 200
        status, answer, _ = server.send("/v1/completions", asked | {"logprobs": 1, "echo": True})
        assert status == 400 and "Echo with logprobs takes models whose tokens" in answer["error"]["message"]
