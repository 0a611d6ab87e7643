"""KV write: a step's new keys and values go into the pages of one layer."""
