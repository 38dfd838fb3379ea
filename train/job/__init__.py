"""The main job, `python -m train --run DIR`: from settings to a trained checkpoint, through stops and resumes.

settings        every setting as one frozen dataclass; setting_types, lora_flag, mesh_flags: their values
setup           settings, text, tokenizer and model before the first step; preflight: what can be refused at once
recipe          optimizer and extra loss terms that the settings name; initial_model: new, loaded, or with adapters
run             the loop; heldout: held-out loss; flops: tokens per second and MFU; profile: a chrome trace
run_folder      the lock and the files of a run; metrics_log: metrics.jsonl; report, progress, pictures: its output
processes/      several processes for one run
"""
