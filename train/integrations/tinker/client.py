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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import params as P
from train.eval import pretrained

from .base import Base
from .sampling import SamplingClient
from .training import LoraConfig, TrainingClient, saved_state


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
    ) -> None:
        if base_url is not None:
            raise ValueError(f"base_url is {base_url!r}; this service runs in this process and has none.")
        self.user_metadata, self.project_id, self.display_name = user_metadata, project_id, display_name
        self.folder, self.dtype = Path(folder), dtype
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
            config, params = pretrained.load_model(folder, dtype=self.dtype)
            self._bases[folder] = Base(folder, config, params)
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
        self, model_path: str | os.PathLike[str] | None = None, base_model: str | os.PathLike[str] | None = None
    ) -> SamplingClient:
        """A client that draws answers, from saved adapters or from a base model.

        Args:
            model_path: A folder of adapters that `save_weights_for_sampler` wrote.
            base_model: The folder of a checkpoint, without adapters.

        Returns:
            The client.

        Raises:
            ValueError: Both or none are set.
        """
        if (model_path is None) == (base_model is None):
            raise ValueError("A sampling client needs one of model_path and base_model.")
        if model_path is None:
            base = self.base(str(base_model))
            return SamplingClient(base, base.params)
        base = self.base(pretrained.weights_folder(Path(model_path)))
        return SamplingClient(base, P.lora.load_adapters(model_path, base.config, base.params))

    async def create_sampling_client_async(self, **places: Any) -> SamplingClient:
        """`create_sampling_client` for code that awaits; the work is done when it returns.

        Args:
            **places: model_path or base_model.

        Returns:
            The client.
        """
        return self.create_sampling_client(**places)
