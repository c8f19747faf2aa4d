"""What stands on top of the backbone: LM head, critic, classifier."""
