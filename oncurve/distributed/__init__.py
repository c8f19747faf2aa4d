"""Several processes as one trainer: ranks, collectives, launch, heartbeats, signals."""
