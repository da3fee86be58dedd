"""A model for EleutherAI's lm-evaluation-harness: `deepseek_attn.lab.lm_eval.model`."""
