"""Pipelines: what runs when, where, and what is remembered."""
