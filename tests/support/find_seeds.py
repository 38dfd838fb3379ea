"""Finds SEEDS of a family with experts: tokens that use every expert, no choice being close, in every form of batch.

python -m tests.support.find_seeds MODEL_TYPE
"""

import sys

import fnmodels
from tests.parity.test_logits import FORMS, MARGIN
from tests.support.cases import Case, assert_routed, cases, is_routed, positions_of, tokens_of
from tests.support.oracle import model_of, params_of

TRIED = 200


def seed_for(case: Case) -> int | None:
    """The first seed with which the variant passes; None if none of TRIED does."""
    params = params_of(model_of(case.values), case.config)
    return next((seed for seed in range(TRIED) if passes(case, params, seed)), None)


def passes(case: Case, params: object, seed: int) -> bool:
    for segment_ids in FORMS.values():
        tokens, positions = tokens_of(case.config, *segment_ids.shape, seed=seed), positions_of(segment_ids)
        prepared = fnmodels.prepare(case.config, tokens, positions=positions, segment_ids=segment_ids)
        try:
            assert_routed(case, params, prepared, MARGIN)
        except AssertionError:
            return False
    return True


def main(model_type: str) -> None:
    mine = [c for c in cases() if c.config.model_type == model_type and c.values is not None and is_routed(c.config)]
    if not mine:
        sys.exit(f"No variant of {model_type!r} has experts.")
    found = {case.name: seed_for(case) for case in mine}
    print(f"SEEDS = { {name: seed for name, seed in found.items() if seed} }")
    for name in (name for name, seed in found.items() if seed is None):
        print(f"{name}: none of {TRIED} seeds; give the variant fewer experts, or more chosen ones.")


if __name__ == "__main__":
    main(*sys.argv[1:])
