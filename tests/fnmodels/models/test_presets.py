"""Presets: their parameter counts are the published totals, and a wrong name says what is near."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import fnmodels
import params as P
from fnmodels.models.presets import preset, presets
from tests.support.cases import check_shapes, family_modules, published_of
from tests.support.status import CHECKED, PRESET

# Totals as their publishers' files add up to (a tied head counts once); of Gemma 3's larger and Ministral 3 without the
# vision tower and its projection. A text is all that the publisher says, cut off and not rounded: Ministral's 8.4B is
# 8.49. The copies of embedding and head that MTP modules have on disk are no parameters of their own: 1.9B of DeepSeek
# V3's files, and of GLM 4.5's as below.
# The card of StableLM 2 12B says 12,143,605,760. Its shapes add up to that less weights and biases of the 41 LayerNorms
# over the model's width, which have been counted twice there.
STABLELM_NORMS = 41 * 2 * 5120
# What stands beside the text in the totals of Gemma 3: its tower, and a norm and a matrix from there.
GEMMA3_TOWER, GEMMA3_PATCH = 416_866_032, 1152
PUBLISHED: dict[str, int | str] = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "ministral-8b": 8_019_808_256,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "smollm3-3b": 3_075_098_624,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b-text": 4_300_079_472 - GEMMA3_TOWER - GEMMA3_PATCH * (2560 + 1),
    "gemma-3-12b-text": 12_187_325_040 - GEMMA3_TOWER - GEMMA3_PATCH * (3840 + 1),
    "gemma-3-27b-text": 27_432_406_640 - GEMMA3_TOWER - GEMMA3_PATCH * (5376 + 1),
    "embeddinggemma-300m": 302_863_104,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "olmo-3-7b": 7_298_011_136,
    "olmo-3-32b": 32_233_522_176,
    "granite-3.1-2b": 2_533_531_648,
    "granite-3.1-8b": 8_170_848_256,
    "command-r7b": 8_028_033_024,
    "command-a-111b": 111_057_580_032,
    "falcon3-1b": 1_669_408_768,
    "falcon3-3b": 3_227_655_168,
    "falcon3-7b": 7_455_550_464,
    "falcon3-10b": 10_305_653_760,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "stablelm-3b-4e1t": 2_795_443_200,
    "stablelm-2-1.6b": 1_644_515_328,
    "stablelm-2-12b": 12_143_605_760 - STABLELM_NORMS,
    "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "glm-4-9b": 9_400_279_040,
    "glm-4-32b": "32B",
    "ministral-3-3b": 3_429_006_336,
    "ministral-3-8b": "8.4B",
    "ministral-3-14b": "13.5B",
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2-57b-a14b": "57.4B",
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "olmoe-1b-7b": 6_919_161_856,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    # all parts, less the vision tower and its projection
    "llama-4-scout": 108_641_793_536 - 871_932_416,
    "llama-4-scout-text": 108_641_793_536 - 871_932_416,
    "llama-4-maverick": 401_583_781_376 - 871_932_416,
    "llama-4-maverick-text": 401_583_781_376 - 871_932_416,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200 + 11_610_068_224,  # the main model and the MTP module
    "deepseek-r1": 671_026_419_200 + 11_610_068_224,
    "kimi-k2": 1_026_408_232_448,
    "moonlight-16b-a3b": 15_289_021_568 + 2 * 163840 * 2048,  # without embedding and head as in its paper, and these
    "glm-4.5": 358_337_791_296 - 2 * 151552 * 5120,
    "glm-4.5-air": 110_468_824_832 - 2 * 151552 * 4096,
}


@pytest.mark.parametrize("name", presets())
def test_counts_equal_the_published_totals(name: str, record_property: Callable[[str, object], None]) -> None:
    config, total = preset(name), PUBLISHED[name]
    count: int | str = P.count(config)
    if isinstance(total, str):
        decimals = len(total.partition(".")[2].removesuffix("B"))
        count = f"{P.count(config) // 10 ** (9 - decimals) / 10**decimals:.{decimals}f}B"
    assert count == total
    record_property(PRESET, (config.model_type, P.count(config)))


def largest() -> Iterator[Any]:
    """Of each model type; without those that tests/contract/test_build.py runs from their config.json."""
    published = [(c.model_type, c) for family in family_modules() for c in published_of(family).values()]
    configs = [preset(name) for name in presets()]
    for model_type in fnmodels.families():
        config = max((c for c in configs if c.model_type == model_type), key=P.count)
        if (model_type, config) not in published:
            yield pytest.param(config, id=model_type)


@pytest.mark.parametrize("config", list(largest()))
def test_the_largest_runs_in_shapes(config: Any, record_property: Callable[[str, object], None]) -> None:
    check_shapes(config)
    record_property(CHECKED, (config.model_type, P.count(config)))


def test_every_model_type_has_one() -> None:
    assert {preset(name).model_type for name in presets()} == fnmodels.families().keys()


def test_an_unknown_name_lists_near_ones() -> None:
    for wrong, near in (
        ("qwen3-0.6B", "qwen3-0.6b"),
        ("GPT2", "gpt2"),
        ("GPT2-XL", "gpt2-xl"),
        ("Llama3", "llama-3-8b"),
    ):
        with pytest.raises(ValueError, match=rf"There is no preset '{wrong}'; near it are .*\b{near}\b"):
            preset(wrong)
    with pytest.raises(ValueError, match=r"There is no preset 'zzzz'; there are command-a-111b, .*, starcoder2-7b"):
        preset("zzzz")
