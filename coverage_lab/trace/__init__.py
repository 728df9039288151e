"""The recorded data set of one run of `collect`: schema, writer, reader."""

from coverage_lab.trace.reader import Block, Span, Trace

__all__ = ["Block", "Span", "Trace"]
