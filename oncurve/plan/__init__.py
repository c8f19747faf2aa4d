"""Memory and time of a run before anything starts: no weights, no torch, no GPU.

`model_shape` and `model_table` describe models, `hardware` GPUs, `job` what is planned. `memory` and `step_time` compute it,
`fixes` searches for changes that make it fit, `plan` combines them. `cluster_simulation` extends one GPU's times to many GPUs.
"""
