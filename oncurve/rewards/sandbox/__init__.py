"""Where programs of a model run: one process each, without network, home, environment or a way to reach another process."""
