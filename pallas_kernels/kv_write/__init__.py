"""Writing the keys and values of new tokens into the pages of the pool."""
