"""Attention as libraries fuse it."""
