"""Agreement with outside oracles."""
