"""Commands of the laboratory. `deepseek_attn.cli` imports a command's module when the command is run."""
