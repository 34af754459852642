"""Parts of `data_path` and `channels`: what an engine and its node do."""
