"""Memory and time of a run before anything starts: no weights, no torch, no GPU.

`model_shape` and `model_table` describe models, `hardware` describes GPUs, and `job` what is planned; `request` makes a job
from a recipe or from flags. `memory` and `step_time` compute a job's memory and time, `fixes` searches for changes that make it
fit, and `plan` combines all of this. `cluster_simulation` extends one GPU's times to many GPUs.
"""
