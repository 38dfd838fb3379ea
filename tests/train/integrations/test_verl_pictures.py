"""Images of verl's batches: rows of patches are the pictures, and the engine's numbers those of the model itself."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]
HERE = importlib.util.find_spec("verl") is not None


def support(name: str) -> Any:
    """The module tests/support/NAME.py; verl installs a package `tests` of its own."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tests/support/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    made = support("verl_runs").Runs(tmp_path)
    yield made
    made.close()


@pytest.mark.skipif(not HERE, reason="verl has a virtual environment of its own: make verl")
@pytest.mark.parametrize("mesh", ["", "fsdp=2", "dp=2", "tp=2"])
def test_an_engine_reads_the_images_of_a_batch(run: Any, tmp_path: Path, mesh: str) -> None:
    """Scores and gradients with and without images, in packed rows, and an answer that has the id of image tokens."""
    support("pictured").write_reader(tmp_path / "model")
    program = [ROOT / "tests/support/verl_pictures.py", tmp_path / "model", mesh]
    found = json.loads(run.program(program, 2 if mesh else 1).splitlines()[-1])
    assert "NotImplementedError" in found["off"] and found["log_probs"] < 1e-5
    assert found["gradients"] < 1e-5 and found["exported"] == 0


@pytest.mark.skipif(not HERE, reason="verl has a virtual environment of its own: make verl")
def test_a_mesh_that_divides_sequences_is_refused(run: Any, tmp_path: Path) -> None:
    support("pictured").write_reader(tmp_path / "model")
    program = [ROOT / "tests/support/verl_pictures.py", tmp_path / "model", "cp=2"]
    found = json.loads(run.program(program, 2).splitlines()[-1])
    assert found["refused"].startswith("NotImplementedError: engine.images is true, with the mesh cp=2")


def test_rows_of_patches_are_the_pictures() -> None:
    from train.integrations.verl.pictures import images_of

    pictured, made = support("pictured"), support("verl_pictures")
    config = pictured.qwen2_5_vl.Config.from_hf(pictured.VALUES)
    _, images, _ = made.sequences()
    parts = [made.patches(image) for image in images[2]]
    given = {"pixel_values": torch.cat([p for p, _ in parts]), "image_grid_thw": torch.tensor([g for _, g in parts])}
    given["images_seqlens"] = torch.tensor([8, 16])
    found = images_of(given, config)
    assert len(found) == 2
    for one, image in zip(found, images[2], strict=True):
        assert torch.equal(one, image.repeat_interleave(2, 0))
    assert images_of({}, config) == [] and images_of({"pixel_values": None}, config) == []
    with pytest.raises(NotImplementedError, match="have 'pixel_values_videos'; fnmodels takes pixel_values"):
        images_of(given | {"pixel_values_videos": torch.zeros(1)}, config)
    with pytest.raises(ValueError, match="pixel_values have 23 patches, and image_grid_thw are"):
        images_of(given | {"pixel_values": given["pixel_values"][1:]}, config)
    grids = given["image_grid_thw"].clone()
    grids[0, 0] = 2
    with pytest.raises(ValueError, match="an image has one frame"):
        images_of(given | {"image_grid_thw": grids}, config)


