"""Rewards by models: reward models, LLM judges, process supervision."""
