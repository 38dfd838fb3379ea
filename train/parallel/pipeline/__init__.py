"""Pipeline parallelism: a stage is a slice of the params tree and a pure function, run by torch's own schedules.

    schedule        which layers are on which rank, for each schedule: `pipeline(config, ranks, name)`
    tree_split      the slice of a params tree that a rank holds: `share`
    gradients       gradients, losses and outputs of this rank's stages: `gradient_sums`
    runner          torch's schedules run over the stages; microbatch: what every stage needs of one microbatch
    staged_loss     one stage's part of a loss; joint_node: one graph node for split backward passes
    stages          pipeline stages inside a mesh with the other dimensions
    timeline        how long ranks wait under a schedule, and how many activations they hold
    types           `Microbatch` and `StageHooks`

This file imports nothing, so that importing one module of the folder loads no other.
"""
