"""Weights sharded over ranks: FSDP2 and tensor parallelism."""
