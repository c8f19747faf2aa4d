"""The policy and everything around a transformers model: loading, packing, heads, LoRA, fast paths, sharding."""
