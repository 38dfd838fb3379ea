"""From verl's configurations to ours: the mesh, dtypes, LoRA targets, the optimizer and its schedule."""

import dataclasses
from typing import Any

import torch

import params as P
from fnmodels import family_of, tree
from fnmodels.models.common.registry import DecoderConfig
from fnmodels.tree import Tree
from params.lora import is_linear
from train.optim.adamw import adamw
from train.optim.base import Optimizer
from train.optim.wrappers import with_master
from train.parallel.mesh import Mesh, Strategy

DTYPES = {"float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")


def mesh_and_strategy(engine_config: Any, world: int) -> tuple[Mesh, Strategy]:
    """The mesh of a configuration, and a `Strategy` for rows of each rank's own. ValueError for another number."""
    mesh = Mesh.parse(engine_config.mesh) if engine_config.mesh else Mesh(fsdp=world)
    if mesh.world != world:
        raise ValueError(f"engine.mesh is {mesh}, of {mesh.world} processes, but there are {world}.")
    return mesh, Strategy(**{**engine_config.sharing, "rows": "own"})


def dtype_of(engine_config: Any) -> torch.dtype:
    """The dtype of the parameters. ValueError for one other than float32 and bfloat16."""
    if engine_config.dtype not in DTYPES:
        raise ValueError(f"engine.dtype is {engine_config.dtype!r}; train.verl has {', '.join(DTYPES)}.")
    return DTYPES[engine_config.dtype]


def check_supported(model_config: Any) -> None:
    """NotImplementedError for a setting of the model that would change results and is not supported."""
    unsupported = {
        "use_liger": model_config.use_liger,
        "mtp.enable_train": model_config.mtp.enable_train,
        "target_parameters": model_config.target_parameters,
        "exclude_modules": model_config.exclude_modules,
    }
    for name, value in unsupported.items():
        if value:
            raise NotImplementedError(f"model.{name} is {value!r}, which train.verl does not have.")


def with_adapters(config: DecoderConfig, params: Tree, model_config: Any) -> Tree:
    """`params` with the adapters that verl's model configuration asks for, in fp32; `params` itself without any."""
    if model_config.lora_adapter_path is not None:
        adapted = P.lora.load_adapters(model_config.lora_adapter_path, config, params)
    elif model_config.lora_rank > 0:
        sizes = {"rank": model_config.lora_rank, "alpha": model_config.lora_alpha}
        adapted = P.lora.add(config, params, **sizes, targets=_targets(config, model_config.target_modules))
    else:
        return params
    return P.lora.attach(adapted, tree.map(lambda leaf: leaf.float(), P.lora.adapters(adapted)))


def _targets(config: DecoderConfig, modules: Any) -> tuple[str, ...]:
    """The targets of `params.lora.add` for PEFT's "all-linear" (all linear weights but the head) or a list of names."""
    if modules != "all-linear":
        return (modules,) if isinstance(modules, str) else tuple(modules)
    leaves = tree.flatten(family_of(config).spec(config))
    return tuple(path for path, leaf in leaves.items() if path.startswith("layers.") and is_linear(path, leaf))


def is_adapted(model_config: Any) -> bool:
    return model_config.lora_rank > 0 or model_config.lora_adapter_path is not None


def optimizer_of(config: DecoderConfig, params: Tree, settings: Any) -> Optimizer:
    """AdamW as torch's: weight decay applies to every parameter; fp32 copies of parameters in bf16.

    NotImplementedError for another optimizer.
    """
    if (name := getattr(settings, "optimizer", "AdamW")) != "AdamW":
        raise NotImplementedError(f"optim.optimizer is {name!r}; train.verl has AdamW.")
    found = tree.flatten(P.lora.adapters(params))
    spec = P.lora.spec(config, params) if found else family_of(config).spec(config)
    spec = tree.map(lambda leaf: dataclasses.replace(leaf, decay=True), spec)
    return with_master(adamw(settings.lr, betas=tuple(settings.betas), weight_decay=settings.weight_decay, spec=spec))


def hyperparameters(settings: Any) -> torch.optim.Optimizer:
    """An optimizer of torch without parameters to train, whose one group holds the numbers of the next update.

    verl's schedules and its Tinker worker write lr, betas, eps and weight_decay there.
    """
    extra = dict(getattr(settings, "override_optimizer_config", None) or {})
    unknown = sorted(extra.keys() - set(HYPERPARAMETERS))
    if unknown:
        raise NotImplementedError(f"optim.override_optimizer_config has {unknown[0]}, which train.verl does not have.")
    values = {"lr": settings.lr, "betas": tuple(settings.betas), "weight_decay": settings.weight_decay} | extra
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(()))], **values)


def schedule_of(settings: Any, optimizer: torch.optim.Optimizer) -> Any:
    """verl's schedule of the rate of `optimizer`, constant or cosine, with warmup."""
    from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

    warmup = settings.lr_warmup_steps
    if warmup is None or warmup <= 0:
        warmup = int(settings.lr_warmup_steps_ratio * settings.total_training_steps)
    kind = getattr(settings, "lr_scheduler_type", "constant")
    if kind == "constant":
        return get_constant_schedule_with_warmup(optimizer=optimizer, num_warmup_steps=warmup)
    if kind != "cosine":
        raise NotImplementedError(f"optim.lr_scheduler_type is {kind!r}; train.verl has constant and cosine.")
    return get_cosine_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=warmup,
        num_training_steps=settings.total_training_steps,
        min_lr_ratio=getattr(settings, "min_lr_ratio", None),
        num_cycles=getattr(settings, "num_cycles", 0.5),
        zero_indexed_step=getattr(settings, "zero_indexed_step", True),
    )
