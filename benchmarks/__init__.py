"""What lmkv costs and what it saves, measured on this machine (docs/benchmarks.md).

`python -m benchmarks.NAME` with NAME `data_path`, `control_plane`, `doc_qa` or `rivals`; `python -m benchmarks.tables`
renders results.
"""
