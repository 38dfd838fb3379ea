"""From verl's configurations to ours: the mesh, dtypes, LoRA targets, the optimizer and its schedule."""

import dataclasses
from typing import Any

import torch

import params as P
from fnmodels import family_of, tree
from fnmodels.models.common.family import DecoderConfig
from fnmodels.tree import Tree
from params.lora import is_linear
from train.optim.adamw import adamw
from train.optim.base import Optimizer
from train.optim.wrappers import with_master
from train.parallel.mesh import Mesh, Strategy

DTYPES = {"float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay")

# Fields of verl's configurations that are read here or by verl's workers, or that have no meaning here: rows are always
# packed, the head is always computed in chunks, `model.lora` is Megatron's. All others must have their defaults.
HONOURED: dict[str, set[str]] = {
    "model": {
        *("path", "local_path", "hf_config_path", "local_hf_config_path", "tokenizer_path", "local_tokenizer_path"),
        *("model_type", "load_tokenizer", "hf_config", "generation_config", "tokenizer", "processor", "architectures"),
        *("use_shm", "trust_remote_code", "custom_chat_template", "external_lib", "enable_gradient_checkpointing"),
        *("lora_rank", "lora_alpha", "target_modules", "lora_adapter_path", "lora", "use_remove_padding"),
        *("use_fused_kernels", "fused_kernel_options", "override_config", "tiled_mlp", "mtp"),
    },
    "engine": {
        *("strategy", "mesh", "sharing", "kernel", "dtype", "param_offload", "optimizer_offload", "forward_only"),
        *("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu", "infer_max_token_len_per_gpu"),
        *("infer_micro_batch_size_per_gpu", "use_fused_kernels", "use_remove_padding", "seed", "full_determinism"),
        *("router_replay", "images"),
    },
    "optim": {
        *("lr", "lr_warmup_steps", "lr_warmup_steps_ratio", "total_training_steps", "betas", "weight_decay"),
        *("clip_grad", "grad_clip", "optimizer", "lr_scheduler_type", "warmup_style", "min_lr_ratio", "num_cycles"),
        *("zero_indexed_step", "override_optimizer_config"),
    },
    "checkpoint": {"save_contents", "load_contents"},
    "rollout": {
        # read here, or by verl's trainer and agent loop
        *("name", "mode", "nnodes", "n_gpus_per_node", "temperature", "top_k", "top_p", "do_sample", "n", "seed"),
        *("repetition_penalty", "full_determinism", "over_sample_rate", "prompt_length", "response_length", "dtype"),
        *("ignore_eos", "free_cache_engine", "val_kwargs", "max_model_len", "max_num_seqs", "calculate_log_probs"),
        *("log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz"),
        *("log_prob_max_token_len_per_gpu", "agent", "trace", "multi_turn", "custom", "checkpoint_manager_class"),
        *("checkpoint_engine", "profiler", "router_config_path", "enable_rollout_routing_replay", "server"),
        # a replica of several processes is refused by their number
        *("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"),
        # memory, speed and logs of other engines, which change no answer
        *("gpu_memory_utilization", "standalone_gpu_memory_utilization", "enforce_eager", "cudagraph_capture_sizes"),
        *("max_num_batched_tokens", "scheduling_policy", "disable_log_stats", "multi_stage_wake_up", "prometheus"),
        *("enable_chunked_prefill", "enable_prefix_caching", "load_format", "layered_summon", "layer_name_map"),
        *("sglang_engine_mode", "skip_tokenizer_init", "enable_sleep_mode", "moe_load_balance_metrics_interval"),
        # checked apart, the last one by verl
        *("engine_kwargs", "mtp", "disaggregation"),
    },
}
# of model.override_config: transformers' attention (here `engine.kernel`), and ids that verl reads
WITHOUT_MEANING = {"attn_implementation", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"}


def mesh_and_strategy(engine_config: Any, world: int) -> tuple[Mesh, Strategy]:
    """The mesh of a configuration, and a `Strategy` for rows of each rank's own.

    ValueError for another number of processes, and for a name in `sharing` that is no field to be set.
    """
    mesh = Mesh.parse(engine_config.mesh) if engine_config.mesh else Mesh(fsdp=world)
    if mesh.world != world:
        raise ValueError(f"engine.mesh is {mesh}, of {mesh.world} processes, but there are {world}.")
    fields = [field.name for field in dataclasses.fields(Strategy) if field.name != "rows"]
    if unknown := sorted(engine_config.sharing.keys() - set(fields)):
        raise ValueError(f"engine.sharing has {unknown[0]}, which fnmodels does not set; it has {', '.join(fields)}.")
    return mesh, Strategy(**engine_config.sharing, rows="own")


def determinism(seed: int) -> None:
    """verl's own settings for repeatable bits: torch's deterministic algorithms, seeds, CUDA libraries' variables."""
    from verl.workers.engine.utils import enable_full_determinism

    enable_full_determinism(seed)


def dtype_of(engine_config: Any) -> torch.dtype:
    """The dtype of the parameters. ValueError for one other than float32 and bfloat16."""
    if engine_config.dtype not in DTYPES:
        raise ValueError(f"engine.dtype is {engine_config.dtype!r}; fnmodels has {', '.join(DTYPES)}.")
    return DTYPES[engine_config.dtype]


def check_supported(model: Any, engine: Any, optimizer: Any, checkpoint: Any) -> None:
    """NotImplementedError for a setting that is not honoured and differs from verl's default.

    So are fields that a later release of verl adds.
    """
    sections = {"model": model, "engine": engine, "optim": optimizer, "checkpoint": checkpoint}
    for section, given in sections.items():
        if given is not None:  # a forward-only engine may have no optimizer
            _check_defaults(section, given)
    _check_empty(_nested(model, engine))
    if model.hf_config_path != model.path:
        raise NotImplementedError(f"model.hf_config_path is {model.hf_config_path!r}, and fnmodels reads model.path.")
    if missing := {"model", "optimizer", "extra"} - set(checkpoint.load_contents):
        raise NotImplementedError(f"checkpoint.load_contents lacks {min(missing)!r}; fnmodels loads whole steps.")


def check_rollout(config: Any) -> None:
    """NotImplementedError for a setting of the rollout that would change its answers and is not honoured."""
    _check_defaults("rollout", config)
    own = (config.engine_kwargs or {}).get("fnmodels") or {}
    nested = {f"rollout.engine_kwargs.fnmodels.{name}": value for name, value in own.items()}
    nested["rollout.mtp.enable_rollout"] = getattr(config.mtp, "enable_rollout", False)
    _check_empty(nested)


def _check_defaults(section: str, given: Any) -> None:
    for field in dataclasses.fields(given):
        value, default = getattr(given, field.name), _default(field)
        if field.name not in HONOURED[section] and (value or default) and value != default:
            raise NotImplementedError(f"{section}.{field.name} is {value!r}, which fnmodels does not have.")


def _check_empty(nested: dict[str, Any]) -> None:
    for name, value in nested.items():
        if value:
            raise NotImplementedError(f"{name} is {value!r}, which fnmodels does not have.")


def _default(field: Any) -> Any:
    """verl's default of a field; None for one that must be given."""
    made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return None if made is dataclasses.MISSING else made


def _nested(model: Any, engine: Any) -> dict[str, Any]:
    """{name: what is refused unless it is empty} within settings that are mappings or configurations."""
    override = model.override_config or {}
    override = override.get("model_config", override)
    changes = {name: value for name, value in override.items() if name not in WITHOUT_MEANING}
    mtp = {name for name in ("enable", "enable_train", "enable_rollout") if getattr(model.mtp, name, False)}
    replay = _replay_mode(engine)
    return {
        "model.override_config": changes,
        "model.tiled_mlp.enabled": (model.tiled_mlp or {}).get("enabled", False),
        "engine.router_replay.mode": "" if replay in ("disabled", "R3") else replay,
    } | {f"model.mtp.{name}": True for name in sorted(mtp)}


def _replay_mode(engine: Any) -> str:
    return str(getattr(getattr(engine, "router_replay", None), "mode", "disabled"))


def replays_routing(engine_config: Any) -> bool:
    """Whether passes take the experts of each token from the rollout (router_replay.mode=R3)."""
    return _replay_mode(engine_config) == "R3"


def with_adapters(config: DecoderConfig, params: Tree, model_config: Any, seed: int) -> Tree:
    """`params` with the adapters that verl's model configuration asks for, in fp32; `params` itself without any."""
    if model_config.lora_adapter_path is not None:
        adapted = P.lora.load_adapters(model_config.lora_adapter_path, config, params)
    elif model_config.lora_rank > 0:
        sizes = {"rank": model_config.lora_rank, "alpha": model_config.lora_alpha}
        targets = _targets(config, model_config.target_modules)
        adapted = P.lora.add(config, params, **sizes, targets=targets, seed=seed)
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
        raise NotImplementedError(f"optim.optimizer is {name!r}; fnmodels has AdamW.")
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
        raise NotImplementedError(f"optim.override_optimizer_config has {unknown[0]}, which fnmodels does not have.")
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
        raise NotImplementedError(f"optim.lr_scheduler_type is {kind!r}; fnmodels has constant and cosine.")
    return get_cosine_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=warmup,
        num_training_steps=settings.total_training_steps,
        min_lr_ratio=getattr(settings, "min_lr_ratio", None),
        num_cycles=getattr(settings, "num_cycles", 0.5),
        zero_indexed_step=getattr(settings, "zero_indexed_step", True),
    )
