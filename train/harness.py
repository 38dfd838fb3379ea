"""A checkpoint folder as a model of EleutherAI's evaluation harness (the `eval` extra), with our forward pass.

    results = lm_eval.simple_evaluate(model=Checkpoint(folder), tasks=["my_task"], task_manager=...)

`python -m train.tasks` is this as a command. The harness makes texts of a task's documents and looks only at what the
three methods return, so nothing of a model is in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from params.files import read_json

from .errors import UserError
from .pretrained import check_vocabulary, end_ids, load_model, load_tokenizer, weights_folder
from .sample import continuation
from .scoring import ROW_TOKENS, score_continuations

SETTINGS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k"}


class Checkpoint(LM):
    """folder: config.json, *.safetensors and tokenizer.json, or adapters. dtype: of the weights; None: as stored.

    add_special_tokens: whether texts begin as the tokenizer would begin them, with <bos> for instance; the harness
    leaves that out, but for models that need it (Gemma). batch_tokens: see `score_continuations`.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        dtype: torch.dtype | None = None,
        device: str | None = None,
        add_special_tokens: bool = False,
        batch_tokens: int = ROW_TOKENS,
    ) -> None:
        super().__init__()
        self.folder = Path(folder)
        self._tokenizer = load_tokenizer(self.folder)
        self.config, self.params = load_model(self.folder, merge=True, dtype=dtype, device=device)
        check_vocabulary(self._tokenizer, self.config.vocab_size, self.folder)
        self.ends = end_ids(self.folder)
        self.add_special_tokens, self.batch_tokens = add_special_tokens, batch_tokens

    @property
    def first(self) -> int:
        """What stands before a text with nothing before it: the token that begins texts, else one that ends them."""
        begins = read_json(weights_folder(self.folder) / "config.json").get("bos_token_id")
        if begins is None and not self.ends:
            raise UserError(
                f"{self.folder}: config.json has neither bos_token_id nor eos_token_id to begin a text with"
            )
        return int(self.ends[0] if begins is None else begins)

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=self.add_special_tokens).ids)

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The ids of both as those of one text; spaces between them belong to the continuation, as in the harness."""
        stripped = context.rstrip()
        whole = self.ids(context + continuation)
        before = self.ids(stripped)
        # with nothing but spaces before it, or nothing at all, the text still needs something to be predicted from
        return (before, whole[len(before) :]) if before else ([self.first], whole)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        pairs = [self.pair(*request.args) for request in requests]
        return score_continuations(self.params, self.config, pairs, batch_tokens=self.batch_tokens)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, each token predicted once, in windows of the model's length."""
        pairs, owners = [], []
        for index, request in enumerate(requests):
            ids = self.ids(*request.args)
            for window in get_rolling_token_windows(ids, self.first, self.config.max_position_embeddings, 1):
                pairs.append(make_disjoint_window(window))
                owners.append(index)
        sums = [0.0] * len(requests)
        found = score_continuations(self.params, self.config, pairs, batch_tokens=self.batch_tokens)
        for owner, (logp, _) in zip(owners, found, strict=True):
            sums[owner] += logp
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        return [self.answer(*request.args) for request in requests]

    def answer(self, context: str, settings: dict[str, Any]) -> str:
        """What follows the context, up to the first stop text. settings: the harness's, see SETTINGS."""
        unknown = sorted(settings.keys() - SETTINGS)
        if unknown:
            raise UserError(f"generation takes {', '.join(sorted(SETTINGS))}; the task also sets {unknown[0]}")
        until = settings.get("until") or []
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        draws = settings.get("do_sample", False)
        new: list[int] = []
        text = ""
        for token in continuation(
            self.params,
            self.config,
            self.ids(context) or [self.first],
            tokens=settings.get("max_gen_toks", 256),
            temperature=settings.get("temperature", 1.0) if draws else 0.0,
            top_k=settings.get("top_k"),
            end=self.ends,
        ):
            new.append(token)
            text = self._tokenizer.decode(new, skip_special_tokens=True)
            if any(stop in text for stop in stops):
                break
        return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]
