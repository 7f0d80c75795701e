"""Real runs on this machine, for tests and benchmarks: started, forked, watched and read."""
