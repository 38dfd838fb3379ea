"""`SamplingClient`: answers from weights that no update changes."""

import uuid
from typing import Any

import torch

from fnmodels.tree import Tree
from train.eval import pretrained
from train.generation.loops import generate
from train.generation.routing import expert_layers
from train.generation.sampling import Sampling
from train.losses.logprobs import token_logprobs

from . import types
from .base import Base, Future, Ready, TextTokenizer
from .images import InputReader, packed_rows

_STOPS: dict[str, types.StopReason] = {"max_new": "length"}


class SamplingClient(Ready):
    """Draws answers from weights that no update changes.

    Args:
        base: The base model.
        params: Its parameters, with adapters that this client alone reads.
        records: Whether sequences have the experts of their tokens, of a model with experts.
    """

    def __init__(self, base: Base, params: Tree, records: bool = False) -> None:
        self.base, self.params = base, params
        self.records = records and bool(expert_layers(base.config))

    def get_tokenizer(self) -> TextTokenizer:
        """The tokenizer of the base model's folder.

        Returns:
            An object with `encode(text)` to a list of ids and `decode(ids)` to text.
        """
        return TextTokenizer(self.base.folder)

    def sample(
        self, prompt: Any, num_samples: int, sampling_params: Any, include_prompt_logprobs: bool = False
    ) -> Future[types.SampleResponse]:
        """Draws answers to a prompt, computed side by side. Without a seed each call draws with another.

        Args:
            prompt: A `ModelInput`.
            num_samples: The number of answers.
            sampling_params: A `SamplingParams`.
            include_prompt_logprobs: Whether the prompt's log-probabilities are computed too.

        Returns:
            A future of the sequences, and of the prompt's log-probabilities in nats.

        Raises:
            ValueError: max_tokens is below 1, or a picture cannot be read.
        """
        read, config = InputReader(self.base).read(prompt, "the prompt"), self.base.config
        stop, texts, ids = sampling_params.stop, list[str](), list[int]()
        for one in [stop] if isinstance(stop, str) else stop or ():
            (texts if isinstance(one, str) else ids).append(one)  # type: ignore[arg-type]
        limit = sampling_params.max_tokens
        if limit is not None and limit < 1:
            raise ValueError(f"max_tokens is {limit}; it must be at least 1, or None for all positions of the model.")
        seed = sampling_params.seed
        found = generate(
            *self.base.sampled(self.params),
            [read.tokens] * num_samples,
            images=[read.images] * num_samples,
            max_new=config.max_position_embeddings - len(read.tokens) if limit is None else limit,
            sampling=Sampling(
                temperature=sampling_params.temperature,
                top_k=None if sampling_params.top_k == -1 else sampling_params.top_k,
                top_p=sampling_params.top_p,
            ),
            seeds=int(torch.randint(2**31, ())) if seed is None else seed,
            stop_ids=pretrained.end_ids(self.base.folder) if stop is None else ids,
            stop_texts=texts,
            tokenizer=self.get_tokenizer().inner if texts else None,
            record_routing=self.records,
            kernel=self.base.kernel,
        )
        routing = list(map(types.Routing, found.routing)) if self.records else [None] * num_samples
        sequences = [
            types.SampledSequence(_STOPS.get(reason, "stop"), answer, logp.tolist(), uuid.uuid4().hex, experts)
            for reason, answer, logp, experts in zip(found.reasons, found.tokens, found.logp, routing, strict=True)
        ]
        prompt_logprobs = self.compute_logprobs(read).result() if include_prompt_logprobs else None
        return Future(types.SampleResponse(sequences, prompt_logprobs))

    async def sample_async(self, *args: Any, **options: Any) -> types.SampleResponse:
        """`sample` for code that awaits; the work is done when it returns.

        Args:
            *args: Those of `sample`.
            **options: Those of `sample` by name.

        Returns:
            The response.
        """
        return self.sample(*args, **options).result()

    def compute_logprobs(self, prompt: Any) -> Future[list[float | None]]:
        """The log-probability of each token of a prompt after those before it.

        Args:
            prompt: A `ModelInput`, of one token at least.

        Returns:
            A future of nats for each token, None for the first.

        Raises:
            ValueError: The prompt is empty.
        """
        read = InputReader(self.base).read(prompt, "the prompt")
        if not read.tokens:
            raise ValueError("The prompt is empty; log-probabilities need at least one token.")
        (row,) = packed_rows(self.base, {}, [read], ["the prompt"])
        with torch.no_grad():
            logp = token_logprobs(self.params, row.batch, **self.base.run)[0]
        return Future([None, *logp[0, :-1].tolist()])

    async def compute_logprobs_async(self, prompt: Any) -> list[float | None]:
        """`compute_logprobs` for code that awaits; the work is done when it returns.

        Args:
            prompt: A `ModelInput`, of one token at least.

        Returns:
            Nats for each token, None for the first.
        """
        return self.compute_logprobs(prompt).result()
