"""Several processes as one: who they are, what they exchange, and how one that is late, gone or different is noticed."""
