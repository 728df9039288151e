"""`python -m coverage_lab` is `coverage-lab`."""

from coverage_lab.cli import main

main()
