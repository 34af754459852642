"""What only coordinators and nodes say to each other: generated from `protos/lmkv/internal`."""
