"""Generate text with a checkpoint folder that has a tokenizer.json: `python -m train.sample FOLDER --prompt TEXT`.

One prompt is answered on the screen as it is generated, several in turn; `--prompts` and `--out` read and write
files with one JSON object per line; `--chat` holds a conversation.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from fnmodels.errors import UserError
from params.checkpoint.hub import local_folder
from params.imported import add_family_flag, imported_family
from train.command_line import Parser, check_installed, program_name, run_command, terminal_text
from train.data.turns.pictured import with_images
from train.job.settings import flag
from train.job.settings.types import FRACTION, NUMBER, POSITIVE, SettingType, integer

from .prompt_rows import as_chat, read_prompts

SHARE = SettingType("a number above 0 and at most 1", "P", float, lambda value: type(value) is float and 0 < value <= 1)
FINITE = SettingType("a number", "X", float, lambda value: type(value) is float and abs(value) < float("inf"))

# Flags of sampling: {name: (type, field of Sampling, metavar and help of the flag)}.
SAMPLING = {
    "temperature": (NUMBER, "temperature", "T", "0 takes the likeliest token each time"),
    "top_k": (integer(0), "top_k", "K", "sample from the K likeliest tokens; 0: from all"),
    "top_p": (SHARE, "top_p", "P", "sample from the likeliest tokens that together reach this probability"),
    "min_p": (FRACTION, "min_p", "P", "sample from tokens at least this many times as likely as the likeliest"),
    "repetition_penalty": (POSITIVE, "repetition", "X", "divides the scores of tokens of the prompt and the answer"),
    "presence_penalty": (FINITE, "presence", "X", "subtracted from the scores of tokens of the answer"),
    "frequency_penalty": (FINITE, "frequency", "X", "the same, for each time that the token occurs"),
}


def _name() -> str:
    return program_name("fnmodels-sample", "train.sample")


def parser() -> Parser:
    flags = Parser(
        prog=_name(),
        description="Generate text with the model of a folder: config.json, *.safetensors, tokenizer.json. Sampling "
        "flags that are not given have the values of its generation_config.json, else temperature 0.8 and top-k 50.",
    )
    flags.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT_FOLDER", help="a run folder, one from Hugging Face, or adapters"
    )
    flags.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="a text to continue; several are answered in turn"
    )
    flags.add_argument(
        "--image",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help='a picture that the prompts are about; several in turn. Lines of --prompts name their own as "images"',
    )
    flags.add_argument(
        "--prompts", type=Path, metavar="FILE", help='JSON lines with a "prompt", or with the "messages" of a chat'
    )
    flags.add_argument(
        "--out", type=Path, metavar="FILE", help="write the answers as JSON lines instead of to the screen"
    )
    flags.add_argument(
        "--chat",
        action="store_true",
        help="prompts are a user's messages, rendered by the chat template; without any, hold a conversation",
    )
    flags.add_argument("--system", metavar="TEXT", help="the system message of --chat")
    flags.add_argument(
        "--tokens",
        type=integer(1).parse,
        metavar="N",
        help="maximal number of new tokens (default: that of generation_config.json, else 100)",
    )
    for name, (kind, _, metavar, text) in SAMPLING.items():
        flags.add_argument(flag(name), type=kind.parse, metavar=metavar, help=text)
    flags.add_argument("--stop", action="append", default=[], metavar="TEXT", help="a text that ends an answer")
    flags.add_argument(
        "--samples", type=integer(1).parse, default=1, metavar="N", help="answers to each prompt (default %(default)s)"
    )
    flags.add_argument(
        "--slots", type=integer(1).parse, default=32, metavar="N", help="answers at a time (default %(default)s)"
    )
    flags.add_argument(
        "--compile", action="store_true", help="compile the step, whatever it takes (default: where it saves time)"
    )
    flags.add_argument("--kv-dtype", choices=("int8",), help="cache keys and values in int8 (default: as computed)")
    flags.add_argument(
        "--seed", type=integer(0).parse, default=0, metavar="N", help="seed of the sampling (default %(default)s)"
    )
    add_family_flag(flags)
    return flags


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A loaded model. respond: (prompts, seed) -> events of `train.generation.loops.serve`. pictures: how a model that
    reads images reads them; None: none are given, and there is no place for one, a `placeholder`."""

    tokenizer: Any
    template: Any
    respond: Callable[[list["Prompt"], int], Iterator[Any]]
    pictures: Any = None
    placeholder: str | None = None

    def prompt(self, given: str | list[dict[str, Any]], pictures: Sequence[Path] = ()) -> "Prompt":
        """A text, or a conversation up to the assistant's cue."""
        from train.data.chat import render_prompt
        from train.data.image_prompts import check_places
        from train.generation.text import prompt_ids

        chat, images = not isinstance(given, str), []
        text = given if isinstance(given, str) else render_prompt(self.template(), given)
        if self.pictures is not None:
            text, images = self.pictures.with_pictures(text, pictures, chat=chat)
        elif self.placeholder is not None:
            check_places(text, self.placeholder, 0)
        if self.pictures is not None and (begun := self.pictures.ids(text)) is not None:
            return Prompt(begun, images)
        # the template renders special tokens, such as <bos>, itself
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids if chat else prompt_ids(self.tokenizer, text)
        return Prompt(list(ids), images)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The ids of a prompt and its images, see `train.Request`."""

    ids: list[int]
    images: list[Any]


def sample(arguments: argparse.Namespace) -> int:
    rows = checked(arguments)
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    if arguments.image:
        rows = [row | {"images": [str(file) for file in arguments.image]} for row in rows]
    if arguments.chat:
        rows = [as_chat(row, system) for row in rows]
    if arguments.chat or any("messages" in row for row in rows):
        check_installed(("jinja2",))
    if arguments.image or any(row.get("images") for row in rows):
        check_installed(("PIL",))
    model = load(arguments, images=bool(arguments.image) or any(row.get("images") for row in rows))
    if not rows:
        converse(model, system, arguments.seed, arguments.image)
        return 0
    # every row as often as it is to be answered: equal prompts are computed once
    rows = [row | ({"sample": i} if arguments.samples > 1 else {}) for row in rows for i in range(arguments.samples)]
    folder = arguments.prompts.parent if arguments.prompts else Path()
    prompts = [
        model.prompt(
            with_images(row["messages"], len(row.get("images", []))) if "messages" in row else row["prompt"],
            [folder / name for name in row.get("images", [])],
        )
        for row in rows
    ]
    events = model.respond(prompts, arguments.seed)
    if arguments.out is None and arguments.prompts is None:
        show(model, rows, prompts, events)
        return 0
    with nullcontext(sys.stdout) if arguments.out is None else arguments.out.open("w", encoding="utf-8") as out:
        write(rows, events, out)
    return 0


def checked(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The prompts of the flags, none for a conversation on the terminal. UserError for flags that cannot work."""
    _check_flags(arguments)
    return read_prompts(arguments.prompts) if arguments.prompts else [{"prompt": text} for text in arguments.prompt]


