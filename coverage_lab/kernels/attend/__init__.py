"""Attention of one decode step over page lists of any length."""
