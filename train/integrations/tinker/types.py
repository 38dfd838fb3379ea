"""The values that Tinker's interface exchanges, by its names and fields; its package is not needed.

`Client` reads the package's own objects too, for it looks at fields alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

StopReason = Literal["stop", "length"]


@dataclass(frozen=True)
class TensorData:
    """Numbers as a flat list with a dtype and a shape.

    Args:
        data: The elements in row-major order.
        dtype: "int64" or "float32".
        shape: The shape; None: that of the list.

    Raises:
        ValueError: The dtype is another one.
    """

    data: list[Any]
    dtype: str
    shape: list[int] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ("int64", "float32"):
            raise ValueError(f"dtype is {self.dtype!r}; TensorData has int64 or float32.")

    @staticmethod
    def from_torch(values: Tensor) -> "TensorData":
        """The elements of a tensor.

        Args:
            values: A tensor of any shape; floating ones become float32, others int64.

        Returns:
            The data, with the tensor's shape.
        """
        dtype = "float32" if values.is_floating_point() else "int64"
        return TensorData(values.detach().cpu().flatten().tolist(), dtype, list(values.shape))

    @staticmethod
    def from_numpy(values: "np.ndarray[Any, Any]") -> "TensorData":
        """The elements of an array.

        Args:
            values: An array of any shape; floating ones become float32, others int64.

        Returns:
            The data, with the array's shape.
        """
        return TensorData.from_torch(torch.from_numpy(np.ascontiguousarray(values)))

    def to_torch(self) -> Tensor:
        """A tensor of these elements.

        Returns:
            A new tensor of the shape and dtype.
        """
        return torch.tensor(self.data, dtype=getattr(torch, self.dtype)).reshape(
            [len(self.data)] if self.shape is None else self.shape
        )

    def to_numpy(self) -> "np.ndarray[Any, Any]":
        """An array of these elements.

        Returns:
            A new array of the shape and dtype.
        """
        return self.to_torch().numpy()

    def tolist(self) -> list[Any]:
        """Nested lists of these elements.

        Returns:
            Lists as deep as the shape.
        """
        found: list[Any] = self.to_torch().tolist()
        return found


@dataclass(frozen=True, eq=False)
class Routing:
    """The experts that computed the tokens of a sequence, for `Datum.loss_fn_inputs` under the name "routing".

    Args:
        experts: Integers [tokens, layers with experts, k].
    """

    experts: Tensor

    def to_torch(self) -> Tensor:
        """The experts.

        Returns:
            The same tensor.
        """
        return self.experts


@dataclass(frozen=True)
class EncodedTextChunk:
    """Token ids of a piece of text.

    Args:
        tokens: The ids.
    """

    tokens: Sequence[int]

    @property
    def length(self) -> int:
        """The number of ids."""
        return len(self.tokens)


@dataclass(frozen=True)
class ImageChunk:
    """A picture, which stands for the tokens of its features; tokens that begin and end it are text around it.

    Args:
        data: The bytes of its file.
        format: "png" or "jpeg".
        expected_tokens: Its tokens, which are compared with those of the model; None: they are not.
        type: The kind of chunk, by Tinker's name.
    """

    data: bytes
    format: str
    expected_tokens: int | None = None
    type: str = "image"

    @property
    def length(self) -> int:
        """The number of expected tokens. ValueError without them."""
        return _expected(self.expected_tokens)


@dataclass(frozen=True)
class ImageAssetPointerChunk:
    """A picture in a file of this machine, otherwise as an `ImageChunk`.

    Args:
        location: The path of the file.
        format: "png" or "jpeg".
        expected_tokens: Its tokens, which are compared with those of the model; None: they are not.
        type: The kind of chunk, by Tinker's name.
    """

    location: str
    format: str
    expected_tokens: int | None = None
    type: str = "image_asset_pointer"

    @property
    def length(self) -> int:
        """The number of expected tokens. ValueError without them."""
        return _expected(self.expected_tokens)


def _expected(tokens: int | None) -> int:
    if tokens is None:
        raise ValueError("An image without expected_tokens has no length before the model reads it.")
    return tokens


Chunk = EncodedTextChunk | ImageChunk | ImageAssetPointerChunk


@dataclass(frozen=True)
class ModelInput:
    """A sequence of token ids and pictures, in pieces.

    Args:
        chunks: The pieces in order.
    """

    chunks: Sequence[Chunk]

    @staticmethod
    def from_ints(tokens: Sequence[int]) -> "ModelInput":
        """A sequence of one piece.

        Args:
            tokens: Token ids.

        Returns:
            The sequence.
        """
        return ModelInput([EncodedTextChunk([int(token) for token in tokens])])

    @staticmethod
    def empty() -> "ModelInput":
        """A sequence without tokens.

        Returns:
            The sequence.
        """
        return ModelInput([])

    def to_ints(self) -> list[int]:
        """The token ids of all pieces.

        Returns:
            The ids in order.

        Raises:
            ValueError: A piece is a picture.
        """
        found = list[int]()
        for chunk in self.chunks:
            if not isinstance(chunk, EncodedTextChunk):
                raise ValueError(f"to_ints is for text alone, and a chunk is a {type(chunk).__name__}.")
            found += chunk.tokens
        return found

    def append(self, chunk: Chunk) -> "ModelInput":
        """The sequence with a further piece; this one is unchanged.

        Args:
            chunk: The piece that is added at the end.

        Returns:
            The longer sequence.
        """
        return ModelInput([*self.chunks, chunk])

    def append_int(self, token: int) -> "ModelInput":
        """The sequence with a further token; this one is unchanged.

        Args:
            token: The id that is added at the end.

        Returns:
            The longer sequence.
        """
        return self.append(EncodedTextChunk([int(token)]))

    @property
    def length(self) -> int:
        """The number of tokens in all pieces. ValueError for a picture without expected_tokens."""
        return sum(chunk.length for chunk in self.chunks)


@dataclass(frozen=True)
class Datum:
    """A sequence and a number per token for the loss.

    Args:
        model_input: A `ModelInput`.
        loss_fn_inputs: {"target_tokens": ..., "weights": ...} and the like. Values are TensorData, tensors, arrays or
            lists; they are stored as TensorData. "routing", integers [tokens, layers with experts, k], are the experts
            that the pass replays; all data of a call have it or none.
    """

    model_input: Any
    loss_fn_inputs: Mapping[str, Any]

    def __post_init__(self) -> None:
        given = {name: _tensor_data(value) for name, value in self.loss_fn_inputs.items()}
        object.__setattr__(self, "loss_fn_inputs", given)


def _tensor_data(value: Any) -> Any:
    if hasattr(value, "to_torch"):
        return value
    return TensorData.from_torch(value if isinstance(value, Tensor) else torch.as_tensor(value))


@dataclass(frozen=True)
class AdamParams:
    """Hyperparameters of one update of AdamW.

    Args:
        learning_rate: The rate.
        beta1: The decay of the gradient's mean per update.
        beta2: The decay of its mean square per update.
        eps: Added to the root of the mean square.
        weight_decay: The decay per update is learning_rate x this x the parameter.
        grad_clip_norm: The largest norm of the gradient; 0: no clipping.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class SamplingParams:
    """Settings of drawing an answer.

    Args:
        max_tokens: Tokens of an answer at most; None: as many as the model has positions.
        seed: Of the draws; None: another one for each call.
        stop: A text, texts, or token ids that end an answer; None: the checkpoint's end-of-text ids.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: The number of likeliest tokens that are kept; -1: all.
        top_p: The share of the distribution that is kept.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


@dataclass(frozen=True)
class SampledSequence:
    """An answer with the log-probability of each token.

    Args:
        stop_reason: "stop" or "length".
        tokens: Ids, the one that stopped the answer included.
        logprobs: Nats of each token at the temperature.
        sequence_id: Another one for each answer, which comparisons leave out.
        routing: The experts that computed the prompt and all tokens but the last, as a Datum of these tokens takes
            them; None where they were not recorded.
    """

    stop_reason: StopReason
    tokens: list[int]
    logprobs: list[float]
    sequence_id: str = field(default="", compare=False)
    routing: Routing | None = field(default=None, compare=False)


@dataclass(frozen=True)
class SampleResponse:
    """The answers to a prompt.

    Args:
        sequences: The answers.
        prompt_logprobs: Nats of each token of the prompt, None for the first; None without include_prompt_logprobs.
    """

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """The outputs of a loss.

    Args:
        loss_fn_output_type: The kind of outputs, by Tinker's name.
        loss_fn_outputs: {"logprobs": TensorData} for each datum.
        metrics: {"loss:sum": ...}.
    """

    loss_fn_output_type: str
    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimStepResponse:
    """The result of an update.

    Args:
        metrics: {"grad_norm": the norm before clipping}.
    """

    metrics: dict[str, float] | None = None


@dataclass(frozen=True)
class SaveWeightsResponse:
    """The result of a save.

    Args:
        path: The folder that was written.
    """

    path: str


@dataclass(frozen=True)
class LoadWeightsResponse:
    """The result of loading a state.

    Args:
        path: The folder that was read.
    """

    path: str
