"""What is wrong with a run that can be said at once, before text and weights are read, which may take minutes."""

from pathlib import Path

import params as P
from fnmodels import llama
from train import pretrained, sources
from train.errors import UserError
from train.model import hf_config
from train.settings import Settings
from train.sharing import Sharing, check_fit


def check(settings: Settings, sharing: Sharing) -> None:
    """UserError, or a CheckpointError, where a run that begins so cannot be. What it passes may still not do."""
    check_text(settings.data)
    if settings.init is not None:
        source = Path(settings.init)
        pretrained.load_tokenizer(source)
        P.load_config(pretrained.weights_folder(source))
        return
    # How large the vocabulary will be, the text decides: this one divides by whatever mesh there is.
    config = llama.Config.from_hf(hf_config(settings, sharing.mesh.world * 64, {}))
    check_fit(sharing, settings, config)


def check_text(data: str | None) -> None:
    """UserError where a path of --data is not there."""
    for path, _ in [] if data is None else sources.parse(data):
        if path is not None and not path.exists():
            raise UserError(f"--data {path}: there is no such file or folder")
