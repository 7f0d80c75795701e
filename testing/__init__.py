"""Tools for tests and benchmarks to start, fork, watch and read real runs on this machine."""
