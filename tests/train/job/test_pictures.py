"""Pictures of runs are drawn in matplotlib's own style, whatever a file of settings in the working folder says."""

import os
from pathlib import Path

import pytest
from matplotlib import rc_context
from matplotlib.figure import Figure

from fnmodels.errors import UserError
from train.job.pictures import RunRows, draw_losses, draw_run

SAVE = Figure.savefig  # before tests of runs leave out its pixels
ROWS = [{"step": step, "loss": 1.0, "heldout_loss": 2.0} for step in (1, 2)]


@pytest.mark.parametrize("kind", ["of one run", "of several"])
def test_a_picture_starts_no_latex_and_reads_no_formulas(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Figure, "savefig", SAVE)
    programs, out = tmp_path / "bin", tmp_path / "it.png"
    programs.mkdir()
    for name in ("latex", "dvipng", "gs"):
        (programs / name).write_text(f"#!/bin/sh\n: > {tmp_path / 'STARTED'}\n")
        (programs / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {row["step"]}, "loss": 1.0}}\n' for row in ROWS))
    with rc_context({"text.usetex": True}):  # as from a matplotlibrc
        if kind == "of several":
            draw_losses(out, {r"$\frac$": tmp_path, "_^%": tmp_path})
        else:
            draw_run(out, RunRows(ROWS, []), bytes_per_token=1.0, zlib_bits=1.0, train=r"$\frac$")
    assert out.read_bytes().startswith(b"\x89PNG") and not (tmp_path / "STARTED").exists()


def test_rewards_are_drawn_apart_from_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Figure, "savefig", SAVE)
    for name, value in {"loss": 1.0, "reward": 0.5}.items():
        (tmp_path / name).mkdir()
        lines = "".join(f'{{"step": {step}, "{name}": {value}, "turns": 2.0}}\n' for step in (1, 2, 3))
        (tmp_path / name / "metrics.jsonl").write_text(lines)
    draw_losses(tmp_path / "it.png", {"rewards": tmp_path / "reward", "others": tmp_path / "reward"})
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="a has rewards and others have losses: draw the two kinds apart"):
        draw_losses(tmp_path / "both.png", {"a": tmp_path / "reward", "b": tmp_path / "loss"})
