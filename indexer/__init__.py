"""Which endpoint holds which block: block keys, engine hashes, the two-level LRU index, trust."""
