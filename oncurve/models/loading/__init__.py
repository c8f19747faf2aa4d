"""Loading models: local folders, the Hugging Face Hub, GGUF files, the built-in tiny model."""
