"""Adapter of checkpoint folders to EleutherAI's lm-evaluation-harness (the `eval` extra), with fnmodels' forward pass.

    results = lm_eval.simple_evaluate(model=Checkpoint(folder), tasks=["my_task"], task_manager=...)

`python -m train.tasks` is the command. The harness turns a task's documents into texts and calls the three methods
below. Defaults follow its `hf` model of transformers, so that results are comparable: special tokens at the start,
lengths, sampling and stop conditions. They differ where special tokens would be counted as text, see `Checkpoint`.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import LM
from tqdm import tqdm

from fnmodels.errors import UserError
from fnmodels.options import Kernel
from train.data.chat import Template, check_prompt, read_template, render, special_tokens
from train.generation.loops import serve
from train.generation.requests import Event, Request, capacity_of, collect
from train.generation.sampling import Sampling
from train.generation.stop import text_of

from .pretrained import begin_id, check_vocabulary, end_ids, load_model, load_tokenizer
from .scoring import ROW_TOKENS, score_continuations
from .text_ids import ContextPair, TextIds

# the names that tasks use for the maximal length of an answer; the first one that is set counts
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
SETTINGS = {"until", "do_sample", "temperature", "top_k", "top_p", "min_p", *LENGTHS}
SAMPLING_ONLY = {"typical_p"}  # without effect in greedy decoding


class Checkpoint(LM):
    """A checkpoint folder (config.json, *.safetensors and tokenizer.json, or adapters) as a model of the harness.

    dtype: of the weights; None: as stored. add_special_tokens: whether the tokenizer adds its special tokens in front,
    such as <bos>, as `hf` does now (lm-eval 0.4.9: for Gemma only). batch_tokens, kernel: see `score_continuations`.
    as_harness: counts them as `hf` does, see `TextIds`; by default a text begins once, and its targets are its own
    tokens. family: the module that reads the checkpoint; None: that of its type.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        dtype: torch.dtype | None = None,
        device: str | None = None,
        add_special_tokens: bool = True,
        as_harness: bool = False,
        batch_tokens: int = ROW_TOKENS,
        kernel: Kernel = "auto",
        family: Any = None,
    ) -> None:
        super().__init__()
        self.folder = Path(folder)
        self._tokenizer = load_tokenizer(self.folder)
        self.config, self.params = load_model(self.folder, merge=True, family=family, dtype=dtype, device=device)
        check_vocabulary(self._tokenizer, self.config, self.folder)
        begin = begin_id(self.folder, self._tokenizer)
        self._ids = TextIds(self.folder, self._tokenizer, begin, add_special_tokens, as_harness, self.config)
        ends, end = end_ids(self.folder), self._tokenizer.token_to_id(special_tokens(self.folder).get("eos_token", ""))
        self.ends = ends if end is None else (end, *ends)
        self.batch_tokens, self.kernel = batch_tokens, kernel

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        pairs = [self._ids.pair(*request.args) for request in requests]
        return self._score(pairs)

    def _score(self, pairs: list[ContextPair]) -> list[tuple[float, bool]]:
        return score_continuations(self.params, self.config, pairs, batch_tokens=self.batch_tokens, kernel=self.kernel)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probabilities of full texts, each token predicted once, in windows of the model's length."""
        pairs, owners = list[ContextPair](), list[int]()
        for index, request in enumerate(requests):
            (text,) = request.args
            windows = self._ids.windows(text, self.config.max_position_embeddings)
            pairs += windows
            owners += [index] * len(windows)
        sums = [0.0] * len(requests)
        found = self._score(pairs)
        for owner, (logp, _) in zip(owners, found, strict=True):
            sums[owner] += logp
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        # a repeated request asks for several samples: each gets a seed of its own
        made = [self._request(*request.args, seed=seed) for seed, request in enumerate(requests)]
        capacity = capacity_of(made)
        events = serve(
            self.params,
            self.config,
            made,
            slots=max(1, min(len(made), self.batch_tokens // capacity)),
            capacity=capacity,
            tokenizer=self._tokenizer,
            kernel=self.kernel,
            skip_special_tokens=False,  # a stop text may be a special token, which the decoded answer leaves out
        )
        with tqdm(total=len(made), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            found = collect(_counted(events, bar), len(made))
        return [self._text(request, tokens) for request, tokens in zip(made, found.tokens, strict=True)]

    def _request(self, context: str, settings: dict[str, Any], *, seed: int) -> Request:
        """A context to continue up to the first stop text. settings: the harness's, see SETTINGS.

        A context that leaves no room for the longest answer is truncated from the left. UserError where the
        answer alone is too long.
        """
        length = next((settings[name] for name in LENGTHS if settings.get(name) is not None), 256)
        room = self.config.max_position_embeddings - length
        if room < 1:
            raise UserError(
                f"the task sets max_gen_toks {length} (256 where it sets none); {self.folder} takes "
                f"{self.config.max_position_embeddings} tokens, which must hold the answer and some of the question"
            )
        until = settings.get("until") or []
        stops = tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop)
        ids = (self._ids.of(context) or self._ids.start)[-room:]
        return Request(ids, length, sampling_of(settings), seed, stop_ids=self.ends, stop_texts=stops)

    def _text(self, request: Request, tokens: list[int]) -> str:
        """The text of an answer, without its end token and from its first stop text on.

        An answer that ends within a character keeps the others, see `text_of`; as `hf` has it, byte tokens do not.
        """
        ids = tokens[:-1] if tokens[-1] in self.ends else tokens
        text = str(self._tokenizer.decode(ids)) if self._ids.as_harness else text_of(self._tokenizer, ids)
        places = [text.index(stop) for stop in request.stop_texts if stop in text]
        return text[: min(places, default=len(text))]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The rendered conversation, ending with the assistant's cue, or else with the content of the last message.

        UserError where the template leaves out what a message says.
        """
        try:
            text = render(self._template, chat_history, prompt=add_generation_prompt)
        except UserError:  # some templates accept no system message
            chat_history = [message for message in chat_history if message["role"] != "system"]
            text = render(self._template, chat_history, prompt=add_generation_prompt)
        check_prompt(self._template, chat_history, text)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template's source, for the report of an evaluation."""
        return self._template.source

    @property
    def tokenizer_name(self) -> str:
        """The key under which the harness caches rendered requests, where that is enabled."""
        return str(self.folder.resolve()).replace("/", "__")

    @cached_property
    def _template(self) -> Template:
        return read_template(self.folder)


def _counted(events: Iterator[Event], bar: Any) -> Iterator[Event]:
    for event in events:
        bar.update(event.reason is not None)
        yield event


def sampling_of(settings: dict[str, Any]) -> Sampling:
    """The sampling of a task's settings: greedy, unless do_sample or a temperature asks for sampling."""
    temperature = settings.get("temperature")
    sample = settings.get("do_sample")
    if sample is None:
        sample = bool(temperature)
    unknown = sorted(settings.keys() - SETTINGS - (set() if sample else SAMPLING_ONLY))
    if unknown:
        raise UserError(f"generation takes {', '.join(sorted(SETTINGS))}; the task also sets {unknown[0]}")
    if not sample:
        return Sampling(temperature=0.0)
    given = {name: settings[name] for name in ("temperature", "top_k", "top_p", "min_p") if settings.get(name)}
    return Sampling(**given)
