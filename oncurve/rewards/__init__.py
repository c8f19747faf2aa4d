"""What grades a completion: rewards, the mix that sums them, and how those of a recipe are built."""
