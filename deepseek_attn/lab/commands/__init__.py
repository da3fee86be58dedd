"""Commands of the laboratory, which `deepseek_attn.cli` imports when one of them is asked for."""
