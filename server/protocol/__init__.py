"""The wire: what clients may send and what they get back, as pydantic models (they are the OpenAPI page, too)."""
