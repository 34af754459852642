"""`lmkv doctor`: whether a host is fit for what its configuration says, and what to do where it is not."""