def _check_flags(arguments: argparse.Namespace) -> None:
    """UserError for flags that do not fit each other."""
    if arguments.system is not None and not arguments.chat:
        raise UserError("--system is the system message of --chat, which is missing")
    if arguments.prompts is not None and arguments.prompt:
        raise UserError("give either --prompt or --prompts, not both")
    if arguments.image and arguments.prompts is not None:
        raise UserError('--image is for --prompt and --chat; a line of --prompts has its own, as "images": [FILE, ...]')
    if not (arguments.prompts or arguments.prompt or arguments.chat):
        raise UserError("there is nothing to answer: give --prompt TEXT, --prompts FILE or --chat")
    if arguments.compile and not (arguments.prompts or arguments.prompt):
        raise UserError("--compile is for --prompt and --prompts: a conversation would compile each of its turns anew")
    if arguments.out is not None and not (arguments.prompts or arguments.prompt):
        raise UserError("--out takes the answers to --prompt or --prompts, and there are none")
    if arguments.out is not None and not arguments.out.parent.is_dir():
        raise UserError(f"--out {arguments.out}: there is no folder {arguments.out.parent}")
    for file in arguments.image:
        if not file.is_file():
            raise UserError(f"--image {file}: there is no such file")


def load(arguments: argparse.Namespace, *, images: bool = False) -> LoadedModel:
    """The model of the folder, with the settings of its generation_config.json and those of the flags over them.

    images: whether prompts have some, which needs the whole model and not its text alone.
    """
    import torch

    import fnmodels
    from fnmodels.models.common.registry import family_of, text_config
    from train.data.chat import read_template
    from train.data.image_prompts import ImagePrompts, placeholder_in
    from train.eval import pretrained
    from train.eval.pretrained import (
        answer_end_ids,
        check_tokens,
        check_vocabulary,
        generation_defaults,
        load_tokenizer,
    )
    from train.generation.compile_choice import roomy
    from train.generation.loops import serve
    from train.generation.requests import capacity_of, requests_of
    from train.generation.text import READABLE, fitted

    folder = local_folder(arguments.checkpoint)
    family = None if arguments.family is None else imported_family(arguments.family)
    tokenizer = load_tokenizer(folder)
    defaults = generation_defaults(folder)
    if defaults.unused:
        unused = terminal_text(", ".join(defaults.unused))
        print(f"{_name()}: generation_config.json also sets {unused}: not applied", file=sys.stderr)
    config, params = pretrained.load_image_model(folder) if images else pretrained.load_model(folder, family=family)
    text = text_config(config)
    check_vocabulary(tokenizer, text, folder)
    kv_dtype = None if arguments.kv_dtype is None else torch.int8
    try:
        fnmodels.init_cache(config, 1, 1, kv_dtype=kv_dtype)
    except ValueError as error:
        raise UserError(f"{folder}: {error}") from error
    flags = {field: getattr(arguments, name) for name, (_, field, *_) in SAMPLING.items()}
    given = {field: value for field, value in flags.items() if value is not None}
    if "top_k" in given:
        given["top_k"] = given["top_k"] or None
    sampling = dataclasses.replace(defaults.sampling or READABLE, **given)
    tokens = arguments.tokens or defaults.max_new or 100
    ends = answer_end_ids(folder, tokenizer)
    if hasattr(text, "end_token"):  # which files of BLIP name in another field
        ends = (*ends, text.end_token)

    def respond(prompts: list[Prompt], seed: int) -> Iterator[Any]:
        for prompt in prompts:
            own = [token for token in prompt.ids if not (images and token == config.image_token)]
            check_tokens(tokenizer, own, text)
        if arguments.compile and images and hasattr(family_of(config), "image_memory"):
            raise UserError(f"--compile is not for images of {config.model_type}: leave it out")
        fit = [fitted(text, prompt.ids, tokens) for prompt in prompts]
        for prompt, (kept, _) in zip(prompts, fit, strict=True):
            if prompt.images and len(kept) < len(prompt.ids):
                raise UserError(
                    f"a prompt has {len(prompt.ids)} tokens with its images, and the model's context of "
                    f"{text.max_position_embeddings} has {len(kept)} for it: ask for fewer new tokens with --tokens, "
                    "or give smaller pictures"
                )
        lines = [ids for ids, _ in fit], [new for _, new in fit]
        requests = requests_of(*lines, sampling, seed, ends, tuple(arguments.stop), [own.images for own in prompts])
        return serve(
            params,
            config,
            requests,
            slots=min(arguments.slots, len(requests)),
            capacity=roomy(capacity_of(requests)),
            tokenizer=tokenizer,
            kv_dtype=kv_dtype,
            compile="step" if arguments.compile else "auto",
        )

    weights = pretrained.weights_folder(folder)
    pictures = ImagePrompts.of(weights, config, tokenizer) if images else None
    placeholder = None if images else placeholder_in(weights, tokenizer)
    return LoadedModel(tokenizer, lambda: read_template(folder, images=images), respond, pictures, placeholder)


