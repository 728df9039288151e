"""The operations of a sparse decode step. Each folder holds one, with its reference in plain torch."""
