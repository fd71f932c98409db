"""Algorithms: how a policy is learned from labelled steps, and what it is worth."""
