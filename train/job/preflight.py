"""Early checks of a new run, made before text and weights are read, which may take minutes."""

from pathlib import Path

from fnmodels.errors import UserError
from fnmodels.models.common.family import DecoderConfig
from train.data import sources

from . import initial_model
from .mesh_flags import MeshSetup, check_model_fits
from .settings import Settings
from .setup import check_expert_settings


def check(settings: Settings, mesh_setup: MeshSetup) -> None:
    """UserError or CheckpointError for settings that cannot work. Later checks, which need the text, may still fail."""
    check_data_paths(settings.data)
    if settings.init is None:
        config = provisional_config(settings, mesh_setup)
    else:
        config = initial_model.config_of_checkpoint(Path(settings.init), settings)
    check_expert_settings(config, initial_model.run_spec(config, settings), settings)
    check_model_fits(mesh_setup, settings, config)


def provisional_config(settings: Settings, mesh_setup: MeshSetup) -> DecoderConfig:
    """The new model's config with a placeholder vocabulary, divisible by the mesh: its size depends on the text."""
    hidden_size, heads = settings.hidden_size, settings.num_attention_heads
    if hidden_size % heads:
        raise UserError(f"--hidden-size {hidden_size} is not a multiple of --num-attention-heads {heads}")
    return initial_model.new_config(settings, mesh_setup.mesh.world * 64, {})


def check_data_paths(data: str | None) -> None:
    """UserError where a path of --data does not exist."""
    for path, _ in [] if data is None else sources.parse_sources(data):
        if path is not None and not path.exists():
            raise UserError(f"--data {path}: there is no such file or folder")
