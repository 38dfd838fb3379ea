"""Several processes for one run.

spawn         starts the processes of `--mesh` on this machine, without torchrun
launch        how the processes of one run find each other, again after a restart
controller    the first process leads and the others follow its commands; worker: one process and its shards
pace          how fast each process computes by itself
threads       how many threads compute in each process
signals       Ctrl-C and SIGTERM as a request that the loop answers between two steps
"""
