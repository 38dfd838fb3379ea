"""Pictures and their text are what transformers' processors make of them, at every vision-language family."""

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from fnmodels.errors import UserError
from fnmodels.image_text import image_grid
from fnmodels.inputs.images import patches_of
from tests.support.image_texts import ImageCase, image_cases
from tests.support.wrappers import merged_patches
from train.data.image_prompts import ImagePrompts

_LIKE_OTHERS = ("_bias", "_e", "_moe", "_qwen2", "paligemma2")
CASES = tuple(case for case in image_cases() if hasattr(case.family, "read_image"))
CASES = tuple(case for case in CASES if not case.name.endswith(_LIKE_OTHERS))
MEAN, STD = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]
NORMAL = {"image_mean": MEAN, "image_std": STD}
# The settings of pictures, and the folder of transformers with their processor.
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "gemma3": ({"size": {"height": 24, "width": 24}, "resample": 2} | NORMAL, "gemma3"),
    "gemma4": ({"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 2, "do_normalize": False}, "gemma4"),
    "llama4": ({"size": {"height": 24, "width": 24}, "max_patches": 4} | NORMAL, "llama4"),
    "llava_llama": (
        {"size": {"shortest_edge": 18}, "crop_size": {"height": 18, "width": 18}} | NORMAL,
        "clip",
    ),
    "mistral3": ({"size": {"longest_edge": 24}, "patch_size": 8} | NORMAL, "pixtral"),
}
_AREA = {"size": {"shortest_edge": 64, "longest_edge": 800}} | NORMAL
SETTINGS["gemma4_unified"] = SETTINGS["gemma4"]
SETTINGS["paddleocr_vl"] = (_AREA | {"patch_size": 4}, "paddleocr_vl")
SETTINGS["hy_v4_vl"] = (_AREA | {"patch_size": 4}, "hy_v4_vl")
SETTINGS["paligemma"] = ({"size": {"height": 12, "width": 12}} | NORMAL, "siglip")
_QWEN = _AREA | {"patch_size": 4}
SETTINGS |= dict.fromkeys(("qwen2_5_vl", "qwen3_5", "qwen3_vl"), (_QWEN, "qwen2_vl"))
SETTINGS["glm4v"] = (_QWEN | {"size": {"shortest_edge": 128, "longest_edge": 1600}}, "glm4v")
_TILED = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}} | NORMAL
SETTINGS["llava_next"] = (_TILED | {"image_grid_pinpoints": [[8, 16], [16, 8], [16, 16], [8, 24]]}, "llava_next")
SETTINGS["step3p7"] = (
    {"size": {"height": 32, "width": 32}, "patch_size": 16, "max_image_size": 512} | NORMAL,
    "step3p7",
)
SETTINGS["glm5_next"] = ({"patch_size": 4, "min_image_tokens": 4, "max_image_tokens": 12} | NORMAL, "glm5_next")
_CROPS = 3 * "<patch_start><img><patch_end>"
# What stands for a picture of 20 x 44 pixels in a prompt: its placeholder, and the text with "i" for features.
TEXTS = {
    "glm5_next": ("i", 10 * "i"),  # of 16 x 35 pixels, with room at the right
    "gemma3": ("[58]", "\n\n[58]" + 9 * "i" + "[59]\n\n"),
    "hy_v4_vl": ("i", 2 * 7 * "i"),
    **dict.fromkeys(("gemma4", "gemma4_unified"), ("i", "[57]" + 60 * "i" + "[56]")),
    "llama4": (
        "<|image|>",
        f"<|image_start|>{9 * 'i'}<|tile_x_separator|>{9 * 'i'}<|tile_y_separator|><|image|>{9 * 'i'}<|image_end|>",
    ),
    "llava_llama": ("i", 9 * "i"),
    "llava_next": ("i", 14 * "i"),
    "mistral3": ("i", "iii[IMG_BREAK]iii[IMG_END]"),
    "paligemma": ("i", 9 * "i"),
    "step3p7": ("<img>", f"{_CROPS}<patch_newline>{_CROPS}<im_start>{4 * '<img>'}<im_end>"),
    **dict.fromkeys(("glm4v", "paddleocr_vl", "qwen2_5_vl", "qwen3_5", "qwen3_vl"), ("i", 12 * "i")),
}
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def tokenizer_of(case: ImageCase) -> Tokenizer:
    """Words "w1" and so on; ids from 40 on are special tokens "[41]" and so on, and the image token is "<img>"."""
    size = case.config.text.vocab_size
    names = {number: f"w{number}" if number < 40 else f"[{number}]" for number in range(size)}
    names[case.config.image_token] = "<img>"
    made = Tokenizer(models.WordLevel({name: number for number, name in names.items()}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(names[number], special=True) for number in range(40, size)])
    return made


