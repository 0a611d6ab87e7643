"""The nouns that every floor shares: requests, sampling parameters, outputs, configuration, errors. Plain Python."""
