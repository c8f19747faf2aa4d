"""Rewards given by models: reward models, judges, process supervision."""
