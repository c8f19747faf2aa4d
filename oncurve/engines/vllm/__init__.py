"""vLLM as the engine, in its own process."""
