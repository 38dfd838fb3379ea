"""Parts of files that a family does not read are named by the caller, or the files are refused: nothing is dropped in
silence."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from safetensors.torch import load_file, save_file

import params as P
from fnmodels import family_of
from fnmodels.errors import MismatchError, UnsupportedError
from fnmodels.models.common.family import traits_of
from params.checkpoint.tensor_map import is_leftover
from params.inspect import main
from tests.support.cases import Case, generic_params, richest

WITH_UNREAD = [case for case in richest() if traits_of(family_of(case.config)).unread]
LETTERS = st.characters(codec="ascii", categories=("L", "Nd"), include_characters="._")


def name_of(pattern: str) -> str:
    """A name that the pattern matches."""
    return str(st.from_regex(pattern, fullmatch=True, alphabet=LETTERS).example())


def test_the_families() -> None:
    found = {case.family for case in WITH_UNREAD}
    assert found >= {"deepseek_v41", "mistral_large4", "laguna", "gemma3n", "kimi_k3", "minimax_m3", "inkling2"}


@pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
@pytest.mark.parametrize("case", WITH_UNREAD, ids=str)
def test_unread_parts_are_refused_or_named(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = traits_of(family_of(case.config)).unread
    if getattr(case.config, "num_nextn_predict_layers", 0):  # heads that are counted are read
        parts = {part: pattern for part, pattern in parts.items() if part != "mtp"}
    P.save_pretrained(tmp_path, case.config, generic_params(case.config))
    state = load_file(tmp_path / "model.safetensors")
    more = {part: name_of(pattern) for part, pattern in parts.items()}
    assert not any(is_leftover(case.config, name) for name in more.values())
    save_file(state | {name: torch.zeros(3) for name in more.values()}, tmp_path / "model.safetensors")
    for part, name in more.items():
        others = tuple(other for other in more if other != part)
        with pytest.raises(UnsupportedError, match=rf"drop=\('{part}',\)") as error:
            P.load_pretrained(tmp_path, drop=others)
        assert name in str(error.value)
    config, params = P.load_pretrained(tmp_path, drop=tuple(more))
    assert config == case.config
    with pytest.raises(MismatchError, match="which is not read; leave it out"):
        P.from_tensors(config, [*P.export(config, params), *((name, torch.zeros(3)) for name in more.values())])
    assert main([str(tmp_path)]) in (0, 2)  # files changed after the save: 2
    said = capsys.readouterr().out
    assert all(f"of the part {part!r}, as {name}: drop=({part!r},)" in said for part, name in more.items())
