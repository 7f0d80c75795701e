"""Trackers: W&B, TensorBoard, MLflow, Prometheus and a webhook, each in a process that follows ``metrics.jsonl``.

The training process imports none of their libraries; it starts the processes (``tracker_processes.py``).
"""
