"""Tinker's training interface in this process: loops written for it run here.

    from train.integrations import tinker

client    `Client` (also `ServiceClient`)      training  `TrainingClient`     sampling  `SamplingClient`
base      futures, tokenizers, base models     losses    the losses by name  types     data, parameters, responses
"""

from . import types
from .client import Client
from .sampling import SamplingClient
from .training import TrainingClient
from .types import (
    AdamParams,
    Datum,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
    SamplingParams,
    TensorData,
)

ServiceClient = Client  # its name in Tinker's package

__all__ = ["Client", "ServiceClient", "TrainingClient", "SamplingClient", "types"]
__all__ += ["AdamParams", "Datum", "EncodedTextChunk", "ImageAssetPointerChunk", "ImageChunk", "ModelInput"]
__all__ += ["SamplingParams", "TensorData"]
