"""Questions asked of a trace: `compute` returns a tidy frame, `plot` draws it."""
