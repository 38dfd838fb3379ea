"""An nn.Module around a config and its params, for libraries that take modules."""

from typing import Any, Unpack

from torch import Tensor, nn

from . import tree
from .apply import forward, prepare
from .options import ForwardKwargs
from .tree import Tree


class ModelModule(nn.Module):
    """`fnmodels.forward` with params registered under their paths; see `as_module`."""

    def __init__(self, config: Any, params: Tree, options: ForwardKwargs) -> None:
        super().__init__()
        self._config, self._options = config, options
        made: dict[int, nn.Parameter] = {}  # a leaf that stands at two paths is one Parameter
        for path, leaf in tree.flatten(params).items():
            *parents, last = path.split(".")
            node: nn.Module = self
            for part in parents:
                if part not in dict(node.named_children()):
                    node.add_module(part, nn.Module())
                node = node.get_submodule(part)
            parameter = made.setdefault(id(leaf), nn.Parameter(leaf.detach(), leaf.is_floating_point()))
            node.register_parameter(last, parameter)

    def params(self) -> Tree:
        """The tree of the parameters."""
        return tree.unflatten(dict(self.named_parameters(remove_duplicate=False)))

    def forward(self, tokens: Tensor, positions: Tensor | None = None, segment_ids: Tensor | None = None) -> Tensor:
        """tokens [B, S] -> logits [B, S, V]; positions and segment_ids as in `fnmodels.prepare`."""
        prepared = prepare(self._config, tokens, positions=positions, segment_ids=segment_ids)
        logits: Tensor = forward(self.params(), *prepared, config=self._config, **self._options)
        return logits


def as_module(config: Any, params: Tree, **options: Unpack[ForwardKwargs]) -> ModelModule:
    """The model as a torch.nn.Module, for libraries that take modules.

    Its parameters have the paths of the leaves as names (`layers.0.mlp.up_proj`) and share their memory; a leaf at two
    paths is one Parameter.

    Args:
        config: The model's config.
        params: The tree of parameters.
        **options: Keywords of `fnmodels.forward`, such as kernel="math" for second derivatives.

    Returns:
        A module whose forward(tokens, positions=None, segment_ids=None) returns the logits [B, S, V].
    """
    return ModelModule(config, params, options)
