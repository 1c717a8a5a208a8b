"""A checkpoint root: every kind of store, and every call to one with a deadline."""
