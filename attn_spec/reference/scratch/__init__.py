"""Attention written to be read."""
