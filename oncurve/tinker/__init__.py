"""A server for the Tinker SDK: its HTTP interface over one base model with LoRA adapters, on this machine."""
