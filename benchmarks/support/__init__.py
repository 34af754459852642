"""What all benchmarks share: command line, rows and reports, timing, the machine, engines, pictures of results."""
