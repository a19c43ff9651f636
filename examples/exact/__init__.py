"""Engines that run the exact model: adapters of five, and the bugs that were planted in them.

`python -m examples.exact --engine NAME` plays random histories on one, and compares every text with the right one.
"""
