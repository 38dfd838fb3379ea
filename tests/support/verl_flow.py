"""One role's life in verl, started by torchrun in verl's own virtual environment: results go to a file.

    torchrun --nproc-per-node 2 tests/support/verl_flow.py MODEL OUT '{"strategy": "fnmodels", "mesh": "tp=2"}'

The calls are those of verl's trainers to a TrainingWorker: log-probabilities, SFT validation and steps, PPO steps with
KL and entropy in every aggregation mode, mini-batches, a saved step. MODEL is a folder that `write_model` made.
"""

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True, "head_dim": 8},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "tie_word_embeddings": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "head_dim": 8,
        "decoder_sparse_step": 1,
        "output_router_logits": False,
    },
    "mixtral": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "tie_word_embeddings": False,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "critic": {
        "model_type": "llama",
        "architectures": ["LlamaForTokenClassification"],
        "tie_word_embeddings": False,
        "id2label": {"0": "value"},
    },
    "lfm2": {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
}
LENGTHS = ((5, 7), (3, 9), (8, 4), (2, 11), (6, 6), (4, 3), (7, 10), (5, 5))  # (prompt, response) of the 8 sequences
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def write_model(name: str, folder: Path) -> None:
    """A checkpoint with random weights, in this package's format."""
    import fnmodels
    import params as P

    values = SIZES | MODELS[name]
    config = fnmodels.family_for(values["model_type"]).Config.from_hf(values)
    P.save_pretrained(folder, config, P.init(config, 0))


