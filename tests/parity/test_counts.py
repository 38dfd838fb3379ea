"""How many model types of the installed transformers are read, by what they do; run with -s to see what is missing.

A bound is raised with the types that are added. A type that is only a part of another is not counted.
"""

import pytest
from transformers.models.auto import modeling_auto

from fnmodels.models.common.registry import every_model
from tests.params.checkpoint.test_wrapped_text import NOT_MADE, WRAPPERS

# {mapping of transformers: the least number of its types that are read}
BOUNDS = {
    "CAUSAL_LM": 149,
    "IMAGE_TEXT_TO_TEXT": 47,
    "MASKED_LM": 25,
    "SEQ_TO_SEQ_CAUSAL_LM": 19,
    "SPEECH_SEQ_2_SEQ": 6,
    "CTC": 5,
}
_HALF = "the decoder of a model of images, speech or pairs, which is published as a whole"
_DRAFT = "proposes tokens for another model, and reads its keys and values"
# Types that nobody loads by themselves: why.
PARTS = {
    **dict.fromkeys(("bigbird_pegasus", "blt", "git", "moshi", "musicgen", "musicgen_melody", "mvp", "plbart"), _HALF),
    **dict.fromkeys(("prophetnet", "trocr"), _HALF),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _DRAFT),
}


@pytest.mark.parametrize("mapping", BOUNDS)
def test_as_many_types_are_read_as_before(mapping: str) -> None:
    known = every_model()
    types = sorted(set(getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")) - PARTS.keys())
    missing = [model_type for model_type in types if model_type not in known]
    read, by_text = len(types) - len(missing), [t for t in missing if t in WRAPPERS or t in NOT_MADE]
    print(f"\n{mapping}: {read} of {len(types)} types are read; missing are {', '.join(missing)}")
    if by_text:
        print(f'Of these, part="text" reads {len(by_text)}: {", ".join(by_text)}')
    assert read >= BOUNDS[mapping], f"{mapping}: {read} types are read, which were {BOUNDS[mapping]}."


def test_parts_are_types_that_are_not_read() -> None:
    known = every_model()
    read = [model_type for model_type in PARTS if model_type in known]
    assert not read, f"{read} are read: count them, and raise the bounds."
