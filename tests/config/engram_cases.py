"""Engram keys of configs."""

PUBLISHED = {
    "engram_layer_ids": (1, 14),
    "engram_num_embeddings": (384006168, 384016682),
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_vocab_size": 16_000_000,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092,
}
# Tables of 17 and 60 rows: the primes from 2 to 19, each used once.
TINY = PUBLISHED | {
    "engram_layer_ids": (0, 2),
    "engram_num_embeddings": (2 + 3 + 5 + 7, 11 + 13 + 17 + 19),
    "engram_max_ngram_size": 3,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_vocab_size": 1,
    "engram_compressed_vocab_size": 300,
}
