"""The layout map that coordinators share over Valkey: what is published there, and what is followed."""
