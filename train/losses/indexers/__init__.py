"""Training of the indexers that choose attention's keys: `loss` for a step, `teaching` within a layer."""
