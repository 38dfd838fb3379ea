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
    """Numbers as a flat list, with dtype "int64" or "float32" and a shape, by default that of the list."""

    data: list[Any]
    dtype: str
    shape: list[int] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ("int64", "float32"):
            raise ValueError(f"dtype is {self.dtype!r}; TensorData has int64 or float32.")

    @staticmethod
    def from_torch(values: Tensor) -> "TensorData":
        dtype = "float32" if values.is_floating_point() else "int64"
        return TensorData(values.detach().cpu().flatten().tolist(), dtype, list(values.shape))

    @staticmethod
    def from_numpy(values: "np.ndarray[Any, Any]") -> "TensorData":
        return TensorData.from_torch(torch.from_numpy(np.ascontiguousarray(values)))

    def to_torch(self) -> Tensor:
        return torch.tensor(self.data, dtype=getattr(torch, self.dtype)).reshape(self.shape or [len(self.data)])

    def to_numpy(self) -> "np.ndarray[Any, Any]":
        return self.to_torch().numpy()

    def tolist(self) -> list[Any]:
        found: list[Any] = self.to_torch().tolist()
        return found


@dataclass(frozen=True)
class EncodedTextChunk:
    """Token ids of a piece of text."""

    tokens: Sequence[int]


@dataclass(frozen=True)
class ModelInput:
    """A sequence of token ids, in pieces; images are not supported."""

    chunks: Sequence[EncodedTextChunk]

    @staticmethod
    def from_ints(tokens: Sequence[int]) -> "ModelInput":
        return ModelInput([EncodedTextChunk([int(token) for token in tokens])])

    @staticmethod
    def empty() -> "ModelInput":
        return ModelInput([])

    def to_ints(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]

    def append(self, chunk: EncodedTextChunk) -> "ModelInput":
        return ModelInput([*self.chunks, chunk])

    def append_int(self, token: int) -> "ModelInput":
        return self.append(EncodedTextChunk([int(token)]))

    @property
    def length(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


@dataclass(frozen=True)
class Datum:
    """A sequence and one number per token for the loss: {"target_tokens": ..., "weights": ...} and the like.

    Values are TensorData, tensors, arrays or lists; they are stored as TensorData.
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
    """Hyperparameters of one update. grad_clip_norm: the largest norm of the gradient, 0 for none."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class SamplingParams:
    """How an answer is drawn. max_tokens: None for as many as the model has positions.

    stop: a text, texts, or token ids that end an answer; None: the checkpoint's end-of-text ids. top_k: -1 for all.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


@dataclass(frozen=True)
class SampledSequence:
    """Tokens, the one that stopped the answer included, and the log-probability of each at the temperature.

    sequence_id: another one for each answer, which comparisons leave out.
    """

    stop_reason: StopReason
    tokens: list[int]
    logprobs: list[float]
    sequence_id: str = field(default="", compare=False)


@dataclass(frozen=True)
class SampleResponse:
    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """loss_fn_outputs: {"logprobs": TensorData} for each datum; metrics: {"loss:sum": ...}."""

    loss_fn_output_type: str
    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class OptimStepResponse:
    metrics: dict[str, float] | None = None


@dataclass(frozen=True)
class SaveWeightsResponse:
    path: str


@dataclass(frozen=True)
class LoadWeightsResponse:
    path: str
