"""Parts of `benchmarks.tiers`: the disk tier, the remote tier, and the start of a node that has chunks."""
