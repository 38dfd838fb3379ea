"""The default model of the main job and how it is trained: what learns most in four minutes of two CPU cores."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """Every size divides by 2 (tensor, context and pipeline parallel), the rows of a batch by 4 (data parallel)."""

    vocab_size: int = 4096
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    row_length: int = 512
    batch_rows: int = 4
    steps: int = 1000
    learning_rate: float = 3e-3
    init_learning_rate: float = 3e-4  # from a checkpoint: what it has learned should survive the first steps
    warmup: int = 60
    decay_ratio: float = 0.6
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    evaluations: int = 10
    evaluation_rows: int = 16
    save_every: int = 100
    prompt: str = "def "
    sample_tokens: int = 120


DEFAULT = Preset()


def hf_config(preset: Preset, vocab_size: int, special_ids: dict[str, int]) -> dict[str, Any]:
    """The default model's config.json for a tokenizer of `vocab_size` tokens."""
    return {
        "model_type": "llama",
        "vocab_size": -(-vocab_size // 64) * 64,  # divides by any mesh, whatever the text was
        "hidden_size": preset.hidden_size,
        "intermediate_size": preset.intermediate_size,
        "num_hidden_layers": preset.num_hidden_layers,
        "num_attention_heads": preset.num_attention_heads,
        "num_key_value_heads": preset.num_key_value_heads,
        "max_position_embeddings": preset.row_length,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        **special_ids,
    }
