"""Text to tokens and back: tokenizer and chat encodings."""
