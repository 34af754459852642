"""`lmkv engines`: the engines of a proxy."""
