"""Loading a model: local folders, the Hugging Face Hub, GGUF files, the built-in tiny model."""