def show(model: LoadedModel, rows: list[dict[str, Any]], prompts: list[Prompt], events: Iterator[Any]) -> None:
    """Prints the answers in the order of the prompts: the first unfinished one as it grows, the next ones after it."""
    from train.generation.stop import text_of

    pieces: list[list[str]] = [[] for _ in rows]
    ended, current = set(), 0

    def begin(row: int) -> None:
        if len(rows) > 1:
            print(f"{'' if row == 0 else chr(10)}--- {row + 1} of {len(rows)}")
        if "prompt" in rows[row]:
            _say(text_of(model.tokenizer, prompts[row].ids).rstrip("\ufffd"))

    begin(0)
    for event in events:
        pieces[event.row].append(event.text)
        if event.reason is not None:
            ended.add(event.row)
        while current < len(rows):
            _say("".join(pieces[current]))
            pieces[current].clear()
            if current not in ended:
                break
            print(flush=True)
            current += 1
            if current < len(rows):
                begin(current)


def _say(text: str) -> None:
    """Prints a part of what a model says: as it is into a file or pipe, and so that it cannot steer a terminal."""
    print(terminal_text(text) if sys.stdout.isatty() else text, end="", flush=True)


def write(rows: list[dict[str, Any]], events: Iterator[Any], out: TextIO) -> None:
    """Writes one JSON line per row, in order, as soon as it and all before it are answered; progress on stderr."""
    found: list[list[Any]] = [[] for _ in rows]
    written, done, tokens, begin = 0, 0, 0, time.monotonic()
    progress = Progress(len(rows))
    for event in events:
        found[event.row].append(event)
        tokens += 1
        if event.reason is None:
            continue
        done += 1
        while written < len(rows) and found[written] and found[written][-1].reason is not None:
            own = found[written]
            answer = {
                "text": "".join(event.text for event in own),
                "tokens": [event.token for event in own],
                "logp": [event.logp for event in own],
                "reason": own[-1].reason,
            }
            out.write(json.dumps(rows[written] | answer, ensure_ascii=out.isatty()) + "\n")
            out.flush()
            found[written] = own[-1:]
            written += 1
        progress.show(done, tokens, time.monotonic() - begin)
    progress.end()


