"""What is wrong with a run that can be said at once, before text and weights are read, which may take minutes."""

from pathlib import Path

from fnmodels.errors import UserError
from fnmodels.models import llama
from train.data import sources

from . import initial_model
from .mesh_flags import Sharing, check_fit
from .settings import Settings
from .setup import check_experts


def check(settings: Settings, sharing: Sharing) -> None:
    """UserError, or a CheckpointError, where a run that begins so cannot be. What it passes may still not do."""
    check_text(settings.data)
    if settings.init is None:
        config = new_config(settings, sharing)
    else:
        config = initial_model.promised(Path(settings.init), settings)
    check_experts(config, initial_model.spec_for(config, settings), settings)
    check_fit(sharing, settings, config)


def new_config(settings: Settings, sharing: Sharing) -> llama.Config:
    """How large the vocabulary will be, the text decides: this one divides by whatever mesh there is."""
    width, heads = settings.hidden_size, settings.num_attention_heads
    if width % heads:
        raise UserError(f"--hidden-size {width} is not a multiple of --num-attention-heads {heads}")
    return llama.Config.from_hf(initial_model.hf_config(settings, sharing.mesh.world * 64, {}))


def check_text(data: str | None) -> None:
    """UserError where a path of --data is not there."""
    for path, _ in [] if data is None else sources.parse_sources(data):
        if path is not None and not path.exists():
            raise UserError(f"--data {path}: there is no such file or folder")
