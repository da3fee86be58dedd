"""The lightning indexer: queries, scores, and their top-k."""
