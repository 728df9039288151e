"""How good an answer is, from 0 to 1: the rules of the benchmarks, one kind a file."""
