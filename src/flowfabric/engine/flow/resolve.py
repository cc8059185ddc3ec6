"""Resolution of edges: what the end of an upstream execution means for the groups and children behind it."""
