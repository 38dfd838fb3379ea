"""A task for verl's trainers `main_ppo` and `sft_trainer`: a model with 96 words, prompts, a reward for digits, chats.

    python tests/support/verl_toy.py FOLDER MODEL      MODEL: a folder that tests/support/verl_flow.py wrote

`command` is the command line; its environment is that of docs/verl.md, "Without an accelerator".
"""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / ".venv-verl/pictures"  # what reads pictures, where `make verl` could install it
WORDS = ["<pad>", "<s>", "</s>", "<unk>", "user", "assistant", "system", ":", *map(str, range(10))]
WORDS += [chr(ord("a") + i) for i in range(26)]
# a call of a tool, as Hermes' models write it, is one word: also a model that has learned nothing makes some
CALL = '<tool_call>{{"name":"digit","arguments":{{"letter":"{}"}}}}</tool_call>'
WORDS += ["tool", *map(CALL.format, "abcdefgh")]
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
TOOLS = '''
from verl.tools.function_tool import function_tool


@function_tool
def digit(letter: str) -> str:
    """The digit of a letter.

    Args:
        letter: A letter.
    """
    return str(ord(letter) % 10)
'''


def write_task(folder: Path, model: Path) -> None:
    """A tokenizer in the model's folder; train.parquet, test.parquet, chats.parquet, reward.py and tools.py."""
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
    (folder / "tools.py").write_text(TOOLS)
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
        "+ray_kwargs.ray_init.include_dashboard": False,  # eleven processes, each of which imports Ray
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    }
    return [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{name}={value}" for name, value in settings.items())]


def environment(folder: Path, *, pictures: bool = False) -> dict[str, str]:
    """That of docs/verl.md, "Without an accelerator". pictures: with what Qwen's processors need, see the Makefile."""
    modules, paths = ["train.integrations.verl"], [ROOT]
    if pictures:
        (folder / "modules").mkdir(exist_ok=True)
        shutil.copy(Path(__file__).with_name("verl_operators.py"), folder / "modules")
        modules, paths = ["verl_operators", *modules], [*paths, folder / "modules", PICTURES]
    made = os.environ | {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": ",".join(modules)}
    # Ray's workers have the lowest share of a processor by default: beside other programs they would hardly start.
    made |= {"RAY_worker_niceness": "0"}
    return made | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}


def printed(arguments: list[str], folder: Path, *, pictures: bool = False) -> str:
    """What a command prints that ends well."""
    options: dict[str, Any] = {"env": environment(folder, pictures=pictures), "cwd": folder, "timeout": 900}
    done = subprocess.run(arguments, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def logged(text: str, name: str) -> list[float]:
    """The values of a metric that verl prints after each step."""
    return [float(value) for value in re.findall(rf"{name}:(?:np\.\w+\()?([-+.e\d]+)", text)]


def turns(folder: Path, length: int) -> list[str]:
    """What `command` takes beside, for conversations with tools.py of so many tokens behind the prompt."""
    rollout = "actor_rollout_ref.rollout"
    settings = {
        "data.max_response_length": length,
        f"{rollout}.agent.default_agent_loop": "tool_agent",
        f"{rollout}.multi_turn.enable": True,
        f"{rollout}.multi_turn.format": "hermes",
        f"{rollout}.multi_turn.function_tool_path": folder / "tools.py",
    }
    return [f"{name}={value}" for name, value in settings.items()]


def separate() -> list[str]:
    """What `command` takes beside, for rollouts in a process of their own beside the trainer's."""
    rollout = "actor_rollout_ref.rollout"
    settings = {
        "trainer.v1.trainer_mode": "separate_async",
        "trainer.v1.separate_async.parameter_sync_step": 1,
        f"{rollout}.nnodes": 1,
        f"{rollout}.n_gpus_per_node": 1,
        f"{rollout}.checkpoint_engine.backend": "fnmodels",
        "algorithm.rollout_correction.bypass_mode": True,
        "++ray_kwargs.ray_init.num_gpus": 2,
    }
    return [f"{name}={value}" for name, value in settings.items()]


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
