"""The corpus: openly licensed sources, templated problems, tokenizer, token shards."""