class Progress:
    """A bar on a terminal, else a plain line from time to time."""

    SECONDS, WIDTH = 10, 30

    def __init__(self, total: int) -> None:
        self.total, self.last, self.live = total, 0.0, sys.stderr.isatty()

    def show(self, done: int, tokens: int, seconds: float) -> None:
        if not self.live and seconds - self.last < self.SECONDS and done < self.total:
            return
        self.last = seconds
        size = self.WIDTH * done // self.total
        bar = f"[{'#' * size}{'.' * (self.WIDTH - size)}] " if self.live else ""
        line = f"{bar}{done}/{self.total} answers, {tokens / max(seconds, 1e-9):,.0f} tokens/s"
        print(line, end="\r" if self.live else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.live:
            print(file=sys.stderr)


def converse(model: LoadedModel, system: list[dict[str, Any]], seed: int, pictures: Sequence[Path] = ()) -> None:
    """A conversation on the terminal, until the input ends: each line is a message, and the answer is streamed.

    pictures: those of the first message.
    """
    messages = list(system)
    for turn in count():
        print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            print()
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.rstrip("\n")})
        answer = ""
        prompt = model.prompt(with_images(messages, len(pictures)), pictures)
        for event in model.respond([prompt], seed + turn):
            answer += event.text
            _say(event.text)
        print(flush=True)
        messages.append({"role": "assistant", "content": answer})


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(_name(), parser, sample, argv, needs=("tokenizers",))
