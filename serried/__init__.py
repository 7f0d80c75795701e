"""Distributed training with the same loss curve on every parallel layout."""
