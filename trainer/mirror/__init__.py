"""Trackers: W&B, TensorBoard and MLflow, each fed by a process of its own that follows ``metrics.jsonl``.

The training process imports none of them. ``processes.py`` is its side; the rest runs in the mirrors.
"""
