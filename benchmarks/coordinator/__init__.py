"""Parts of `control_plane`, `scale` and `shared_map`: fleets of simulated instances, and lookups at a coordinator."""
