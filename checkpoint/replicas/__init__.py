"""Copies of host memory on other nodes."""
