"""The benchmark: FlowFabric beside the raw limit and its peers."""
