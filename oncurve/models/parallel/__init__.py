"""Weights over several ranks: FSDP2 and tensor parallelism."""