def picture(folder: Path, size: tuple[int, int] = (20, 44), name: str = "picture.png") -> tuple[Path, torch.Tensor]:
    from PIL import Image

    down, right, color = torch.meshgrid(*(torch.arange(n) for n in (*size, 3)), indexing="ij")
    pixels = (127 + 90 * torch.sin(down / 4 + right / 5 + color)).byte().permute(2, 0, 1)  # smooth: no filter clips
    Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())).save(folder / name)
    return folder / name, pixels


def reader_of(
    case: ImageCase, folder: Path, settings: Any = None, file: str = "preprocessor_config.json"
) -> ImagePrompts:
    settings = SETTINGS[case.name][0] if settings is None else settings
    (folder / file).write_text(json.dumps(settings))
    return ImagePrompts.of(folder, case.config, tokenizer_of(case))


@every_case
def test_pixels_equal_transformers(case: ImageCase, tmp_path: Path) -> None:
    """By Pillow, whose filter rounds to whole numbers between its two passes."""
    settings, name = SETTINGS[case.name]
    module = f"transformers.models.{name}.image_processing_pil_{name}"
    if importlib.util.find_spec(module) is None:
        pytest.skip("a processor of torchvision alone: see tests/fnmodels/inputs/test_images.py and test_step3p7.py")
    file, pixels = picture(tmp_path)
    images, _ = reader_of(case, tmp_path).read(file)
    if case.name == "mistral3":  # its processor says how many pixels a cell has
        settings = settings | {"patch_size": {"height": 8, "width": 8}}
    found = vars(importlib.import_module(module))
    process: Any = next(own for key, own in found.items() if key.endswith("ImageProcessorPil"))(**settings)
    theirs = torch.as_tensor(np.stack(process(pixels.permute(1, 2, 0).numpy(), return_tensors="np")["pixel_values"]))
    bound = 2.5 / 255 / min(STD)
    if case.name.startswith(("qwen", "glm")):
        assert float((merged_patches(images[0], 4) - theirs).abs().max()) <= bound
    elif case.name in ("paddleocr_vl", "hy_v4_vl"):
        assert float((patches_of(images[0], 4).reshape(theirs.shape) - theirs).abs().max()) <= bound
    elif case.name.startswith("gemma4"):
        own = patches_of(images[0], 4, channels_last=True).flatten(0, 1)
        assert float((own - theirs[0, : len(own)]).abs().max()) <= bound
    elif case.name == "llava_next":
        assert float((images[0].tiles - theirs[0]).abs().max()) <= bound  # type: ignore[union-attr]
    else:
        assert float((torch.stack(images) - theirs).abs().max()) <= bound


