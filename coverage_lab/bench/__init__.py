"""Times of the kernels and of what they are compared with, each after a check in the same run."""
