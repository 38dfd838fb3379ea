"""Parameter trees: initialization, sharding plans, LoRA, and loading and saving of Hugging Face checkpoints.

Import it as `import params as P`, which leaves the name `params` free for a tree.

initialize    `init`, `abstract` and `count`: trees from a family's `spec`
axes          the logical axes of parameters: what shards each, and where a layer computes with it
sharding      `Rules` and `plan`: logical axes of parameters to mesh dimensions, without torch.distributed
lora          LoRA adapters as trees: init, merge, load and save
compressed_ids `token_map` and `with_token_map`: compressed ids of tokens, made of a tokenizer (DeepSeek V4.1)
vocabulary    `resize_vocab`: embeddings and heads of another number of tokens
weight_forms  `packed` and `quantize`: linear weights in forms for decoding, oneDNN's layout, int8 and int4
checkpoint/   Hugging Face checkpoints: config.json, load, save, export, manifest; the tensor map
quantized/    quantized files: what they declare, forms of storage, weights dequantized or kept as they are stored
gguf/         GGUF files: their header, metadata as config.json, names of tensors, blocks, the tokenizer
interchange   `to_jax` and `from_jax`: trees of tensors as pytrees of jax arrays, by DLPack
io/           the safetensors reader, staged saves with their lock, checks of paths and files
inspect       `python -m params.inspect`: what a checkpoint contains, without loading its weights
convert       `python -m params.convert`: a Hugging Face folder of a GGUF file
compare       `python -m params.compare`: a checkpoint here and in transformers, layer by layer, for porting a family
new_family    `python -m params.new_family`: writes the first draft of a family's module and of its test variants
command_line  argument parsing and error output that these commands share
"""

from pathlib import Path
from runpy import run_path

run_path(str(Path(__file__).parents[1] / "fnmodels" / "_shadowing.py"))["require"](__file__, "fnmodels")

from fnmodels.errors import (
    CheckpointError,
    ConfigError,
    FormatError,
    IndexFileError,
    MismatchError,
    UnsafePathError,
    UnsupportedError,
)
from fnmodels.models.common.spec import Constant, Leaf, Normal
from fnmodels.tree import flatten, unflatten
from params import lora
from params.checkpoint.config import load_config
from params.checkpoint.embedder import load_embedder, save_embedder
from params.checkpoint.export import export
from params.checkpoint.from_tensors import from_tensors
from params.checkpoint.load import LoadReport, load_pretrained
from params.checkpoint.manifest import verify
from params.checkpoint.save import save_pretrained
from params.checkpoint.transaction import recover
from params.compressed_ids import token_map, with_token_map
from params.initialize import abstract, count, init, new_head
from params.interchange import from_jax, to_jax
from params.quantized.encode import requantize
from params.quantized.kept import dequantize
from params.sharding import Rules, Sharding, describe, plan
from params.vocabulary import resize_vocab
from params.weight_forms import packed, quantize

__all__ = ["abstract", "count", "init", "new_head", "resize_vocab", "Rules", "Sharding", "describe", "plan", "lora"]
__all__ += ["flatten", "unflatten", "from_jax", "to_jax"]
__all__ += ["token_map", "with_token_map"]
__all__ += ["packed", "quantize", "dequantize", "requantize"]
__all__ += ["Constant", "Leaf", "Normal"]
__all__ += [
    "LoadReport",
    "load_config",
    "load_pretrained",
    "save_pretrained",
    "load_embedder",
    "save_embedder",
    "recover",
    "verify",
    "export",
    "from_tensors",
]
__all__ += ["CheckpointError", "ConfigError", "FormatError", "IndexFileError"]
__all__ += ["MismatchError", "UnsafePathError", "UnsupportedError"]
