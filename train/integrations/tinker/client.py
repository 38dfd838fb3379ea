"""`Client`: Tinker's training and sampling interface in this process, over `train.engine.Engine`.

    client = Client(folder="runs")                                      # where weights are saved
    training = client.create_lora_training_client("checkpoint", rank=16)
    training.forward_backward(data, "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    sampling = training.save_weights_and_get_sampling_client("after-one-step")
    sampling.sample(prompt, 4, types.SamplingParams(max_tokens=20)).result().sequences

All training and sampling clients of a base model share its weights; each has adapters of its own. A call is computed
before it returns, so errors are raised by the call; `Future` is the form in which its result is handed out, and each
client is its own future, for releases of Tinker return either. Methods have twins with `_async` at the end.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import params as P
from fnmodels.options import Kernel
from train.eval import pretrained

from .base import Base, Future
from .packed import saved_state
from .sampling import SamplingClient
from .traced import TracedLoss, trace
from .training import LoraConfig, TrainingClient


class Client:
    """The service: loads base models and makes clients that train and sample, in this process.

    A base model is the folder of a checkpoint; it is loaded once.

    Args:
        user_metadata: Labels, stored as an attribute and not read.
        project_id: A label, stored as an attribute and not read.
        display_name: A label, stored as an attribute and not read.
        base_url: Must be None, for there is no server.
        folder: Where saved weights and states go.
        dtype: Of base models; adapters are fp32.
        kernel: Of sampling and of training, see `fnmodels.forward`. With "invariant" the log-probabilities of sampled
            tokens and those of a pass with the same weights have the same bits.

    Raises:
        ValueError: There is a base_url.
    """

    def __init__(
        self,
        user_metadata: Mapping[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        folder: str | os.PathLike[str] = "tinker",
        dtype: torch.dtype = torch.float32,
        kernel: Kernel = "auto",
    ) -> None:
        if base_url is not None:
            raise ValueError(f"base_url is {base_url!r}; this service runs in this process and has none.")
        self.user_metadata, self.project_id, self.display_name = user_metadata, project_id, display_name
        self.folder, self.dtype, self.kernel = Path(folder), dtype, kernel
        self._bases: dict[Path, Base] = {}

    def base(self, base_model: str | os.PathLike[str]) -> Base:
        """The base model of a folder, loaded by the first call.

        Args:
            base_model: The folder of a checkpoint.

        Returns:
            Folder, config and parameters.
        """
        folder = Path(base_model)
        if folder not in self._bases:
            loaded = pretrained.load_reader(folder, dtype=self.dtype)
            self._bases[folder] = Base.of(folder, *loaded, self.kernel)
        return self._bases[folder]

    def create_lora_training_client(
        self, base_model: str | os.PathLike[str], *, user_metadata: Mapping[str, str] | None = None, **lora: Any
    ) -> TrainingClient:
        """A client that trains new LoRA adapters over a base model.

        Args:
            base_model: The folder of a checkpoint.
            user_metadata: Unused.
            **lora: Fields of `LoraConfig`: rank (32), seed, train_mlp, train_attn, train_unembed (True each).

        Returns:
            The client, which is also its own future.
        """
        return TrainingClient(self.folder, self.base(base_model), LoraConfig(**lora))

    async def create_lora_training_client_async(
        self, base_model: str | os.PathLike[str], **lora: Any
    ) -> TrainingClient:
        """`create_lora_training_client` for code that awaits; the work is done when it returns.

        Args:
            base_model: The folder of a checkpoint.
            **lora: Fields of `LoraConfig`.

        Returns:
            The client.
        """
        return self.create_lora_training_client(base_model, **lora)

    def create_custom_loss(
        self, fn: Callable[..., tuple[Tensor, Mapping[str, Tensor]]], input_ranks: Mapping[str, int]
    ) -> Future[TracedLoss]:
        """A loss of one datum, traced by torch.fx, for `TrainingClient.forward_backward_custom`.

        Args:
            fn: (logprobs [T], the entries of loss_fn_inputs that its parameters are named for) -> (loss, metrics), both
                of tensors without dimensions; metrics are named custom/NAME:sum or custom/NAME:mean. It may call
                functions and methods of torch that work on each element, sum or select.
            input_ranks: The rank of each parameter: 1 for logprobs and [T], 0 for a number, 2 for [T, K].

        Returns:
            A future of the loss.

        Raises:
            ValueError: torch.fx cannot trace the function, or it calls something else.
        """
        return Future(trace(fn, input_ranks))

    def create_training_client_from_state(self, path: str | os.PathLike[str]) -> TrainingClient:
        """A client that goes on from saved weights, with a new optimizer state.

        Args:
            path: The folder that `TrainingClient.save_state` wrote.

        Returns:
            The client.
        """
        made = self._like_saved(path)
        made.load_state(path)
        return made

    def create_training_client_from_state_with_optimizer(self, path: str | os.PathLike[str]) -> TrainingClient:
        """A client that goes on from saved weights and their optimizer state.

        Args:
            path: The folder that `TrainingClient.save_state` wrote.

        Returns:
            The client.
        """
        made = self._like_saved(path)
        made.load_state_with_optimizer(path)
        return made

    def _like_saved(self, path: str | os.PathLike[str]) -> TrainingClient:
        progress = saved_state(path).progress
        return self.create_lora_training_client(progress["base"], **progress["lora"])

    def create_sampling_client(
        self,
        model_path: str | os.PathLike[str] | None = None,
        base_model: str | os.PathLike[str] | None = None,
        *,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """A client that draws answers, from saved adapters or from a base model.

        Args:
            model_path: A folder of adapters that `save_weights_for_sampler` wrote.
            base_model: The folder of a checkpoint, without adapters.
            record_stability_info: Whether sequences have the experts of their tokens, of a model with experts.

        Returns:
            The client.

        Raises:
            ValueError: Both or none are set.
        """
        if (model_path is None) == (base_model is None):
            raise ValueError("A sampling client needs one of model_path and base_model.")
        if model_path is None:
            base = self.base(str(base_model))
            return SamplingClient(base, base.params, record_stability_info)
        base = self.base(pretrained.weights_folder(Path(model_path)))
        params = P.lora.load_adapters(model_path, base.config, base.params)
        return SamplingClient(base, params, record_stability_info)

    async def create_sampling_client_async(self, **places: Any) -> SamplingClient:
        """`create_sampling_client` for code that awaits; the work is done when it returns.

        Args:
            **places: model_path or base_model, and perhaps record_stability_info.

        Returns:
            The client.
        """
        return self.create_sampling_client(**places)