def batch(rank: int, size: int, *, sft: bool, **extra: Any) -> Any:
    """This rank's share of the 8 sequences, as verl's trainers make batches."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    prompt, answer = max(p for p, _ in LENGTHS), max(r for _, r in LENGTHS)
    draw = torch.Generator().manual_seed(7)
    rows, mask = torch.zeros(8, prompt + answer, dtype=torch.long), torch.zeros(8, prompt + answer, dtype=torch.long)
    for row, (p, r) in enumerate(LENGTHS):
        mask[row, prompt - p : prompt + r] = 1
        rows[row, prompt - p : prompt + r] = torch.randint(1, SIZES["vocab_size"], (p + r,), generator=draw)
    scores = {name: torch.randn(8, answer, generator=draw) for name in ("advantages", "noise", "reference", "returns")}
    response = mask[:, prompt:]
    entries = {
        "input_ids": rows,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "prompts": rows[:, :prompt],
        "responses": rows[:, prompt:],
        "response_mask": response,
        "old_log_probs": (-4.5 + 0.2 * scores["noise"]) * response,
        "ref_log_prob": (-4.5 + 0.3 * scores["reference"]) * response,
        "advantages": scores["advantages"] * response,
        "values": 0.3 * scores["noise"] * response,
        "returns": scores["returns"] * response,
    }
    share = slice(rank * 8 // size, (rank + 1) * 8 // size)
    plain = {"temperature": 1.0, "global_batch_size": 8, "use_dynamic_bsz": True, "max_token_len_per_gpu": 40}
    data = tu.get_tensordict({name: value[share] for name, value in entries.items()}, plain | extra)
    data = left_right_2_no_padding(data)
    if sft:
        lengths = LENGTHS[share]
        masks = [torch.tensor([0] * p + [1] * r) for p, r in lengths]
        data["loss_mask"] = torch.nested.as_nested_tensor(masks, layout=torch.jagged)
        data = data.select("input_ids", "position_ids", "loss_mask", *(plain | extra))
    return data


def worker_config(model: Path, settings: dict[str, Any], kind: str) -> Any:
    """The configuration of a TrainingWorker with the engine that the settings name."""
    from transformers import AutoModelForTokenClassification
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig

    settings = dict(settings)
    changes: dict[str, Any] = {"load_tokenizer": False, "enable_gradient_checkpointing": False}
    changes |= {"override_config": {"attn_implementation": "eager"}, **settings.pop("model", {})}
    optimizer: dict[str, Any] = {"lr": 1e-3, "lr_warmup_steps": 3, "total_training_steps": 40, "weight_decay": 0.1}
    # Adam divides by |gradient| + eps: with 1e-8 a gradient that is nearly 0 moves its weight by a rounding's sign.
    optimizer |= {"clip_grad": 1.0, "override_optimizer_config": {"eps": settings.pop("eps", 1e-4)}}
    if settings["strategy"] == "fnmodels":
        from train.integrations.verl import EngineConfig

        engine: Any = EngineConfig(**{"dtype": "float32", **settings})
    else:
        classes = AutoModelForTokenClassification  # verl names flash attention, which has no CPU version
        classes.from_pretrained = functools.partial(_eager, classes.from_pretrained)  # type: ignore[method-assign]
        precision = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
        engine = FSDPEngineConfig(mixed_precision=precision, use_torch_compile=False, model_dtype="fp32", **settings)
    return TrainingWorkerConfig(
        model_type=kind,
        model_config=HFModelConfig(path=str(model), **changes),
        engine_config=engine,
        optimizer_config=FSDPOptimizerConfig(**optimizer),
        checkpoint_config=CheckpointConfig(save_contents=["model", "optimizer", "extra", "hf_model"]),
    )


def worker(model: Path, settings: dict[str, Any], kind: str) -> Any:
    """A TrainingWorker in this process."""
    from verl.workers.engine_workers import TrainingWorker

    made = TrainingWorker(worker_config(model, settings, kind))
    made.reset()
    return made


def _eager(load: Any, **options: Any) -> Any:
    return load(**options | {"attn_implementation": "eager"})


def jagged(output: Any, name: str) -> list[torch.Tensor]:
    return [one.clone() for one in output[name].unbind()]


def numbers(output: Any) -> dict[str, Any]:
    """The loss and the norm of an update, and the other metrics that are no clock or memory."""
    from verl.utils import tensordict_utils as tu

    return {n: v for n, v in tu.get(output, "metrics").items() if not n.startswith("perf/") and n != "mfu"}


def exported(made: Any) -> dict[str, torch.Tensor]:
    tensors, _ = made.engine.get_per_tensor_param()
    return {name: tensor.detach().float().cpu().clone() for name, tensor in tensors}


def language_model(made: Any, folder: Path, resume: str | None = None, entropy: float = 0.01) -> dict[str, Any]:
    """infer, validation, 4 SFT steps, a saved step, 4 PPO steps, 2 mini-batches of 2 epochs.

    resume: a saved step, from which the second half begins. entropy: its coefficient in PPO.
    """
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss, sft_loss

    rank, size = made.engine.get_data_parallel_rank(), made.engine.get_data_parallel_size()
    own = functools.partial(batch, rank, size)
    found: dict[str, Any] = {"before": exported(made)}
    made.set_loss_fn(functools.partial(sft_loss, config=None))
    scored = made.infer_batch(own(sft=False, temperature=0.7, calculate_entropy=True, compute_loss=False))
    if scored is not None:
        found["log_probs"], found["entropy"] = jagged(scored, "log_probs"), jagged(scored, "entropy")
    steps = []
    if resume is None:
        steps = [made.infer_batch(own(sft=True))]
        steps += [made.train_batch(own(sft=True, update_lr_scheduler=True)) for _ in range(4)]
        found["saved"] = str(folder / "global_step_4")
        made.save_checkpoint(found["saved"], global_step=4)
        adapted = made.model_config.lora_rank > 0  # verl's engine has the context only then
        plain = made.infer_batch(own(sft=False, temperature=0.7, compute_loss=False, no_lora_adapter=adapted))
        if plain is not None:
            found["reference"] = jagged(plain, "log_probs")
    else:
        made.load_checkpoint(resume)
    for mode in MODES:
        actor = FSDPActorConfig(
            strategy="fsdp2",
            rollout_n=1,
            use_dynamic_bsz=True,
            ppo_mini_batch_size=8,
            loss_agg_mode=mode,
            loss_scale_factor=12,
            entropy_coeff=entropy,
            use_kl_loss=True,
            kl_loss_coef=0.05,
        )
        made.set_loss_fn(functools.partial(ppo_loss, actor))
        steps.append(made.train_batch(own(sft=False, calculate_entropy=True, update_lr_scheduler=True)))
    data = own(sft=False, calculate_entropy=False)
    tu.assign_non_tensor(data, mini_batch_size=4, epochs=2, seed=3, dataloader_kwargs={"shuffle": False})
    data["old_log_probs"] = data["old_log_probs"].clone()
    steps.append(made.train_mini_batch(data))
    found["steps"] = [numbers(step) for step in steps if step is not None]
    found["after"] = exported(made)
    return found


def value_model(made: Any, folder: Path) -> dict[str, Any]:
    """Values, and 4 steps of the clipped value loss."""
    from verl.workers.config import FSDPCriticConfig
    from verl.workers.utils.losses import value_loss

    rank, size = made.engine.get_data_parallel_rank(), made.engine.get_data_parallel_size()
    own = functools.partial(batch, rank, size, sft=False)
    found: dict[str, Any] = {"before": exported(made)}
    made.set_loss_fn(functools.partial(value_loss, FSDPCriticConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=4)))
    scored = made.infer_batch(own(compute_loss=False))
    if scored is not None:
        found["values"] = jagged(scored, "values")
    steps = [made.train_batch(own(update_lr_scheduler=True)) for _ in range(4)]
    made.save_checkpoint(str(folder / "global_step_4"), global_step=4)
    found["steps"] = [numbers(step) for step in steps if step is not None]
    found["after"] = exported(made)
    return found


def main() -> None:
    model, out, settings = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    import verl  # noqa: F401 - registers the platform

    torch.set_num_threads(1)
    kind = settings.pop("kind", "language_model")
    more = {name: settings.pop(name) for name in ("resume", "entropy") if name in settings}
    made = worker(model, settings, kind)
    flow: Any = language_model if kind == "language_model" else value_model
    found = flow(made, out.parent / f"{out.stem}_steps", **more)
    if made.engine.is_mp_src_rank_with_outputs():
        torch.save(found, f"{out}.{made.engine.get_data_parallel_rank()}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("VERL_PLATFORM", "cpu")
    main()