@every_case
def test_prompts_have_a_token_for_each_feature(case: ImageCase, tmp_path: Path) -> None:
    file, _ = picture(tmp_path)
    placeholder, text = (part.replace("i", "<img>") if "<" not in part else part for part in TEXTS[case.name])
    if case.name == "llama4":
        text = text.replace("i" * 9, "<img>" * 9)
    if case.name == "mistral3":
        text = "<img><img><img>[IMG_BREAK]<img><img><img>[IMG_END]"
    reader = reader_of(case, tmp_path)
    found, images = reader.with_pictures(f"w1 {placeholder} w2 {placeholder} w3", [file, file], chat=True)
    assert found == f"w1 {text} w2 {text} w3"
    assert images[0] is images[len(images) // 2]  # read once
    features = sum(rows * columns for _, rows, columns in (image_grid(one, config=case.config) for one in images))
    assert found.count("<img>") == features
    front, _ = reader.with_pictures("w1", [file], chat=False)
    assert front.endswith("w1") and text in front
    again = reader_of(case, tmp_path, {"image_processor": SETTINGS[case.name][0]}, "processor_config.json")
    pixels, others = (getattr(one, "tiles", one) for one in (again.read(file)[0][0], images[0]))
    assert torch.equal(pixels, others)


def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "qwen2_5_vl")
    with pytest.raises(UserError, match=r"has no preprocessor_config.json and no processor_config.json"):
        ImagePrompts.of(tmp_path, case.config, tokenizer_of(case))
    file, _ = picture(tmp_path)
    reader = reader_of(case, tmp_path)
    with pytest.raises(UserError, match=r"the prompt has 0 places for images \(<img>\), and there are 1"):
        reader.with_pictures("w1", [file], chat=True)
    with pytest.raises(UserError, match=r"the prompt has 1 places for images \(<img>\), and there are 0"):
        reader.with_pictures("<img>", [], chat=False)
    with pytest.raises(UserError, match="there is no such picture"):
        reader.read(tmp_path / "none.png")
    long, _ = picture(tmp_path, (1, 300), "long.png")
    with pytest.raises(
        UserError, match=r"long.png: a picture of 1 x 300 pixels is more than 200 times as long as wide"
    ):
        reader.read(long)
    for settings, sentence in (
        (_QWEN | {"do_resize": False}, "'do_resize' must be true"),
        (_QWEN | {"resample": 5}, r"'resample' is 5; 2 \(bilinear\) and 3"),
        (_QWEN | {"min_pixels": 0}, "'min_pixels' is 0; it must be a number from 1 to 50,000,000"),
        (_QWEN | {"size": {"longest_edge": 10**9}}, "'size' is 1000000000; it must be a number from 1 to 50,000,000"),
        (_QWEN | {"image_mean": [1, 2]}, "'image_mean' is .* it must be three numbers"),
        ([], "holds no settings of pictures"),
    ):
        with pytest.raises(UserError, match=sentence):
            reader_of(case, tmp_path, settings).read(file)
    gemma = next(case for case in CASES if case.name == "gemma3")
    with pytest.raises(UserError, match="'do_pan_and_scan' is true; only false is supported"):
        reader_of(gemma, tmp_path, SETTINGS["gemma3"][0] | {"do_pan_and_scan": True}).read(file)
    with pytest.raises(UserError, match="'size' is 16, and the tower reads squares of 24 pixels"):
        reader_of(gemma, tmp_path, {"size": {"height": 16, "width": 16}}).read(file)
    with pytest.raises(UserError, match="'size' is 100000; it must be a number from 1 to 24"):
        reader_of(gemma, tmp_path, {"size": {"height": 100000}}).read(file)
    mistral = next(case for case in CASES if case.name == "mistral3")
    narrow, _ = picture(tmp_path, (3, 300), "narrow.png")
    with pytest.raises(UserError, match=r"narrow.png: A picture of 3 x 300 pixels is too narrow"):
        reader_of(mistral, tmp_path).read(narrow)


def test_a_long_picture_of_llava_takes_little_memory(tmp_path: Path) -> None:
    """Its middle is read, which is all that the crop leaves."""
    case = next(case for case in CASES if case.name == "llava_llama")
    long, _ = picture(tmp_path, (20, 4000), "long.png")
    middle, _ = picture(tmp_path, (20, 80), "middle.png")
    sizes = [reader_of(case, tmp_path).read(one)[0][0].shape for one in (long, middle)]
    assert sizes == [torch.Size((3, 18, 18))] * 2


def test_pictures_stand_as_their_camera_was_held(tmp_path: Path) -> None:
    from PIL import Image

    case = next(case for case in CASES if case.name == "qwen2_5_vl")
    file, _ = picture(tmp_path, (16, 32))
    turned = Image.open(file)
    turned.getexif()[274] = 6  # to be turned by 90 degrees
    turned.save(tmp_path / "turned.png", exif=turned.getexif())
    images, _ = reader_of(case, tmp_path).read(tmp_path / "turned.png")
    upright, _ = reader_of(case, tmp_path).read(file)
    assert torch.equal(images[0], upright[0].rot90(-1, (1, 2)))
