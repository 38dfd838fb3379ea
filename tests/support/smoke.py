"""Smoke test of an installed fnmodels without pytest: makes a model, runs, saves and loads it, decodes greedily."""

import tempfile
from pathlib import Path

import torch

import fnmodels
import fnmodels.models.decoder.llama
import params as P

config = fnmodels.models.decoder.llama.Config.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
    }
)


@torch.no_grad()
def generate(weights: dict, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Appends `count` times the likeliest next token to each row [B, S]."""
    for _ in range(count):
        logits = fnmodels.forward(weights, *fnmodels.prepare(config, tokens), config=config)
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    return tokens


weights = P.init(config, 0)
prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
generated = generate(weights, prompt, 5)
assert generated.shape == (2, 8), generated.shape
with tempfile.TemporaryDirectory() as folder:
    P.save_pretrained(Path(folder) / "model", config, weights)
    again, loaded = P.load_pretrained(Path(folder) / "model")
    assert again == config
    assert all(torch.equal(tensor, P.flatten(loaded)[name]) for name, tensor in P.flatten(weights).items())
    assert torch.equal(generate(loaded, prompt, 5), generated)
print("smoke test passed:", fnmodels.__file__)
