"""Runs one stage of a loss: its layers, and on the last stage the loss on the final hidden states.

Every stage calls the loss. At the call of fnmodels.hidden the stage runs its own layers on the states that it received;
the last stage returns them to the loss, and the others stop there.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.apply import layer_inputs_of, stack_params
from fnmodels.edits import edit_end, edits_of_stage
from fnmodels.models.common.family import field_of, function_of, parsed
from fnmodels.noise import embedded, noise_of, with_final_dropout
from fnmodels.run_params import RunParams
from fnmodels.tree import Tree
from fnmodels.unembedding import unembedded
from train.gradients import exact, loss_and_outputs
from train.loss import ModelLoss
from train.losses.moe_balance import balance_terms
from train.run_options import Balance, Stage

from .boundary import NOTHING_SHARED, Sharing, carries_term, term_dtype
from .joint_node import together
from .microbatch import Microbatch
from .schedule import SPLITTING, Pipeline
from .stacks import Stack, numbered, stacks_of


@dataclass(frozen=True)
class StageHooks:
    """Hooks by which the other dimensions of a mesh change a stage.

    full_states: gathers the sequence dimension of hidden states before they are sent. dtype: of hidden states between
    stages; None: that of the layers' weights. multiple: of which lengths of padded microbatches are multiples.
    sharing: of what else is sent.
    """

    full_states: Callable[[Tensor], Tensor] | None = None
    dtype: torch.dtype | None = None
    multiple: int = 1
    sharing: Sharing = NOTHING_SHARED


ALONE = StageHooks()  # no other mesh dimension

Result = Callable[[Any], tuple[Tensor, Any, dict[str, Tensor]]]


def loss_result(found: Any) -> tuple[Tensor, Any, dict[str, Tensor]]:
    """(sum, (count, outputs), aux) of a loss' return value."""
    (total, count, *aux), outputs = loss_and_outputs(found)
    return total, (count, outputs), tree.map(Tensor.detach, aux[0]) if aux else {}


class _Done(BaseException):
    """Ends the loss on a stage before the last, after its layers have run; carries their results."""

    def __init__(self, sent: dict[str, Tensor], aux: dict[str, Tensor]) -> None:
        self.sent, self.aux = sent, aux


@dataclass(frozen=True)
class StagedLoss:
    """A loss over the stages of a pipeline. result: (sum, count, aux) of its return value."""

    loss: ModelLoss
    pipe: Pipeline
    hooks: StageHooks = ALONE
    result: Result = loss_result

    def run(
        self, stage: int, params: Mapping[str, Any], received: Mapping[str, Tensor], part: Microbatch
    ) -> tuple[dict[str, Tensor], Any, dict[str, Tensor]]:
        """(what is sent, count, aux) of a stage. params: the stage's share. received: what the stage before sent.

        Sent is what `boundary` lists, with the balance terms of the layers so far where `carries_term`, so that the
        loss of the last stage may scale them; by the last stage the sum of the loss alone, "total". count: 0 before the
        last stage. aux: counts of these layers' experts, and balance terms as summands of means over all layers; on
        the last stage also the loss' own.
        """
        config, pipe = self.pipe.config, self.pipe
        family, (lo, hi), is_last = fnmodels.family_of(config), pipe.layers[stage], stage == len(pipe.layers) - 1
        earlier = tree.unflatten(dict(received))
        before = earlier.pop("term", None)

        def balance_of_layers(balance: Balance) -> Balance:
            own = self.loss.options.ranks.balance
            sparse = [kind.routed for kind in parsed(family.kinds(config))]
            share = sum(sparse[lo:hi]) / max(1, sum(sparse))
            return dataclasses.replace(balance if own is None else own(balance), share=share, before=before)

        def layers(given: RunParams, *_: Any) -> tuple[Tensor, dict[str, Tensor]]:
            passed, of_layers = earlier, dict[str, Tensor]()
            for stack in stacks_of(config):
                if numbers := stack.within(lo, hi):
                    passed, of_layers = _through(stack, numbers, given, part, passed)
            states = passed["x"]
            if is_last:
                states = edit_end(part.options.edits, "hidden", states)
                return states, of_layers | ({"hidden": states} if "hidden" in part.taps else {})
            states = states if self.hooks.full_states is None else self.hooks.full_states(states)
            sent = {**tree.flatten(passed), "x": states}
            routers = part.routers
            if routers is None:
                raise _Done(sent, {})
            _check_counts(config, routers.aux)
            terms = balance_of_layers(routers.balance)
            added, sums = balance_terms(of_layers, part.inputs["valid"], routers.labelled, terms)
            if carries_term(routers):
                sent["term"] = added.to(term_dtype(states.dtype))
            raise _Done(sent, tree.map(lambda x: exact(x.detach()), sums) if routers.aux else {})

        given = self._joint(params, is_last)
        staged = self.loss.with_options(stage=Stage(layers), ranks={"balance": balance_of_layers})
        try:
            total, count, aux = self.result(staged(given, part.batch))
        except _Done as done:
            return done.sent, (torch.zeros((), dtype=torch.long, device=done.sent["x"].device), []), done.aux
        # The stage before waits for a gradient of its terms, also if the loss does not depend on them.
        return {"total": total if before is None else total + 0 * before}, count, aux

    def _joint(self, params: Mapping[str, Any], last: bool) -> Mapping[str, Any]:
        """The params, where those that a split backward pass needs behind one autograd node went through `together`."""
        if self.pipe.schedule not in SPLITTING:
            return params
        if function_of(fnmodels.family_of(self.pipe.config), "shared") is not None:
            joint: Mapping[str, Any] = together(params)  # paths of all layers meet in what they share
            return joint
        rest = {name: value for name, value in params.items() if name != "layers"}
        layers = {number: together(layer) for number, layer in params["layers"].items()}
        return {**(together(rest) if last else rest), "layers": layers}


