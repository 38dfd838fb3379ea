"""Tinker's training interface in this process: `import train.tinker as tinker`, then loops written for it run here.

client    `Client` (also `ServiceClient`), `TrainingClient`, `SamplingClient`
types     data, parameters and responses        losses    the losses by name
"""

from . import types
from .client import Client, SamplingClient, TrainingClient
from .types import AdamParams, Datum, EncodedTextChunk, ModelInput, SamplingParams, TensorData

ServiceClient = Client  # its name in Tinker's package

__all__ = ["Client", "ServiceClient", "TrainingClient", "SamplingClient", "types"]
__all__ += ["AdamParams", "Datum", "EncodedTextChunk", "ModelInput", "SamplingParams", "TensorData"]
