"""`python -m train.flow`: a run learns, resumes to the same bytes, and refuses what it cannot read in one sentence."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

import fnmodels
import params as P
import train
from fnmodels.errors import UserError
from train.commands.flow import main
from train.data.latents import flow_batch, read_latents
from train.data.pictures import Pixels, classes_of, picture_latents, read_picture

SIZES = ("--layers", "1", "--single-layers", "1", "--heads", "1", "--head-dim", "32")


def tensors(images: int = 3) -> dict[str, Tensor]:
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    data = {"latents": draw(images, 3, 4, 6), "text": draw(images, 5, 10), "pooled": draw(images, 9)}
    return data | {"text_lengths": torch.tensor([2, 5, 3, 1][:images])}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    save_file(tensors(), tmp_path / "data.safetensors")
    return tmp_path / "data.safetensors"


def started(run: Path, data: Path, *flags: str, sizes: tuple[str, ...] = SIZES) -> int:
    return main(["--run", str(run), "--data", str(data), "--batch", "6", *sizes, *flags])


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def test_a_run_learns_and_its_model_is_read(tmp_path: Path, data: Path) -> None:
    run = tmp_path / "run"
    sizes = (*SIZES[:4], "--heads", "3", *SIZES[6:])
    assert started(run, data, "--steps", "60", "--batch", "18", "--learning-rate", "0.01", sizes=sizes) == 0
    seen = losses(run)
    assert len(seen) == 60 and sum(seen[-5:]) < 0.5 * sum(seen[:5])
    config, params = P.load_pretrained(run / "transformer")
    assert (config.in_channels, config.joint_attention_dim, config.pooled_projection_dim) == (12, 10, 9)
    assert (config.num_layers, config.num_single_layers, config.axes_dims_rope) == (1, 1, (4, 14, 14))
    batch = train.losses.flow_noise(flow_batch(read_latents(data), 1, 0, 30), torch.Generator().manual_seed(5))
    total, count = train.flow_matching_loss(params, batch, config=config)
    assert float(total / count) < 0.5 * seen[0]


def test_resumed_runs_and_microbatches_give_the_same_weights(tmp_path: Path, data: Path) -> None:
    one, two, parts = (tmp_path / name for name in ("one", "two", "parts"))
    flags = ("--steps", "4", "--save-every", "2")
    assert started(one, data, *flags) == started(two, data, *flags) == 0
    model = Path("transformer", "diffusion_pytorch_model.safetensors")
    wanted, seen = (one / model).read_bytes(), losses(one)
    assert (two / model).read_bytes() == wanted
    (two / model).unlink()
    (two / "steps" / "step-00000004").rename(tmp_path / "lost")
    assert started(two, data, *flags, "--resume") == 0
    assert (two / model).read_bytes() == wanted and losses(two) == seen
    assert started(parts, data, *flags, "--accumulate", "3") == 0
    assert losses(parts) == pytest.approx(seen, rel=1e-5)
    other = started(tmp_path / "seed", data, *flags, "--seed", "1")
    assert other == 0 and losses(tmp_path / "seed") != seen


def test_a_run_from_a_folder_of_diffusers(tmp_path: Path, data: Path) -> None:
    """With guidance, whose embedding is trained with the rest."""
    values = {"_class_name": "FluxTransformer2DModel", "num_layers": 1, "num_single_layers": 1, "guidance_embeds": True}
    values |= {"in_channels": 12, "joint_attention_dim": 10, "pooled_projection_dim": 9, "num_attention_heads": 1}
    config = fnmodels.family_for("FluxTransformer2DModel").Config.from_hf(
        values | {"attention_head_dim": 32, "axes_dims_rope": [4, 14, 14]}
    )
    before = P.init(config, 3)
    P.save_pretrained(tmp_path / "init", config, before)
    file, run = tmp_path / "init/config.json", tmp_path / "run"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"novelty": 1}))
    (tmp_path / "init/fnmodels_manifest.json").unlink()
    flags = ("--init", str(tmp_path / "init"), "--steps", "3")
    assert started(run, data, *flags, sizes=()) == 2
    assert started(run, data, *flags, "--ignore-fields", "novelty", sizes=()) == 0
    found, after = P.load_pretrained(run / "transformer")
    assert found == config
    for path in ("guidance", "time"):
        assert not torch.equal(after[path]["up_proj"], before[path]["up_proj"]), path


def test_every_image_comes_once_before_any_comes_again(data: Path) -> None:
    read = read_latents(data)
    numbered = read | {"latents": torch.arange(3.0)[:, None, None, None].expand(3, 3, 4, 6)}
    batches = [flow_batch(numbered, 7, step, 1) for step in range(12)]
    order = torch.cat([batch["latents"][:, 0, 0] for batch in batches]).reshape(4, 3)
    assert all(sorted(epoch) == [0, 1, 2] for epoch in order.tolist())
    assert len({tuple(epoch) for epoch in order.tolist()}) > 1
    for batch in batches:
        for row, image in enumerate(batch["latents"][:, 0, 0].long()):
            assert int(batch["text_segment_ids"][row].sum()) == int(read["text_lengths"][image])
            assert torch.equal(batch["pooled"][row, 0], read["pooled"][image])
            assert torch.equal(batch["text"][row], read["text"][image])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"latents": None}, "has no tensor 'latents'"),
        ({"more": torch.zeros(1)}, "has a tensor 'more', which is not read"),
        ({"pooled": torch.zeros(2, 9)}, "pooled is torch.float32 [2, 9]; it must be floats of 2 dimensions, the first"),
        ({"text": torch.zeros(3, 5, 10, dtype=torch.int32)}, "text is torch.int32"),
        ({"latents": torch.zeros(3, 3, 4, 5)}, "height and width must be even"),
        ({"pooled": torch.full((3, 9), torch.nan)}, "pooled has values that are not finite"),
        ({"text_lengths": torch.tensor([6, 1, 1])}, "text_lengths must be 3 integers from 0 to 5"),
    ],
)
def test_data_that_cannot_be_read_are_refused(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    given = {name: value for name, value in (tensors() | changed).items() if value is not None}
    save_file(given, tmp_path / "odd.safetensors")
    with pytest.raises(UserError) as error:
        read_latents(tmp_path / "odd.safetensors")
    assert words in str(error.value)


def test_mistakes_are_one_sentence(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    for flags, words in (
        (("--head-dim", "48"), "--head-dim 48 is not a multiple of 32"),
        (("--accumulate", "7"), "--accumulate 7 splits a batch into more microbatches than it has rows: --batch is 6"),
        (("--steps", "0"), "--steps: '0' is not a whole number from 1"),
        (("--stepz", "1"), "there is no flag --stepz; the nearest is --steps"),
        (("--resume",), "there is no such folder, so --resume has no run to continue"),
        (("--init", str(tmp_path / "nowhere")), "--layers 1 is for a new model"),
    ):
        assert started(run, data, *flags) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and words in error, error
    assert started(run, tmp_path / "nowhere") == 2 and "nowhere" in capsys.readouterr().err
    assert started(run, data, "--steps", "1") == 0
    for flags, words in (
        (("--steps", "1"), "the folder is not empty: add --resume to continue its run"),
        (("--seed", "2", "--resume"), "--seed 2 differs from the run in"),
    ):
        assert started(run, data, *flags) == 2
        assert words in capsys.readouterr().err
    init = ("--init", str(run / "transformer"))
    save_file(tensors() | {"text": torch.zeros(3, 5, 8)}, tmp_path / "other.safetensors")
    assert started(tmp_path / "new", tmp_path / "other.safetensors", *init, sizes=()) == 2
    assert "its joint_attention_dim is 10" in capsys.readouterr().err


def picture_folder(folder: Path) -> Path:
    """Two classes: red above black, and blue beside white."""
    for name, first, second in (("red", (255, 0, 0), (0, 0, 0)), ("blue", (0, 0, 255), (255, 255, 255))):
        (folder / name).mkdir(parents=True)
        image = Image.new("RGB", (10, 8), second)
        image.paste(first, (0, 0, 10, 4) if name == "red" else (0, 0, 5, 8))
        for i in range(2):
            image.save(folder / name / f"{i}.png")
    return folder


def test_pictures_of_classes_are_learned_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, run = picture_folder(tmp_path / "pictures"), tmp_path / "run"
    sizes = (*SIZES[:4], "--heads", "2", *SIZES[6:], "--side", "8", "--patch", "4", "--samples", "2")
    flags = ("--steps", "250", "--batch", "24", "--learning-rate", "0.01")
    assert started(run, folder, *flags, sizes=sizes) == 0
    assert json.loads((run / "classes.json").read_text()) == ["blue", "red"]
    with Image.open(run / "samples.png") as picture:
        drawn = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float()
    assert drawn.shape == (3, 2 * 10, 2 * 10)  # 2 pictures of a row, and lines between them
    for row, files in enumerate(("blue", "red")):
        wanted = read_picture(folder / files / "0.png", Pixels(8)).add(1).mul(127.5)
        for column in range(2):
            found = drawn[:, 10 * row : 10 * row + 8, 10 * column : 10 * column + 8]
            assert float((found - wanted).abs().mean()) < 25, (row, column)  # of the other class 128
    config = P.load_config(run / "transformer")
    assert (config.in_channels, config.joint_attention_dim, config.pooled_projection_dim) == (48, 2, 2)
    capsys.readouterr()
    Image.new("RGB", (8, 8)).save(folder / "red" / "0.png")
    shutil.rmtree(run / "steps" / "step-00000250")
    assert started(run, folder, *flags, "--resume", sizes=sizes) == 2
    assert "--data is not that with which the run" in capsys.readouterr().err


def test_latents_of_pictures_are_their_pixels(tmp_path: Path) -> None:
    classes = classes_of(picture_folder(tmp_path / "pictures"))
    data = picture_latents(classes, 8, 4)
    assert data["latents"].shape == (4, 12, 4, 4) and data["text"].shape == (4, 1, 2)
    tokens, positions, segment_ids = fnmodels.diffusion.latent_rows(list(data["latents"]))
    assert tokens.shape == (4, 4, 48)  # a token is 4 x 4 pixels
    image = read_picture(classes["red"][0], Pixels(8))
    patch = image[:, 4:, :4]
    assert torch.equal(tokens[2, 2].sort().values, patch.flatten().sort().values)
    back = fnmodels.diffusion.unpacked_latents(tokens, positions, segment_ids)
    assert torch.equal(torch.nn.functional.pixel_shuffle(back[2], 2), image)
    flat = classes_of(classes["red"][0].parent)
    assert list(flat) == ["red"] and len(flat["red"]) == 2


def test_folders_that_do_not_fit_are_refused(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = picture_folder(tmp_path / "pictures")
    (tmp_path / "pictures" / "green").mkdir()
    for given, flags, words in (
        (folder, (), "green has no picture; a class is a folder of .png"),
        (folder / "red", ("--patch", "3"), "the patch must be even, and divide the side"),
        (folder / "red", ("--side", "9"), "--patch 2 and --side 9"),
        (data, ("--side", "8"), "--side is of a folder of pictures, and --data"),
    ):
        assert started(tmp_path / "run", given, *flags) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and words in error, error


def test_rows_that_are_missing_are_noticed(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that was moved away begins anew; one that is cut short is refused."""
    run, flags = tmp_path / "run", ("--steps", "4", "--save-every", "2")
    assert started(run, data, *flags) == 0
    (run / "steps" / "step-00000004").rename(tmp_path / "lost")
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole.splitlines(keepends=True)[0])
    assert started(run, data, *flags, "--resume") == 2
    assert "line 2 is damaged or missing, but step 2 was saved" in capsys.readouterr().err
    (run / "metrics.jsonl").unlink()
    assert started(run, data, *flags, "--resume") == 0
    assert (run / "metrics.jsonl").read_text() == "".join(whole.splitlines(keepends=True)[2:])
