"""An OpenAI-compatible endpoint over the native engine: chat and plain completions, streamed or whole."""
