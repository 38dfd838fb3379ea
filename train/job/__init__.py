"""A training run, as `python -m train --run DIR`: from settings to a trained checkpoint, through stops and resumes.

settings        every setting as one frozen dataclass; mesh_flags: how processes share the work
tasks/          what is trained: data, losses, evaluation and model card; task: what the loop asks of them
blueprint       model and losses, of which each process makes its programs
recipe          the optimizer, the options of the step and the dtype that the settings name
chosen_settings the command line, the recorded run and the defaults as settings
run             the one loop; saving: its saved steps and checkpoints; heldout: held-out loss
flops           tokens per second and MFU; profile: a chrome trace
run_folder      the lock and the files of a run; metrics_log: metrics.jsonl; report, progress, pictures: its output
processes/      several processes for one run
"""
