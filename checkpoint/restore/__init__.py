"""A saved state back into tensors, of any layout."""
