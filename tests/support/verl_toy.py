"""A task for `python -m verl.trainer.main_ppo`: a model with 96 words, prompts, and a reward for digits.

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
    """A tokenizer in the model's folder; train.parquet, test.parquet and reward.py in `folder`."""
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


def command(folder: Path, model: Path, *, steps: int, processes: int = 1) -> list[str]:
    """GRPO, 16 prompts x 4 answers a step, everything in fp32."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    settings = {
        "hydra.searchpath": "[pkg://train.verl.config]",
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


if __name__ == "__main__":
    write_task(Path(sys.argv[1]), Path(sys.argv[2]))
    print(" ".join(command(Path(sys.argv[1]), Path(sys.argv[2]), steps=25)[1:]))
