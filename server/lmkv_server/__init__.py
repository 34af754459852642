"""The server processes of lmkv, a package each: coordinator, node and proxy. They share `http`, and nothing else."""
