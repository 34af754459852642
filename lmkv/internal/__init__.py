"""The messages that only coordinators and nodes send to each other, generated from `protos/lmkv/internal`."""
