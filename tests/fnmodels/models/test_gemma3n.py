"""Gemma 3n with images and sound: the text of a file with the names of the whole model.

transformers makes the whole model only where timm is installed; its text model has the same tensors, whose names in the
file of the whole begin with model.language_model.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

import fnmodels
import params as P
from tests.support.cases import generic
from tests.support.oracle import assert_close
from tests.support.status import Shows
from tests.variants.gemma3n import TINY


def test_the_text_of_a_whole_model_is_read(tmp_path: Path, shows: Shows) -> None:
    shows("gemma3n", "parity")
    config = transformers.AutoConfig.for_model(**TINY)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(generic(name, tensor))
    model.save_pretrained(tmp_path)
    file, values = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())
    tensors = {name.replace("model.", "model.language_model.", 1): t for name, t in load_file(file).items()}
    towers = {f"model.{tower}.patch.weight": torch.ones(2, 2) for tower in ("vision_tower", "audio_tower")}
    save_file(tensors | towers, file, {"format": "pt"})
    whole = {"model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"], "text_config": values}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    read, params = P.load_pretrained(tmp_path, part="text")
    tokens = torch.randint(10, 41, (1, 20), generator=torch.Generator().manual_seed(3))
    ours: Any = fnmodels.forward(params, *fnmodels.prepare(read, tokens), config=read, kernel="math")
    with torch.no_grad():
        theirs = model(input_ids=tokens, use_cache=False).logits
    assert_close(ours, theirs)
    assert read.model_type == "gemma3n"