def _check_counts(config: Any, aux: bool) -> None:
    """ValueError for counts of experts of layers that run several times: a layer's passes are on several stages."""
    if aux and field_of(config, "passes"):
        raise ValueError(
            f"A {config.model_type} runs layers several times, and over pp on several stages, whose counts of experts "
            "are not added up: leave aux and balance_rate out, or pp."
        )


def _through(
    stack: Stack, numbers: range, given: RunParams, part: Microbatch, earlier: Tree
) -> tuple[Tree, dict[str, Tensor]]:
    """(what the layers of a stack with these numbers leave for later ones, their taps), from what earlier ones left.

    Both are trees of the entries that `boundary` lists, without balance terms; {} before the first layer.
    """
    config, family = stack.config, fnmodels.family_of(stack.config)
    params = stack_params(given, stack.name) if stack.name else given
    inputs = stack.part(part.inputs)
    named: Mapping[str, Any] = inputs if isinstance(inputs, Mapping) else {}
    edits, names = part.options.edits, fnmodels.tap_names(config) if part.options.edits else {}
    memory = earlier.get("memory")
    if numbers.start == 0:
        if "x" in earlier:  # of the encoder
            encoder = stacks_of(part.config)[0]
            dropping = with_final_dropout({}, encoder.part(part.inputs), encoder.config)
            memory, _ = unembedded(stack_params(given, encoder.name), earlier["x"], encoder.config, (), dropping)
        states = edit_end(edits, "embed", embedded(params, inputs, config=config))
        beside = layer_inputs_of(params, inputs, states, config=config)
    else:
        states, beside = earlier["x"], earlier.get("layer_inputs")
    shared = function_of(family, "shared")
    if memory is not None:
        named = {**named, "memory": memory, "memory_mask": part.masks["cross"]}
    masks = stack.part(part.masks)
    own = edits_of_stage(edits, names, numbers)
    layout: Any = stack.part(part.layout)
    options = dataclasses.replace(part.options, layout=layout, edits=own)
    taps = tuple(tap for tap in part.taps if tap != "hidden" and _runs(tap.split(".")[1], numbers))
    states, *tapped, carried = fnmodels.run_layers(
        given.with_entries({"layers": numbered(params["layers"])}),
        states,
        masks,
        stack.part(part.freqs_cis),
        numbers.start,
        numbers.stop,
        config=config,
        valid=named.get("valid"),
        routing=named.get("routing"),
        choices=named.get("choices"),
        layer_inputs=beside,
        noise=noise_of(named, config),
        shared=None if shared is None else shared(params, named, config=config),
        carried=earlier.get("carried", {}),
        taps=taps,
        **options.keywords,
    )
    left: Tree = {"x": states, "carried": carried}
    if beside is not None:
        left["layer_inputs"] = beside[:, :, numbers.stop - len(family.kinds(config)) :]
    if memory is not None:
        left["memory"] = memory
    return left, tapped[0] if taps else {}


def _runs(layer: str, numbers: range) -> bool:
    """Whether a tap of this layer, "*" for all, is one of layers with these numbers."""
    return layer == "*" or int(layer) in numbers
