"""Pictures of strangers: four formats by content, bounded pixels and memory, a sentence for whatever is wrong."""

import json
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import train.data.pictures as pictures
from fnmodels.errors import CheckpointError, UserError
from fnmodels.inputs.images import center_crop, normalized, resize, shortest_edge
from train.data.pictures import LONGEST, PIXELS, PIXELS_LIMIT, Pixels, read_picture, whole_picture


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, rows: bytes = b"\0") -> bytes:
    """A PNG of 8 bits per channel whose header says this size, whatever the rows are."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
BMP = b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 60000, 60000, 1, 24, 0, 0, 0, 0, 0, 0)
PPM = b"P6 1 1 255\n\0\0\0"  # a format that Pillow reads, and that is none of the four
STRANGE = {
    "postscript": (EPS, "is no picture that can be read; one is PNG, JPEG, WEBP, BMP"),
    "another format": (PPM, "is no picture that can be read; one is"),
    "nothing": (b"", "is no picture that can be read; one is"),
    "no pixels": (png(0, 5), "is no picture that can be read"),
    "more pixels than the limit": (
        png(8000, 8000) + bytes(34_000),
        "has 8,000 x 8,000 pixels; a picture has at most 50",
    ),
    "pixels out of proportion": (png(7000, 7000, bytes(900 * 7000)), "has 7,000 x 7,000 pixels; one of 6,"),
    "more than Pillow's warning": (png(12000, 12000), "has 12,000 x 12,000 pixels"),
    "more than Pillow's error": (png(30000, 30000), "is no picture that can be read (Image size"),
    "pixels beyond any memory": (png(2**31 - 1, 2**31 - 1), "is no picture that can be read (Image size"),
    "a bitmap of as many": (BMP, "is no picture that can be read (Image size"),
    "no data": (png(4000, 4000), "is no picture that can be read (image file is truncated"),
    "cut short": (png(100, 100, bytes(30100))[:60], "is no picture that can be read (image file is truncated"),
    "a damaged chunk": (png(2, 2, bytes(14)).replace(b"IDAT", b"ID\0T"), "is no picture that can be read"),
}


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.filterwarnings("error")
def test_read_picture_of_a_strange_file_is_a_sentence_and_starts_no_program(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "gs"  # Ghostscript, which Pillow calls for PostScript
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {tmp_path / 'started'}\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    content, words = STRANGE[name]
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(UserError) as error:
        read_picture(tmp_path / "a.png", Pixels(8))
    assert str(error.value).startswith(f"{tmp_path / 'a.png'} {words}")
    assert not (tmp_path / "started").exists()


def test_read_picture_of_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    for file, words in (
        (tmp_path / "pipe.png", "is not a regular file"),
        (tmp_path, "A folder stands where a file belongs"),
        (tmp_path / "gone.png", "there is no such picture"),
    ):
        with pytest.raises((UserError, CheckpointError), match=words):
            read_picture(file, Pixels(8))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP"])
def test_read_picture_of_each_format_whatever_its_name_gives_its_pixels(kind: str, tmp_path: Path) -> None:
    Image.new("RGB", (24, 16), (40, 215, 90)).save(tmp_path / "a.png", format=kind)
    found = read_picture(tmp_path / "a.png", Pixels(8))
    expected = torch.tensor([40, 215, 90]).div(127.5).sub(1)[:, None, None].expand(3, 8, 8)
    torch.testing.assert_close(found, expected, atol=0.06, rtol=0)


@pytest.mark.parametrize("size", [(1, 20000), (20000, 1), (3, 9001), (25, 10), (10, 40)])
def test_read_picture_of_a_long_picture_is_its_middle_in_bounded_memory(
    size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def watched(image: Tensor, to: tuple[int, int]) -> Tensor:
        sizes.append(to)
        return resize(image, to)

    monkeypatch.setattr(pictures, "resize", watched)
    width, height = size
    ramp = np.linspace(0, 255, width)[None, :] + np.linspace(0, 255, height)[:, None]
    values = np.repeat((ramp / 2).astype(np.uint8)[:, :, None], 3, 2)
    Image.fromarray(values).save(tmp_path / "a.png")
    found = read_picture(tmp_path / "a.png", Pixels(16))
    ((rows, columns),) = sizes
    assert rows * columns <= LONGEST * 16 * 16
    # the definition: all of it is resized, then cropped
    whole = torch.from_numpy(values).permute(2, 0, 1)
    expected = center_crop(resize(whole, shortest_edge(whole, 16)), (16, 16))
    near = normalized(expected, (0.5,) * 3, (0.5,) * 3)
    exact = max(size) <= LONGEST * min(size)
    torch.testing.assert_close(found, near, atol=0 if exact else 0.05, rtol=0)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "CMYK", "I;16"])
@pytest.mark.parametrize("size", [(40, 30), (3, 50), (90, 2)])
def test_read_picture_converts_strips_as_the_whole(
    mode: str, size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 4), np.uint8)
    made = Image.frombuffer("I;16", size, values[..., :2].tobytes(), "raw", "I;16", 0, 1)
    made = made if mode == "I;16" else Image.fromarray(values).convert(mode)
    made.save(tmp_path / "a", "JPEG" if mode == "CMYK" else "PNG", **({"transparency": 3} if mode == "P" else {}))
    strips, convert = [], Image.Image.convert

    def watched(image: Image.Image, to: str) -> Image.Image:
        strips.append(image.size)
        return convert(image, to)

    with Image.open(tmp_path / "a") as opened:
        expected = torch.from_numpy(np.array(opened.convert("RGB"))).permute(2, 0, 1)
    monkeypatch.setattr(pictures, "_STRIP", 100)
    monkeypatch.setattr(Image.Image, "convert", watched)
    assert torch.equal(whole_picture(tmp_path / "a"), expected)
    assert len(strips) > 1 and all(width * height <= max(100, width) for width, height in strips)


def test_pixels_limits_are_those_of_a_large_camera_and_of_an_empty_scan_of_a_page() -> None:
    assert 48_000_000 < PIXELS_LIMIT <= 100_000_000 and PIXELS >= 3300 * 2550


@pytest.mark.parametrize(
    "values",
    [
        '{"image_mean": [1, 2]}',
        '{"image_std": [1, 0, 1]}',
        '{"image_std": [1, 1, "x"]}',
        '{"image_mean": [1e400, 0, 0]}',
    ]
    + [json.dumps({"image_mean": [10**400, 0, 0]}), '{"image_mean": {"a": 1}}', "[]", "[" * 5000, "{" * 5000, "nul"],
)
def test_pixels_of_a_strange_preprocessor_config_is_a_sentence(values: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(values)
    with pytest.raises((UserError, CheckpointError)) as error:
        Pixels.of(tmp_path, 8)
    assert str(tmp_path / "preprocessor_config.json") in str(error.value) and len(str(error.value)) < 500
