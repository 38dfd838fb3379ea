"""A checkpoint of a tiny model that reads pictures, without transformers, and pictures for it."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

import params as P
from fnmodels import tree
from fnmodels.models.vision_language import qwen2_5_vl

IMAGE = 60  # the id of image tokens
_VISION: dict[str, Any] = {"model_type": "qwen2_5_vl_vision", "depth": 2, "hidden_size": 32, "intermediate_size": 40}
_VISION |= {"num_heads": 4, "patch_size": 4, "out_hidden_size": 24, "window_size": 16, "fullatt_block_indexes": [1]}
_TEXT: dict[str, Any] = {"model_type": "qwen2_5_vl_text", "hidden_size": 24, "intermediate_size": 40, "vocab_size": 64}
_TEXT |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
_TEXT |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 3]}}
VALUES = {"model_type": "qwen2_5_vl", "image_token_id": IMAGE, "video_token_id": 59, "vision_start_token_id": 58}
VALUES |= {"vision_end_token_id": 57, "tie_word_embeddings": False, "vision_config": _VISION, "text_config": _TEXT}
_SETTINGS = {"size": {"shortest_edge": 64, "longest_edge": 800}, "patch_size": 4}
_SETTINGS |= {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}


def write_reader(path: Path) -> Path:
    """A folder with weights, a tokenizer of words w0 to w56, and the settings of pictures."""
    config = qwen2_5_vl.Config.from_hf(VALUES)
    # four times the usual width, so that what a picture shows matters to the text
    weights = tree.map(lambda leaf: 4 * leaf if leaf.ndim > 1 else leaf, P.init(config, seed=3))
    P.save_pretrained(path, config, weights)
    names = {number: f"w{number}" for number in range(57)} | {57: "<end>", 58: "<begin>", 59: "<video>", IMAGE: "<img>"}
    made = Tokenizer(models.WordLevel({name: number for number, name in names.items()}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(names[number], special=True) for number in range(57, 61)])
    made.save(str(path / "tokenizer.json"))
    (path / "preprocessor_config.json").write_text(json.dumps(_SETTINGS))
    return path


def picture(rows: int, columns: int) -> bytes:
    """A smooth picture of so many cells of 8 x 8 pixels, each of which is one token, as a PNG."""
    from PIL import Image

    down, right, color = np.meshgrid(*(np.arange(n) for n in (8 * rows, 8 * columns, 3)), indexing="ij")
    pixels = (127 + 90 * np.sin(down / 4 + right / (4 + columns) + color)).astype(np.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "png")
    return written.getvalue()
