"""RULER's synthetic tasks (Hsieh et al., 2024), generated to a length in tokens; one file a kind of task.

Parameters, prompts and rules are those of NVIDIA/RULER (Apache-2.0); where a generator differs, its
docstring says so. `datasets/ruler.py` is the data set.
"""
