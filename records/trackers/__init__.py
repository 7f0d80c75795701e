"""Trackers: W&B, TensorBoard and MLflow, each fed by a separate process that follows ``metrics.jsonl``.

The training process imports none of their libraries; it starts the processes (``tracker_processes.py``).
"""
