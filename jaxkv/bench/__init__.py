"""A load generator for OpenAI-compatible servers. It knows HTTP and no engine, and is thrifty: it shares the CPU."""
