"""Partial attention results into one, by their log-sum-exp."""
