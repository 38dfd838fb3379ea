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
from fnmodels.apply import layer_inputs_of
from fnmodels.edits import edit_end, edits_of_stage
from fnmodels.run_params import RunParams
from train.gradients import loss_and_outputs
from train.losses.model_loss import ModelLoss, keywords
from train.losses.moe_balance import Balance, balance_terms

from .boundary import NOTHING_SHARED, Sharing, carries_term, term_dtype
from .joint_node import together
from .microbatch import Microbatch
from .schedule import Pipeline
from .tree_split import numbered


@dataclass(frozen=True)
class StageHooks:
    """What the other dimensions of a mesh add to a stage.

    full_states: gathers the sequence dimension of hidden states before they are sent. dtype: of hidden states between
    stages; None: that of the layers' weights. split_backward: the schedule runs the passes for inputs and for weights
    apart, and parameters are gathered or recomputed, so each layer's must be behind one autograd node. multiple: of
    which lengths of padded microbatches are multiples. sharing: of what else is sent.
    """

    full_states: Callable[[Tensor], Tensor] | None = None
    dtype: torch.dtype | None = None
    split_backward: bool = False
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
        before = earlier.get("term")

        def balance_of_layers(balance: Balance) -> Balance:
            own = self.loss.options.balance
            sparse = [kind.endswith("_moe") for kind in family.kinds(config)]
            share = sum(sparse[lo:hi]) / max(1, sum(sparse))
            return dataclasses.replace(balance if own is None else own(balance), share=share, before=before)

        def layers(given: RunParams, *_: Any) -> tuple[Tensor, dict[str, Tensor]]:
            edits, names = part.options.edits, fnmodels.tap_names(config) if part.options.edits else {}
            own = edits_of_stage(edits, names, range(lo, hi))
            if received:
                states, beside = earlier["x"], earlier.get("layer_inputs")
            else:
                states = edit_end(edits, "embed", family.embed(given, part.inputs, config=config))
                beside = layer_inputs_of(given, part.inputs, states, config=config)
            run: Any = given.run
            options = run.adapted(dataclasses.replace(part.options, layout=part.layout, edits=own), part.masks)
            inputs = part.inputs if isinstance(part.inputs, Mapping) else {}
            taps = tuple(tap for tap in part.taps if tap != "hidden")
            states, *tapped, carried = fnmodels.run_layers(
                {"layers": numbered(given["layers"])},
                states,
                part.masks,
                part.freqs_cis,
                lo,
                hi,
                config=config,
                valid=inputs.get("valid"),
                routing=inputs.get("routing"),
                choices=inputs.get("choices"),
                layer_inputs=beside,
                carried=earlier.get("carried", {}),
                taps=taps,
                **keywords(options),
            )
            of_layers: dict[str, Tensor] = tapped[0] if taps else {}
            if is_last:
                states = edit_end(edits, "hidden", states)
                return states, of_layers | ({"hidden": states} if "hidden" in part.taps else {})
            states = states if self.hooks.full_states is None else self.hooks.full_states(states)
            sent = {"x": states, **tree.flatten({"carried": carried})}
            if beside is not None:
                sent["layer_inputs"] = beside[:, :, hi - len(family.kinds(config)) :]
            routers = part.routers
            if routers is None:
                raise _Done(sent, {})
            terms = balance_of_layers(routers.balance)
            added, sums = balance_terms(of_layers, part.inputs["valid"], routers.labelled, terms)
            if carries_term(routers):
                sent["term"] = added.to(term_dtype(states.dtype))
            raise _Done(sent, tree.map(Tensor.detach, sums) if routers.aux else {})

        staged = self.loss.with_options(stage=layers, balance=balance_of_layers)
        try:
            total, count, aux = self.result(staged(_joint(params, is_last, self.hooks), part.batch))
        except _Done as done:
            return done.sent, (torch.zeros((), dtype=torch.long, device=done.sent["x"].device), []), done.aux
        # The stage before waits for a gradient of its terms, also if the loss does not depend on them.
        return {"total": total if before is None else total + 0 * before}, count, aux


def _joint(params: Mapping[str, Any], last: bool, hooks: StageHooks) -> dict[str, Any]:
    """The params, where those that a split backward pass needs behind one autograd node went through `together`."""
    layers, rest = params["layers"], {name: value for name, value in params.items() if name != "layers"}
    if hooks.split_backward:
        layers = {number: together(layer) for number, layer in layers.items()}
    return {**(together(rest) if last else rest), "layers": layers}
