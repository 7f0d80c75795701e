"""Conversion of other frameworks' training configs to overrides of train.py, for ``serried convert``.

``formats.yaml`` names the keys of each format, ``foreign_config`` reads files into facts, and ``overrides_of_facts``
computes overrides from the facts.
"""
