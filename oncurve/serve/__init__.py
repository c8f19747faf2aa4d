"""An OpenAI-compatible endpoint over the native engine: chat and text completions, streamed or complete."""
