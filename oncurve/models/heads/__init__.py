"""Heads on the backbone: LM head, critic, classifier."""
