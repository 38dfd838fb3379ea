"""python -m train.tasks FOLDER --tasks NAME: evaluates a checkpoint on tasks of EleutherAI's lm-evaluation-harness."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from fnmodels.errors import UserError
from params.checkpoint.hub import local_folder
from params.imported import add_family_flag, imported_family
from train.command_line import Parser, program_name, run_command, suggestion
from train.job.settings.types import integer


def _name() -> str:
    return program_name("fnmodels-tasks", "train.tasks")


def parser() -> Parser:
    flags = Parser(
        prog=_name(),
        description="Evaluate a model on tasks of EleutherAI's evaluation harness, with our forward pass. A task whose "
        "data are on this machine needs no network.",
    )
    flags.add_argument("checkpoint", type=Path, metavar="CHECKPOINT_FOLDER", help="a run folder, one from Hugging Face")
    flags.add_argument("--tasks", required=True, metavar="NAME,...", help="names of tasks, comma-separated")
    flags.add_argument("--include", type=Path, metavar="DIR", help="a folder with tasks of your own, as YAML files")
    flags.add_argument("--limit", type=integer(1).parse, metavar="N", help="only the first N documents of each task")
    flags.add_argument("--shots", type=integer(0).parse, metavar="N", help="few-shot examples before each question")
    flags.add_argument(
        "--no-special-tokens",
        action="store_true",
        help="do not add the tokenizer's special tokens, such as <bos>, in front of texts",
    )
    flags.add_argument(
        "--as-harness",
        action="store_true",
        help="count special tokens as the harness's hf model does: <bos> twice in front of texts whose tokenizer adds "
        "it, and <eos> as a part of texts whose tokenizer adds that",
    )
    flags.add_argument("--chat", action="store_true", help="render requests with the checkpoint's chat template")
    flags.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    add_family_flag(flags)
    return flags


def evaluate(arguments: argparse.Namespace) -> int:
    import lm_eval
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    from train.eval.harness import Checkpoint

    if arguments.include is not None and not arguments.include.is_dir():
        raise UserError(f"--include {arguments.include}: there is no such folder")
    manager = TaskManager(include_path=None if arguments.include is None else str(arguments.include))
    names = arguments.tasks.split(",")
    for name in names:
        if name not in manager.all_tasks:
            raise UserError(f"there is no task {name}{suggestion(name, manager.all_tasks)}")
    model = Checkpoint(
        local_folder(arguments.checkpoint),
        add_special_tokens=not arguments.no_special_tokens,
        as_harness=arguments.as_harness,
        family=None if arguments.family is None else imported_family(arguments.family),
    )
    options = {"num_fewshot": arguments.shots, "limit": arguments.limit, "task_manager": manager}
    options["apply_chat_template"] = arguments.chat
    found = lm_eval.simple_evaluate(model=model, tasks=names, bootstrap_iters=1000, log_samples=False, **options)
    print(make_table(found))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found["results"], indent=1, default=str) + "\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(_name(), parser, evaluate, argv, needs=("lm_eval", "tokenizers"))
