"""Projected step times beside measured ones."""
