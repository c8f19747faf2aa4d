"""Tools and stateful environments: what the policy can call, how its calls are read, and the episodes that run them."""
