"""Verifiable rewards: each decides whether an answer is correct."""
