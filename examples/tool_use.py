"""Multi-turn GRPO: a tiny model learns from reward alone to call a calculator or a search instead of guessing.

    python examples/tool_use.py                 # both tasks, some minutes on two CPU cores; the curve is tools.png

1. A tokenizer and a Llama of 0.3M parameters are made from nothing.
2. The main job trains it on demonstrations, of which only some call the tool: the others guess.
3. `fnmodels-rl --environment` has conversations about the task: the model writes a call, reads what the tool returns,
   and answers. The reward is 1 for a right answer. What the model sampled is what it is trained on, token for token.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import params as P
from fnmodels import llama
from train.cli import main as main_job
from train.data.chat import Template, render
from train.data.tokenizer import CHAT_TEMPLATE, tokenizer_config, train_tokenizer
from train.job.pictures import draw_losses
from train.rl.command import main as reinforce
from train.rl.tasks import ENVIRONMENTS, demonstrations

CONTEXT = 128  # tokens of a conversation
DEMONSTRATIONS = 8000  # of a task
GROUPS = ("--prompts", "8", "--answers", "8")  # of an update
SIZES = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3}


def new_model(folder: Path, chats: list[dict[str, object]]) -> None:
    """A checkpoint of a model that has learned nothing, with a tokenizer for the conversations."""
    template = Template(CHAT_TEMPLATE, {"eos_token": ""})
    texts = [render(template, chat["messages"]) for chat in chats[:400]]  # type: ignore[arg-type]
    tokenizer = train_tokenizer(texts, 360)
    config = llama.Config(tokenizer.get_vocab_size(), num_attention_heads=4, num_key_value_heads=4, **SIZES)
    P.save_pretrained(folder, config, P.init(config, seed=0))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(context=CONTEXT)))


def warm_start(task: str, folder: Path, steps: int) -> Path:
    """A checkpoint of the main job that calls the tool in some of its conversations."""
    run, data = folder / f"{task}-warm", folder / f"{task}.jsonl"
    if not (run / "summary.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        chats = list(demonstrations(task, DEMONSTRATIONS))
        data.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
        new_model(folder / f"{task}-new", chats)
        sizes = ["--row-length", "128", "--batch-rows", "16", "--eval-rows", "8", "--sample-tokens", "4"]
        flags = ["--steps", str(steps), "--eval-every", str(steps), "--learning-rate", "0.003", *sizes]
        resumed = ["--resume"] if run.exists() else []
        code = main_job(
            ["--run", str(run), "--init", str(folder / f"{task}-new"), "--data", str(data), *flags, *resumed]
        )
        if code:
            raise SystemExit(code)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/tools"), help="of the runs and the picture")
    parser.add_argument("--tasks", nargs="+", default=list(ENVIRONMENTS), choices=list(ENVIRONMENTS))
    parser.add_argument("--steps", type=int, default=600, help="of the warm start (default 600)")
    parser.add_argument("--updates", type=int, default=40, help="of the policy (default 40)")
    parser.add_argument("--staleness", type=int, default=0, help="the age of weights that begin conversations, at most")
    arguments = parser.parse_args()
    runs = {}
    for task in arguments.tasks:
        base = warm_start(task, arguments.folder, arguments.steps)
        runs[task] = arguments.folder / f"{task}-rl"
        sizes = [*GROUPS, "--tokens", "40", "--context", str(CONTEXT)]
        flags = ["--updates", str(arguments.updates), "--staleness", str(arguments.staleness), *sizes]
        flags += ["--learning-rate", "0.0002", *(["--resume"] if runs[task].exists() else [])]
        if code := reinforce(["--run", str(runs[task]), "--init", str(base), "--environment", task, *flags]):
            raise SystemExit(code)
    picture = arguments.folder / "tools.png"
    draw_losses(picture, runs)
    print(f"curve: {picture}")


if __name__ == "__main__":
    main()
