"""What a user reads who names a checkpoint that cannot be loaded."""

import json
from pathlib import Path

import pytest

import params as P
from fnmodels.errors import ConfigError


def test_the_file_of_a_wrong_value_is_named_once(tmp_path: Path) -> None:
    values = {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2, "use_sliding_window": False}
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    values |= sizes | {"num_hidden_layers": 2, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="'layer_types' has sliding layers, but 'sliding_window' is off") as caught:
        P.load_config(tmp_path)
    assert str(caught.value).count("config.json") == 1