@pytest.mark.skipif(HERE, reason="compares with transformers as this package's tests have it")
def test_rows_of_patches_are_those_of_transformers(tmp_path: Path) -> None:
    from PIL import Image
    from transformers import Qwen2VLImageProcessor

    from train.data.image_prompts import ImagePrompts
    from train.eval.pretrained import load_tokenizer
    from train.integrations.verl.pictures import images_of

    pictured = support("pictured")
    folder = pictured.write_reader(tmp_path / "model")
    config = pictured.qwen2_5_vl.Config.from_hf(pictured.VALUES)
    (tmp_path / "one.png").write_bytes(pictured.picture(2, 3))
    (image,), _ = ImagePrompts.of(folder, config, load_tokenizer(folder)).read(tmp_path / "one.png")
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    processor = Qwen2VLImageProcessor(**settings, merge_size=2, temporal_patch_size=2)
    made = processor(Image.open(tmp_path / "one.png"), return_tensors="pt")
    (found,) = images_of(dict(made), config)
    torch.testing.assert_close(found, image.repeat_interleave(2, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [5, 7])
def test_a_wrong_number_of_image_tokens_is_refused_with_the_numbers(count: int) -> None:
    import params as P
    from train.integrations.verl.batches import packed_row
    from train.integrations.verl.pictures import ImageReader

    pictured, made = support("pictured"), support("verl_pictures")
    config = pictured.qwen2_5_vl.Config.from_hf(pictured.VALUES)
    reads = ImageReader(config, {name: part for name, part in P.init(config, 0).items() if name != "text"})
    _, images, _ = made.sequences()
    pixels, grid = made.patches(images[0][0])
    ids = [torch.tensor([1, *[60] * count, 2, 60]), torch.tensor([3, 4])]

    def nested(*rows: torch.Tensor) -> torch.Tensor:
        return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)

    micro = {"input_ids": nested(*ids), "position_ids": nested(*(torch.arange(len(one)) for one in ids))}
    micro["loss_mask"] = nested(torch.tensor([0] * (count + 1) + [1, 1]), torch.tensor([0, 1]))
    given: Any = micro | {"multi_modal_inputs": [{"pixel_values": pixels, "image_grid_thw": torch.tensor([grid])}, {}]}
    with pytest.raises(ValueError, match=rf"Sequence 0: The sequence has {count} image tokens .* 1 images have 6"):
        packed_row(given, 0, reads=reads)
    with pytest.raises(NotImplementedError, match=r"engine\.images=true reads"):
        packed_row(given, 0)
    plain = packed_row(micro | {"input_ids": nested(ids[1]), "loss_mask": nested(torch.tensor([0, 1]))}, 0, reads=reads)
    assert plain["image_features"].shape == (1, 2, 1, 24) and not plain["is_image"].any()
    assert plain["positions"].shape == (1, 2, 4)


@pytest.mark.parametrize("form", ["padded", "jagged", "unknown"])
def test_the_mask_of_rollouts_is_of_the_answers(form: str) -> None:
    """Padded as `left_right_2_no_padding` leaves it, or jagged; images of a tool's turn are unmarked in the answer."""
    import params as P
    from train.integrations.verl.batches import packed_row
    from train.integrations.verl.pictures import ImageReader

    pictured, made = support("pictured"), support("verl_pictures")
    config = pictured.qwen2_5_vl.Config.from_hf(pictured.VALUES)
    reads = ImageReader(config, {name: part for name, part in P.init(config, 0).items() if name != "text"})
    pixels, grids = made.patches(torch.randn(3, 16, 24))
    given = {"pixel_values": torch.cat((pixels, pixels)), "image_grid_thw": torch.tensor([grids, grids])}
    prompt, answer = [1, *[60] * 6, 2], [60, 5, *[60] * 6, 60]  # drawn, then of a tool, then drawn
    rows = [torch.tensor([*prompt, *answer]), torch.tensor([3, 4, 60])]

    def nested(*values: torch.Tensor) -> torch.Tensor:
        return torch.nested.as_nested_tensor(list(values), layout=torch.jagged)

    micro: dict[str, Any] = {"input_ids": nested(*rows), "position_ids": nested(*(torch.arange(len(x)) for x in rows))}
    micro["multi_modal_inputs"] = [given, {}]
    micro["loss_mask"] = torch.tensor([[1, 1, *[0] * 6, 1, 0], [1, *[0] * 9]])
    if form == "unknown":
        with pytest.raises(ValueError, match="there is no attention_mask, which says how long each answer is"):
            packed_row(micro, 0, reads=reads)
        return
    if form == "jagged":
        micro["loss_mask"] = nested(micro["loss_mask"][0, :9], micro["loss_mask"][1, :1])
    micro["attention_mask"] = torch.tensor([[*[1] * 17, 0], [*[0] * 6, 1, 1, 1, *[0] * 9]])
    found = packed_row(micro, 0, reads=reads)["is_image"][0].tolist()
    assert found == [False, *[True] * 6, *[False] * 3, *[True] * 6, *[False] * 4]
