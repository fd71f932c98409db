"""Datasets: in memory, on disk, and in other people's formats. Rewards are no part of them."""
