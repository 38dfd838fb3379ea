"""A task for verl's trainers `main_ppo` and `sft_trainer`: a model with 96 words, prompts, a reward for digits, chats.

    python tests/support/verl_toy.py FOLDER MODEL      MODEL: a folder that tests/support/verl_flow.py wrote

`command` is the command line; its environment is that of docs/verl.md, "Without an accelerator".
"""

import json
import random
import sys
from pathlib import Path

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "user", "assistant", "system", ":", *map(str, range(10))]
WORDS += [chr(ord("a") + i) for i in range(26)]
WORDS += [f"w{i}" for i in range(96 - len(WORDS))]
TEMPLATE = (
    "{% for m in messages %}<s> {{ m['role'] }} : {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<s> assistant : {% endif %}"
)
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """The share of digits among the words of an answer."""
    words = solution_str.split()
    return sum(word.isdigit() for word in words) / max(len(words), 1)
'''


def write_task(folder: Path, model: Path) -> None:
    """A tokenizer in the model's folder; train.parquet, test.parquet, chats.parquet and reward.py in `folder`."""
    import pandas
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, chat_template=TEMPLATE, **special)
    tokenizer.save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1}))
    draw = random.Random(0)
    rows = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": " ".join(draw.choices("abcdefgh", k=draw.randint(1, 4)))}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index in range(64)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    pandas.DataFrame(rows[:8]).to_parquet(folder / "test.parquet")
    (folder / "reward.py").write_text(REWARD)
    asked = [" ".join(draw.choices("abcdefgh", k=draw.randint(1, 4))) for _ in range(256)]
    answers = [" ".join(str(ord(letter) % 10) for letter in words.split()) for words in asked]
    turns = zip(asked, answers, strict=True)
    chats = [[{"role": "user", "content": one}, {"role": "assistant", "content": other}] for one, other in turns]
    pandas.DataFrame({"messages": chats}).to_parquet(folder / "chats.parquet")


def command(folder: Path, model: Path, *, steps: int, processes: int = 1) -> list[str]:
    """GRPO, 16 prompts x 4 answers a step, everything in fp32."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    settings = {
        "hydra.searchpath": "[pkg://train.integrations.verl.config]",
        "model_engine": "fnmodels",
        "hydra.run.dir": folder / "hydra",
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "train.parquet",
        "data.val_files": folder / "test.parquet",
        "data.train_batch_size": 16,
        "data.max_prompt_length": 16,
        "data.max_response_length": 12,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        f"{actor}.fnmodels.dtype": "float32",
        f"{actor}.ppo_mini_batch_size": 16,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": 2048,
        f"{actor}.optim.lr": 1e-2,
        f"{rollout}.name": "fnmodels",
        f"{rollout}.dtype": "float32",
        f"{rollout}.n": 4,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.agent.num_workers": 1,
        f"{rollout}.calculate_log_probs": True,
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": folder / "reward.py",
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": processes,
        "trainer.logger": "[console]",
        "trainer.val_before_train": False,
        "trainer.total_training_steps": steps,
        "trainer.resume_mode": "disable",
        # Ray's logical resources: verl counts GPUs before it starts workers, which ask for CPUs on this platform.
        "ray_kwargs.ray_init.num_cpus": 20,
        "+ray_kwargs.ray_init.num_gpus": processes,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }
    return [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{name}={value}" for name, value in settings.items())]


def sft(folder: Path, model: Path, name: str, *, steps: int, mesh: str = "", resume: Path | None = None) -> list[str]:
    """The arguments of python for SFT on the chats. name: of the run, "fsdp..." for verl's own engine."""
    settings = {
        "hydra.searchpath": "[pkg://train.integrations.verl.config]",
        "hydra.run.dir": folder / name / "hydra",
        "model.path": model,
        "model.enable_gradient_checkpointing": False,
        "+model.override_config.attn_implementation": "eager",
        "data.train_files": folder / "chats.parquet",
        "data.val_files": folder / "chats.parquet",
        "data.val_max_samples": 32,
        "data.train_batch_size": 16,
        "data.max_token_len_per_gpu": 256,
        "data.num_workers": 0,
        "optim.lr": 1e-2,
        "optim.lr_warmup_steps": 4,
        "optim.lr_scheduler_type": "cosine",
        "optim.override_optimizer_config": "{eps: 1e-4}",
        "trainer.device": "cpu",
        "trainer.logger": "[console]",
        "trainer.total_training_steps": steps,
        "trainer.save_freq": steps // 2,
        "trainer.test_freq": steps // 2,
        "trainer.default_local_dir": folder / name,
        "trainer.resume_mode": "disable" if resume is None else "resume_path",
        "trainer.resume_from_path": "null" if resume is None else resume,
    }
    if name.startswith("fsdp"):
        settings |= {"engine": "fsdp", "engine.strategy": "fsdp2", "engine.model_dtype": "fp32"}
        settings |= {"engine.use_torch_compile": False, "+engine.mixed_precision.param_dtype": "fp32"}
        settings |= {f"+engine.mixed_precision.{part}_dtype": "fp32" for part in ("reduce", "buffer")}
    else:
        settings |= {"engine": "fnmodels", "engine.dtype": "float32", "engine.mesh": f"'{mesh}'"}
    return ["-m", "verl.trainer.sft_trainer", *(f"{option}={value}" for option, value in settings.items())]


if __name__ == "__main__":
    write_task(Path(sys.argv[1]), Path(sys.argv[2]))
    print(" ".join(command(Path(sys.argv[1]), Path(sys.argv[2]), steps=25)[1:]))
