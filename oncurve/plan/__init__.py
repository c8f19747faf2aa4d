"""Memory and time of a run, before anything is started: no weights, no torch, no GPU.

`shapes` and `gpus` say what there is, `job` what is asked, `memory` and `seconds` what it takes, `fixes` what would make it
fit, and `planned` puts them together. `cluster` goes on from one GPU's measured times to many GPUs.
"""
