"""Reading a checkpoint folder's tokenizer by its name."""

from pathlib import Path

import pytest

from fnmodels.errors import UserError
from train.data.tokenizer import train_tokenizer
from train.eval.pretrained import load_tokenizer


def test_a_folder_is_a_path_or_a_string(tmp_path: Path) -> None:
    train_tokenizer(["a b c"] * 9, 260).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path)).to_str() == load_tokenizer(tmp_path).to_str()
    with pytest.raises(UserError, match="nosuch: there is no such checkpoint folder"):
        load_tokenizer("nosuch")
