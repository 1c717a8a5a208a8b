"""Outlast keeps large training jobs running through failures."""

__version__ = "0.2.0.dev0"
