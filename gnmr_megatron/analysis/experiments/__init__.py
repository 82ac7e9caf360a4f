"""Experiment suites: a matrix of runs as data, taken through the command line, and what came out of it."""
