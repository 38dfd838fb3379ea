"""How many of transformers' types that read images among texts are read, and which are missing."""

from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from fnmodels.models.common.registry import every_model

LEAST = 47


def test_types_that_read_images() -> None:
    known, every = every_model(), sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    missing = [model_type for model_type in every if model_type not in known]
    print(f"\n{len(every) - len(missing)} of {len(every)} types are read; missing: {', '.join(missing)}")
    assert len(every) - len(missing) >= LEAST
