"""Checks of a run on text: UserError for a mesh, settings or a saved run that do not fit the model."""

from pathlib import Path

import params as P
from fnmodels import tree
from fnmodels.errors import UserError
from fnmodels.inputs.load_balance import head_tail_order
from fnmodels.models.common.dropout import check_dropout
from fnmodels.models.common.family import DecoderConfig, field_of, traits_of
from fnmodels.models.common.registry import family_of
from fnmodels.tree import Tree
from train.job.mesh_flags import MeshSetup, check_shards
from train.job.settings import Settings, flag
from train.job.task import Json
from train.parallel.context.api import resolved_order

from . import initial_model


def is_routed(config: DecoderConfig) -> bool:
    return bool(traits_of(family_of(config)).routed)


def check_model_fits(mesh_setup: MeshSetup, settings: Settings, config: DecoderConfig) -> None:
    """UserError where the mesh cannot shard the model or its rows."""
    mesh, strategy = mesh_setup.mesh, mesh_setup.strategy
    length, spec = min(settings.row_length, config.max_position_embeddings), initial_model.run_spec(config, settings)
    if length % mesh.cp:
        raise UserError(f"--mesh {mesh} splits the tokens of a row over {mesh.cp} ranks, and a row has {length}")
    check_shards(mesh_setup, settings, config, initial_model.family_spec(config), spec)
    if mesh.cp > 1 and resolved_order(strategy.order, config) == "head_tail":
        padded = length + -length % (mesh.cp * mesh.tp if strategy.sequence else 1)
        try:
            head_tail_order(padded, mesh.cp)
        except ValueError as error:
            raise UserError(f"--mesh {mesh}: {error}") from error
    heads = [config.num_attention_heads]
    heads.append(getattr(config, "num_key_value_heads", heads[0]))
    if strategy.context == "ulysses" and any(max(1, number // mesh.tp) % mesh.cp for number in heads):
        raise UserError(
            f"--context ulysses distributes heads, and --mesh {mesh} does not divide the model's: take gather or ring"
        )
    if mesh.tp > 1 and isinstance(spec.get("lm_head"), P.lora.Lora):
        raise UserError(
            f"--mesh {mesh}: tp shards the vocabulary, and lm_head then cannot have an adapter: leave it out of the "
            f"targets of --lora {settings.lora}"
        )


def check_agreement(recorded: Json, identity: Json, path: Path) -> None:
    """UserError where text, tokenizer, config or base weights differ from those the run started with."""
    changes = {
        "corpus": "the text has changed since the run started",
        "tokenizer": "tokenizer.json is not the one that the run started with",
        "config": "config.json is not the one that the run started with",
        "weights": "the weights that its adapters belong to have changed",
    }
    for name, change in changes.items():
        if recorded.get(name) != identity[name]:
            raise UserError(f"--run {path}: {change}, so resuming would not give the same result: name another --run")


def check_model_settings(config: DecoderConfig, spec: Tree, settings: Settings) -> None:
    """UserError where settings of dropout and of load balancing do not apply to the model."""
    if settings.dropout == "config":
        if not field_of(config, "dropout").acts:
            raise UserError(
                f"--dropout config is for the rates of a config.json, and {settings.init or 'the new model'} states "
                "none above 0"
            )
        try:
            check_dropout(config)
        except ValueError as error:
            raise UserError(f"--dropout config: {error}") from error
    reason = f"and {settings.init or 'the new model'} has none"
    for name in ("balance_loss", "router_z_loss"):
        if getattr(settings, name) and not is_routed(config):
            raise UserError(f"{flag(name)} {getattr(settings, name)} is for models with experts, {reason}")
    if settings.balance_rate is not None:
        if not any(path.endswith("selection_bias") for path in tree.flatten(spec)):
            raise UserError(f"--balance-rate {settings.balance_rate} moves the selection bias of routers, {reason}")
        if settings.lora:
            raise UserError(
                f"--balance-rate {settings.balance_rate} moves parameters outside of the adapters, and --lora saves "
                "only these: leave one of the two out"
            )
