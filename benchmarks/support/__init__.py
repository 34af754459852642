"""What all benchmarks share: command line, rows and reports, timing, the machine, engines, charts of results."""
